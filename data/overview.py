"""Ranges of size, spacing and intensity over all volumes, and the volumes that do not fit the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from data.geometry import geometry_of
from data.reading import VolumeFacts
from runtime.files import counted, printable
from settings import ConfigError, Settings
from settings.data import DataSettings

# A volume is an outlier if it differs from the median by this factor and by this many robust standard deviations.
SIZE_FACTOR = 2.0
# A window is one for all volumes. Percentiles are each volume's own, and MR has no unit: 8 bits beside 12 are natural.
INTENSITY_FACTORS = {"window": 5.0, "percentile": 30.0}
DEVIATIONS = 6.0
FEWEST = 4

# Resampling with splines makes positive volumes negative by this share of their range.
LARGEST_RINGING = 0.1

# The share of equal neighbours. Label maps of 3 to 400 values reach 0.8 to 1; MR images 0.03 to 0.07 as they are, and
# at most 0.63 once they are enlarged four times and reduced to 32 grey levels.
LEAST_OF_LABELS = 0.7

AXES = "xyz"

# Of fewer volumes the 5th and 95th percentile are hardly inside the range.
FEWEST_FOR_PERCENTILES = 20
PERCENTILES = {"minimum": 0, "5th percentile": 5, "median": 50, "95th percentile": 95, "maximum": 100}


INTENSITIES = (("low", "1st percentile"), ("median", "median"), ("high", "99th percentile"))


def looks_like_labels(facts: VolumeFacts) -> bool:
    """Return whether a volume has whole values, none negative, however many, in regions of equal ones."""
    return facts.is_whole and 0 <= facts.minimum < facts.maximum and facts.equal_neighbours >= LEAST_OF_LABELS


def modality_of(facts: VolumeFacts) -> str:
    """Guess what kind of volume this is from its intensities."""
    if -facts.minimum <= LARGEST_RINGING * facts.high:
        return "MR or another positive modality"
    if -4096 <= facts.minimum <= -500 and facts.high > 0:
        return "CT"
    return "a map with both signs" if max(-facts.minimum, facts.maximum) < 100 else "values of both signs"


def stage_problems(settings: Settings, grid: Sequence[int]) -> list[str]:
    """Return what the settings refuse about a grid."""
    try:
        settings.with_overrides({"data.voxel_size": list(grid)})
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def range_lines(facts: Sequence[VolumeFacts], s: DataSettings) -> list[str]:
    """Return the ranges of all volumes, axis by axis, as they are turned to RAS."""
    sizes = np.array([turned(fact, s)[0] for fact in facts])
    spacings = np.array([turned(fact, s)[1] for fact in facts if fact.has_spacing])
    lines = ["size:       " + _axes(sizes, "{:g}", " voxels")]
    if len(spacings):
        lines.append("spacing:    " + _axes(spacings, "{:.3g}", " mm"))
    if len(spacings) < len(facts):
        without = len(facts) - len(spacings)
        verb = "stores" if without == 1 else "store"
        lines.append(f"spacing:    {without} of {counted(len(facts), 'volume')} {verb} none")
    for name, title in INTENSITIES:
        values = np.array([getattr(fact, name) for fact in facts])
        lines.append(f"intensity:  {title} {_range(values, '{:g}')}")
    return lines


def statistics(facts: Sequence[VolumeFacts], s: DataSettings) -> dict[str, dict[str, float]]:
    """Return percentiles of sizes, spacings and intensities over all volumes, by what was measured."""
    measures = _shape_measures(facts, s)
    measures |= {f"{title} of intensities": [getattr(fact, name) for fact in facts] for name, title in INTENSITIES}
    known = {name: [value for value in values if not math.isnan(value)] for name, values in measures.items()}
    return {name: _percentiles(values) for name, values in known.items() if values}


def outlier_lines(names: Sequence[str], facts: Sequence[VolumeFacts], s: DataSettings) -> list[str]:
    """Return one line for each volume that does not fit the others by size, spacing, intensity or modality."""
    if len(facts) < FEWEST:
        return []
    unusual: dict[str, list[str]] = {}
    largest = [max(abs(fact.maximum), abs(fact.minimum)) for fact in facts]
    intensities = {"largest intensity": largest, "range of intensities": [fact.high - fact.low for fact in facts]}
    factor = INTENSITY_FACTORS[s.intensity.of_channel(0)[0]]
    for measures, least in ((_shape_measures(facts, s), SIZE_FACTOR), (intensities, factor)):
        for title, values in measures.items():
            for name, text in _far_from_median(names, values, least):
                unusual.setdefault(name, []).append(f"{title} {text}")
    kinds = [modality_of(fact) for fact in facts]
    counts = Counter(kinds).most_common()
    usual, count = counts[0]
    is_mixed = count <= len(kinds) / 2
    for name, kind in zip(names, kinds, strict=True):
        if kind != usual and not is_mixed:
            unusual.setdefault(name, []).append(f"looks like {kind}, most others like {usual}")
    lines = [f"{printable(name)}: {'; '.join(texts)}" for name, texts in sorted(unusual.items())]
    if is_mixed:
        mixed = ", ".join(f"{number} {'looks' if number == 1 else 'look'} like {kind}" for kind, number in counts)
        lines.append(f"several modalities in one set: {mixed}")
    return lines


def _shape_measures(facts: Sequence[VolumeFacts], s: DataSettings) -> dict[str, list[float]]:
    """Return the sizes and spacings of all volumes along each axis; NaN for a volume that stores no spacing."""
    shapes = [turned(fact, s) for fact in facts]
    measures: dict[str, list[float]] = {}
    for axis, letter in enumerate(AXES):
        measures[f"size along {letter}"] = [float(size[axis]) for size, _ in shapes]
        spacings = [mm[axis] if fact.has_spacing else math.nan for (_, mm), fact in zip(shapes, facts, strict=True)]
        measures[f"spacing along {letter} in mm"] = spacings
    return measures


def turned(facts: VolumeFacts, s: DataSettings) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the size and spacing of a volume with its axes in the order of RAS."""
    axes = geometry_of(facts.header, s).axes
    spacing = facts.header.spacing_mm
    return tuple(facts.shape[axis] for axis in axes), tuple(spacing[axis] for axis in axes)


