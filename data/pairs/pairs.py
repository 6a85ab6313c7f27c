"""Finds and checks what every volume is paired with, before anything is trained."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.formats import read_header
from data.pairs.geometry import mismatch
from data.pairs.label_maps import label_problem
from data.pairs.partners import find_partners
from data.preparation.checking import check_files
from data.reading import VolumeFacts
from data.volumes import DataSplit, VolumeFile
from settings import DataError
from settings.conditioning import ConditioningSettings
from settings.data import DataSettings, IntensitySettings
from storage import run_folder
from storage.names import counted, printable

LABELS = "ldm.conditioning.labels"


@dataclass(frozen=True)
class Pairs:
    """The partners of all volumes, first those of the training volumes, then those of the validation volumes.

    A kind that is not in use is empty.
    """

    labels: tuple[VolumeFile, ...] = ()

    @property
    def digest(self) -> str:
        """Return a hash of the content of all partners, which decides what a run learns."""
        parts = [f"labels\t{file.digest}" for file in self.labels]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def prepare_pairs(s: ConditioningSettings, data: DataSettings, volumes: DataSplit) -> Pairs:
    """Find and check the partners of all volumes; raise one DataError that lists every problem."""
    pairs, problems = check_pairs(s, data, (*volumes.train, *volumes.val))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise DataError(f"ldm.conditioning: {counted(len(problems), 'problem')} with the volumes' partners:\n{lines}")
    return pairs


def check_pairs(s: ConditioningSettings, data: DataSettings, files: Sequence[VolumeFile]) -> tuple[Pairs, list[str]]:
    """Return the partners of `files` and every problem with them; without a problem no partner is missing."""
    labels: list[VolumeFile] = []
    problems: list[str] = []
    if s.labels.source is not None:
        number = s.labels.num_classes
        reading = label_reading(data, number)
        labels, problems = _partners(
            s.labels.source, files, reading, LABELS, lambda path, facts: label_problem(path, facts, number, LABELS)
        )
    return Pairs(tuple(labels)), problems


def label_reading(data: DataSettings, num_classes: int) -> DataSettings:
    """Return the settings with which label maps are measured; they are not scaled, and not kept on the voxel grid."""
    window = IntensitySettings(mode="window", lower=-1.0, upper=float(num_classes))
    return data.model_copy(update={"intensity": window, "prepared": "none", "frame": None, "spacing": None})


def _partners(
    source: str,
    files: Sequence[VolumeFile],
    s: DataSettings,
    where: str,
    problem_of: Callable[[Path, VolumeFacts], str | None],
) -> tuple[list[VolumeFile], list[str]]:
    found, problems = find_partners(source, files, s, where)
    paired = [file for file in files if file.name in found]
    checked = check_files([found[file.name] for file in paired], s, 1, run_folder.CHECKS) if paired else []
    partners = []
    for file, result in zip(paired, checked, strict=True):
        facts = result.facts
        if facts is None:
            problems += result.problems
            continue
        reasons = (
            mismatch(result.path, facts.header, file.path, read_header(file.path)),
            problem_of(result.path, facts),
        )
        problems += [reason for reason in reasons if reason is not None]
        partners.append(VolumeFile(result.path, printable(result.path), None, facts.num_channels, facts.digest))
    return partners, problems
