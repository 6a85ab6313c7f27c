"""What the volumes of a folder are like, from the pass that checks them. Never imports torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from data.checking import Checked, VolumeFacts, looks_like_labels, problems_of
from data.discovery import DiscoveredVolume, class_names_of
from data.geometry import range_problem
from data.header import Note, problem_lines
from data.overview import modality_of, outlier_lines, turned
from data.volumes import check_source, suspected_pattern
from runtime.files import counted, printable
from settings import DataError
from settings.data import DataSettings

CT = "CT"
LABEL_MAPS = "label maps"
SMALL_SET = 50
"""Sets below this size get augmentation and a smaller network, and samples may be copies."""

Axes = tuple[float, ...]


class Spread(NamedTuple):
    """The 5th, 50th and 95th percentile of a measure over the volumes."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Measure some values."""
        return cls(*np.percentile(np.asarray(values, float), (5, 50, 95)).tolist())


@dataclass(frozen=True)
class Fingerprint:
    """The facts of a set that a plan is made of.

    `sizes` (voxels) and `spacings` (mm) have one row per volume, with the axes in the order of RAS.
    `num_flat`: volumes without contrast between the percentiles that scale them. `ranges`: the medians of these
    percentiles, channel by channel. `group_by` names patients if the names of the volumes suggest that some have
    several. `problems` are those of files that could not be used, which are not in the other figures.
    """

    source: str
    volumes: tuple[DiscoveredVolume, ...]
    sizes: tuple[Axes, ...]
    spacings: tuple[Axes, ...]
    num_without_spacing: int
    num_channels: int
    kinds: dict[str, int]
    lowest: Spread
    low: Spread
    median: Spread
    high: Spread
    largest: float
    background: float
    num_flat: int
    ranges: tuple[tuple[float, float], ...] = ()
    classes: dict[str, int] = field(default_factory=dict)
    group_by: str | None = None
    num_left_out: int = 0
    unusual: tuple[str, ...] = ()
    problems: tuple[Note, ...] = ()

    @property
    def number(self) -> int:
        """Return the number of volumes."""
        return len(self.sizes)

    @property
    def is_small(self) -> bool:
        """Return whether so few volumes need augmentation and small networks, and samples may be copies of them."""
        return self.number < SMALL_SET

    @property
    def kind(self) -> str:
        """Return what most of the volumes are by their values."""
        return max(self.kinds, key=lambda kind: self.kinds[kind])

    @property
    def has_spacing(self) -> bool:
        """Return whether every file stores its spacing."""
        return not self.num_without_spacing

    @property
    def extents(self) -> np.ndarray:
        """Return the field of view of each volume, in mm, or in voxels where some have no spacing."""
        return np.array(self.sizes) * (np.array(self.spacings) if self.has_spacing else 1.0)

    @property
    def spacing(self) -> Axes:
        """Return the median spacing of each axis; 1 where some volumes have none."""
        return tuple(np.median(self.spacings, axis=0).tolist()) if self.has_spacing else (1.0, 1.0, 1.0)


def take_fingerprint(s: DataSettings, seed: int, in_channels: int | None = None) -> Fingerprint:
    """Check every volume of a source and return what those are like that can be used.

    All volumes need `in_channels` channels; None: as many as most of them have. Raises DataError with every problem if
    half of the volumes or more have one, or if some have no class. What was measured is kept in runs/checks, so only
    new and changed files are read.
    """
    source = check_source(s.model_copy(update={"prepared": "none"}), seed, in_channels=1)
    known = Counter(checked.facts.num_channels for checked in source.checked if checked.facts is not None)
    num_channels = in_channels or (known.most_common(1)[0][0] if known else 1)
    volumes, facts, problems = [], [], []
    for item, checked in zip(source.volumes, source.checked, strict=True):
        own = _problems(checked, s, num_channels)
        problems += own
        if not own and checked.facts is not None:
            volumes.append(item)
            facts.append(checked.facts)
    if source.unlabelled or 2 * len(volumes) <= len(source.volumes):
        problems += source.unlabelled
        number = counted(len(problems), "problem")
        raise DataError(f"--data: {printable(s.source)} has {number}:\n{problem_lines(problems)}")
    return fingerprint_of(volumes, facts, s, len(source.left_out), problems)


