"""Finds and checks what every volume is paired with, before anything is trained."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.checking import check_files, outside_windows
from data.formats import read_header
from data.pairs.geometry import mismatch
from data.pairs.label_maps import class_values, label_problem, mask_problem, values_text
from data.pairs.numbers import Row, read_numbers
from data.pairs.partners import find_partners
from data.reading import VolumeFacts, unusable
from data.volumes import DataSplit, VolumeFile
from runtime.files import run_folder
from runtime.files.names import counted, printable
from settings import DataError
from settings.conditioning import ConditioningSettings, ScanSettings, TabularSettings, VolumeSettings
from settings.conditioning.scan import REGIONS
from settings.data import DataSettings, IntensitySettings

log = logging.getLogger(__name__)

LABELS = "ldm.conditioning.label_map"
VOLUME = "ldm.conditioning.volume"
MASKS = "ldm.conditioning.volume.degrade.hole"
REGION_KEY = "ldm.conditioning.scan.regions"


Partners = tuple[VolumeFile, ...]
Check = Callable[[Path, VolumeFacts], str | None]
"""Returns why a file cannot be a partner, or None if it can."""


@dataclass(frozen=True)
class Pairs:
    """The partners of all volumes, first those of the training volumes, then those of the validation volumes.

    A kind that is not in use is empty. A volume that is made from its target is the target itself. `label_values` are
    those of the classes where they are not the classes' numbers.
    """

    labels: Partners = ()
    volumes: Partners = ()
    masks: Partners = ()
    numbers: tuple[Row, ...] = ()
    regions: tuple[Row, ...] = ()
    label_values: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """Return a hash of the content of all partners, which decides what a run learns."""
        kinds = {"labels": self.labels, "volumes": self.volumes, "masks": self.masks}
        parts = [f"{kind}\t{file.digest}" for kind, files in kinds.items() for file in files]
        parts += [json.dumps(row, sort_keys=True) for row in (*self.numbers, *self.regions)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


NO_PAIRS = Pairs()
"""The partners of volumes that need none."""


def prepare_pairs(s: ConditioningSettings, data: DataSettings, volumes: DataSplit) -> Pairs:
    """Find and check the partners of all volumes; raise one DataError that lists every problem."""
    pairs, problems = check_pairs(s, data, (*volumes.train, *volumes.val))
    if problems:
        number = counted(len(problems), "problem")
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise DataError(f"ldm.conditioning: {number} with the volumes' partners:\n{lines}")
    return pairs


def check_pairs(s: ConditioningSettings, data: DataSettings, files: Sequence[VolumeFile]) -> tuple[Pairs, list[str]]:
    """Return the partners of `files` and every problem with them; without a problem no partner is missing."""
    problems: list[str] = []
    number, volume = s.label_map.num_classes, s.volume

    def partners(source: str | None, reading: DataSettings, where: str, channels: int, check: Check) -> Partners:
        if source is None:
            return ()
        found, wrong = _partners(source, files, reading, where, channels, check, data)
        problems.extend(wrong)
        return tuple(found)

    as_labels = label_reading(data, number)
    maps: dict[Path, VolumeFacts] = {}

    def as_map(path: Path, facts: VolumeFacts) -> str | None:
        maps[path] = facts
        return label_problem(path, facts)

    labels = partners(s.label_map.source, as_labels, LABELS, 1, as_map)
    values: tuple[int, ...] = ()
    if maps and not problems:
        values, too_many = class_values(maps, number, LABELS)
        problems += [too_many] if too_many else []
    if values:
        log.info("%s: the label values %s are the classes 0 to %d", LABELS, values_text(values), len(values) - 1)
    masks = partners(volume.degrade.masks, as_labels, MASKS, 1, mask_problem)
    rows, wrong = read_numbers(s.tabular, files) if s.tabular.table is not None else ([], [])
    regions, unknown = _read_regions(s.scan, files)
    problems += [*wrong, *unknown]
    if volume.is_from_target:
        return Pairs(labels, tuple(files), masks, tuple(rows), regions, values), problems
    source, reading = volume.source if volume.is_used else None, volume_reading(data, volume)
    volumes = partners(
        source, reading, VOLUME, volume.num_channels, lambda p, f: volume_problem(p, f, reading, volume.num_channels)
    )
    return Pairs(labels, volumes, masks, tuple(rows), regions, values), problems


def _read_regions(s: ScanSettings, files: Sequence[VolumeFile]) -> tuple[tuple[Row, ...], list[str]]:
    """Return the body regions of each volume that its table has, and a line for each problem with them."""
    if s.table is None:
        return (), []
    rows, problems = read_numbers(TabularSettings(table=s.table, categorical=s.columns), files, REGION_KEY)
    found = sorted({row[column] for row in rows for column in s.columns} - {*REGIONS, ""})
    problems += [
        f"{REGION_KEY}: {printable(s.table)} has the region {printable(word)}; allowed: {', '.join(REGIONS)}; "
        "correct it"
        for word in found
    ]
    return tuple(rows), problems


def volume_reading(data: DataSettings, s: VolumeSettings) -> DataSettings:
    """Return the settings with which condition volumes are read: as the volumes, with intensities of their own."""
    return data if s.is_from_target else data.model_copy(update={"intensity": s.intensity})


def volume_problem(
    path: Path, facts: VolumeFacts, s: DataSettings, num_channels: int, intensity: str = f"{VOLUME}.intensity"
) -> str | None:
    """Return why a file cannot be a condition of `num_channels` channels, or None if it can.

    `intensity` is the section with the rules of its intensities.
    """
    if facts.num_channels != num_channels:
        return (
            f"{printable(path)}: {counted(facts.num_channels, 'channel')} ({' x '.join(map(str, facts.axes))}); "
            f"{VOLUME}.num_channels is {num_channels}; change one of the two"
        )
    problem = unusable(facts, s, intensity) or next(outside_windows(facts, s, intensity), None)
    return None if problem is None else f"{printable(path)}: {problem}"


def label_reading(data: DataSettings, num_classes: int) -> DataSettings:
    """Return the settings with which label maps are measured; they are not scaled, and not kept on the voxel grid."""
    window = IntensitySettings(mode="window", lower=-1.0, upper=float(num_classes))
    return data.model_copy(update={"intensity": window, "prepared": "none", "frame": None, "spacing": None})


def _partners(
    source: str,
    files: Sequence[VolumeFile],
    s: DataSettings,
    where: str,
    num_channels: int,
    problem_of: Check,
    data: DataSettings,
) -> tuple[list[VolumeFile], list[str]]:
    found, problems = find_partners(source, files, s, where)
    paired = [file for file in files if file.name in found]
    checked = check_files([found[file.name] for file in paired], s, num_channels, run_folder.CHECKS) if paired else []
    partners = []
    for file, result in zip(paired, checked, strict=True):
        facts = result.facts
        if facts is None:
            problems += map(str, result.problems)
            continue
        reasons = (
            mismatch(result.path, facts.header, file.path, read_header(file.path), data),
            problem_of(result.path, facts),
        )
        problems += [reason for reason in reasons if reason is not None]
        partners.append(VolumeFile(result.path, printable(result.path), None, facts.num_channels, facts.digest))
    return partners, problems
