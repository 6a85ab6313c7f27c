"""Ranges of size, spacing and intensity over all volumes, and the volumes that do not fit the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from data.checking import VolumeFacts
from data.geometry import geometry_of
from runtime.files import printable
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
    """Return the ranges of all volumes, those of sizes and spacings along the axes of RAS."""
    measures = _shape_measures(facts, s)
    for name, title in (("low", "1st percentile"), ("median", "median"), ("high", "99th percentile")):
        measures[f"{title} of intensities"] = [getattr(fact, name) for fact in facts]
    lines = []
    for title, values in measures.items():
        known = [value for value in values if not math.isnan(value)]
        if known:
            low, some, middle, most, high = (f"{end:.4g}" for end in np.percentile(known, (0, 5, 50, 95, 100)))
            spread = f"{low} to {high} (median {middle}, 90 % from {some} to {most})"
            lines.append(f"{title}: {low if low == high else spread}")
    return lines


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
    usual, _ = Counter(kinds).most_common()[0]
    for name, kind in zip(names, kinds, strict=True):
        if kind != usual:
            unusual.setdefault(name, []).append(f"looks like {kind}, most others like {usual}")
    return [f"{printable(name)}: {'; '.join(texts)}" for name, texts in sorted(unusual.items())]


def _shape_measures(facts: Sequence[VolumeFacts], s: DataSettings) -> dict[str, list[float]]:
    """Return the sizes and spacings of all volumes along each axis; NaN for a volume that stores no spacing."""
    shapes = [turned(fact, s) for fact in facts]
    measures: dict[str, list[float]] = {}
    for axis, letter in enumerate("xyz"):
        measures[f"size along {letter}"] = [float(size[axis]) for size, _ in shapes]
        spacings = [mm[axis] if fact.has_spacing else math.nan for (_, mm), fact in zip(shapes, facts, strict=True)]
        measures[f"spacing along {letter} in mm"] = spacings
    return measures


def turned(facts: VolumeFacts, s: DataSettings) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the size and spacing of a volume with its axes in the order of RAS."""
    axes = geometry_of(facts, s).axes
    spacing = facts.spacing_mm
    return tuple(facts.shape[axis] for axis in axes), tuple(spacing[axis] for axis in axes)


def _far_from_median(names: Sequence[str], values: Sequence[float], factor: float) -> Iterator[tuple[str, str]]:
    """Yield the names of values far from the median on a logarithmic scale, each with what is unusual; skip NaN."""
    known = [(name, value) for name, value in zip(names, values, strict=True) if not math.isnan(value)]
    logs = np.array([math.log(value) if 0 < value < math.inf else math.nan for _, value in known])
    if not known or np.isnan(logs).sum() > len(logs) / 2:
        return
    middle = float(np.nanmedian(logs))
    distances = np.abs(logs - middle)
    usual = max(math.log(factor), DEVIATIONS * 1.4826 * float(np.nanmedian(distances)))
    for (name, value), distance in zip(known, distances, strict=True):
        if not distance <= usual:
            yield name, f"{value:.4g}, median {math.exp(middle):.4g}"