def fingerprint_of(
    volumes: Sequence[DiscoveredVolume],
    facts: Sequence[VolumeFacts],
    s: DataSettings,
    num_left_out: int = 0,
    problems: Sequence[Note] = (),
) -> Fingerprint:
    """Return what volumes of the same number of channels are like; `problems` are those of volumes not among them."""
    counts = Counter(item.class_name for item in volumes)
    sizes, spacings = zip(*(turned(fact, s) for fact in facts), strict=True)
    ends = [np.median([getattr(fact, name) for fact in facts], axis=0).tolist() for name in ("lower", "upper")]
    are_maps = all(looks_like_labels(fact) for fact in facts)
    return Fingerprint(
        source=s.source,
        volumes=tuple(volumes),
        sizes=tuple(tuple(map(float, size)) for size in sizes),
        spacings=spacings,
        num_without_spacing=sum(not fact.has_spacing for fact in facts),
        num_channels=facts[0].num_channels,
        kinds={LABEL_MAPS: len(facts)} if are_maps else dict(Counter(map(modality_of, facts)).most_common()),
        lowest=Spread.of([fact.minimum for fact in facts]),
        low=Spread.of([fact.low for fact in facts]),
        median=Spread.of([fact.median for fact in facts]),
        high=Spread.of([fact.high for fact in facts]),
        largest=max(fact.maximum for fact in facts),
        background=float(np.median([fact.background for fact in facts])),
        num_flat=sum(_is_flat(fact) for fact in facts),
        ranges=tuple(zip(*ends, strict=True)),
        classes={name: counts[name] for name in class_names_of(volumes)},
        group_by=suspected_pattern(volumes),
        num_left_out=num_left_out,
        unusual=tuple(outlier_lines([item.name for item in volumes], facts, s)),
        problems=tuple(problems),
    )


def _problems(checked: Checked, s: DataSettings, num_channels: int) -> list[Note]:
    """Return what keeps a volume from being used; one that is nearly all background is left to the choice of range."""
    facts = checked.facts
    if facts is None:
        return list(checked.problems)
    problems = problems_of(checked.path, facts, s, num_channels)
    if s.intensity.of_channel(0)[0] == "percentile" and _is_flat(facts) and facts.minimum < facts.maximum:
        flat = range_problem(facts.lower, facts.upper, s.intensity)
        return [problem for problem in problems if problem.text != flat]
    return problems


def _is_flat(facts: VolumeFacts) -> bool:
    return not facts.num_not_finite and any(a >= b for a, b in zip(facts.lower, facts.upper, strict=True))


def found_lines(facts: Fingerprint) -> list[str]:
    """Return what the volumes are like, a line for each fact."""
    spacing = f"{facts.num_without_spacing} of {facts.number} files store none"
    if facts.has_spacing:
        spacing = f"{_axes(facts.spacings)} mm"
    low, median, high = map(_spread, (facts.low, facts.median, facts.high))
    background = "" if math.isnan(facts.background) else f"; background: {facts.background:.0%} of a volume"
    kinds = ", ".join(f"{kind} ({count} of {facts.number})" for kind, count in facts.kinds.items())
    lines = [
        f"volumes:   {facts.number} in {printable(facts.source)}",
        f"size:      {_axes(facts.sizes)} voxels",
        f"spacing:   {spacing}",
        f"intensity: 1st percentile {low}, median {median}, 99th {high}{background}",
        f"kind:      {kinds}, by the values; {counted(facts.num_channels, 'channel')}",
    ]
    if facts.classes:
        shown = [f"{printable(name)} ({count})" for name, count in list(facts.classes.items())[:8]]
        lines.append(f"classes:   {', '.join(shown)}{' ...' if len(facts.classes) > 8 else ''}")
    if facts.num_left_out:
        lines.append(f"left out:  {counted(facts.num_left_out, 'file')}; check_data.py says which and why")
    return lines


def _axes(rows: Sequence[Sequence[float]]) -> str:
    axes = zip("xyz", zip(*rows, strict=True), strict=True)
    return ", ".join(f"{axis} {_spread(Spread.of(values))}" for axis, values in axes)


def _spread(spread: Spread) -> str:
    low, median, high = (f"{value:.3g}" for value in spread)
    return median if low == high else f"{median} ({low} to {high})"