def _far_from_median(names: Sequence[str], values: Sequence[float], factor: float) -> Iterator[tuple[str, str]]:
    """Yield the names of values far from the median on a logarithmic scale, each with what is unusual; skip NaN."""
    known = [(name, value) for name, value in zip(names, values, strict=True) if not math.isnan(value)]
    logs = np.array([math.log(value) if 0 < value < math.inf else math.nan for _, value in known])
    if not known or np.isnan(logs).sum() > len(logs) / 2:
        return
    middle = float(np.nanmedian(logs))
    deviation = 1.4826 * float(np.nanmedian(np.abs(logs - middle)))
    for (name, value), log_value in zip(known, logs, strict=True):
        distance = abs(log_value - middle)
        if math.isnan(distance) or (distance > math.log(factor) and distance > DEVIATIONS * deviation):
            yield name, f"{value:.4g}, median {math.exp(middle):.4g}"


def _percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return the range, the median and two percentiles, which are values of volumes."""
    ends = {word: float(np.percentile(values, share, method="nearest")) for word, share in PERCENTILES.items()}
    return {**ends, "median": float(np.median(values))}


def _axes(values: np.ndarray, form: str, unit: str) -> str:
    return ", ".join(f"{AXES[axis]} {_range(values[:, axis], form)}" for axis in range(3)) + unit


def _range(values: np.ndarray, form: str) -> str:
    low, some, middle, most, high = map(form.format, _percentiles(values).values())
    if low == high:
        return low
    inner = f", 90 % from {some} to {most}" if len(values) >= FEWEST_FOR_PERCENTILES else ""
    return f"{low} to {high} (median {middle}{inner})"
