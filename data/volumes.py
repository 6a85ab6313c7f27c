"""Turns the `data` section of the settings into checked training and validation volumes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.discovery import Found, class_names_of, find, is_plain_folder, with_folders, with_labels
from data.files import dicom
from data.phantoms import phantom_files, phantom_paths, phantom_root
from data.preparation.checking import Checked, check_files
from data.survey.names import class_folder, grouped, problem_lines
from data.survey.overview import looks_like_labels
from data.survey.patients import groups_of, parted_patients
from runtime.files import run_folder
from runtime.files.names import counted, printable
from settings import DataError
from settings.data import LEAST_HELD_OUT, DataSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VolumeFile:
    """One volume: its path, its name relative to the data root, its class number and its channels.

    `digest` is the hash of the file's bytes at the time of the check; empty if it was not checked.
    """

    path: Path
    name: str
    label: int | None = None
    num_channels: int = 1
    digest: str = ""


@dataclass(frozen=True)
class DataSplit:
    """The training and validation volumes of a run; `class_names` is indexed by label, and empty without classes."""

    train: tuple[VolumeFile, ...]
    val: tuple[VolumeFile, ...]
    class_names: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Return a hash of the names, labels and split, which decide which volume a step sees."""
        parts = [f"{part}\t{f.name}\t{f.label}" for part in ("train", "val") for f in getattr(self, part)]
        return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def digests(self) -> dict[str, str]:
        """Return the hash of each file's bytes, by volume name."""
        return {printable(f.name): f.digest for f in (*self.train, *self.val)}


@dataclass(frozen=True)
class Source:
    """The volumes that were found, sorted by name, and the result of checking each."""

    found: tuple[Found, ...]
    checked: tuple[Checked, ...]
    unlabelled: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def problems(self) -> list[str]:
        """Return every problem of every volume."""
        return [problem for item in self.checked for problem in item.problems] + list(self.unlabelled)


def prepare_volumes(s: DataSettings, seed: int, in_channels: int, is_dry_run: bool = False) -> DataSplit:
    """Find the volumes, check and prepare each in one pass, and split them; a dry run generates no phantoms.

    Raises one DataError that lists every problem of every file. Results are kept in runs/checks and, if `data.prepared`
    is disk, in runs/prepared, so only new or changed files are read again. Under torchrun one process per node reads
    while the others wait.
    """
    if is_dry_run and s.num_phantoms is not None and s.class_labels is None:
        found = _phantoms(s, seed, in_channels)
        names = class_names_of(found)
        files = {f: VolumeFile(f.path, f.name, names.index(f.class_name or ""), in_channels) for f in found}
        train, val = split(found, s, seed)
        return DataSplit(tuple(files[item] for item in train), tuple(files[item] for item in val), names)
    return split_source(check_source(s, seed, in_channels), s, seed, in_channels)


def _phantoms(s: DataSettings, seed: int, in_channels: int) -> list[Found]:
    """Return the phantoms, which need not exist yet."""
    assert s.num_phantoms is not None, "the source is not phantoms"
    root = phantom_root(run_folder.PHANTOMS, s.voxel_size, in_channels, seed)
    return [Found(p, p.relative_to(root).as_posix(), p.parent.name) for p in phantom_paths(root, s.num_phantoms)]


def split_source(source: Source, s: DataSettings, seed: int, in_channels: int) -> DataSplit:
    """Split the volumes of a checked source; raise one DataError that lists every problem of every file."""
    if source.problems:
        number = counted(len(source.problems), "problem")
        raise DataError(f"data.source: {printable(s.source)} has {number}:\n{problem_lines(source.problems)}")
    for line in (*grouped(source.left_out), *copies_lines(source.found, source.checked)):
        log.warning("data: %s", line)
    found = source.found
    class_names = class_names_of(found)
    numbers = {name: number for number, name in enumerate(class_names)}
    files = {
        item: VolumeFile(item.path, item.name, numbers.get(item.class_name or ""), in_channels, checked.facts.digest)
        for item, checked in zip(found, source.checked, strict=True)
        if checked.facts is not None
    }
    train, val = split(found, s, seed)
    is_free = s.group_by is None and all(item.split is None for item in found)
    warning = parted_patients(train, val) if is_free else None
    if warning is not None:
        log.warning("data: %s", warning)
    log.info("data: %d training and %d validation volumes", len(train), len(val))
    return DataSplit(tuple(files[item] for item in train), tuple(files[item] for item in val), class_names)


def check_source(s: DataSettings, seed: int, in_channels: int) -> Source:
    """Find, check and prepare the volumes of a source."""
    left_out: list[str] = []
    if s.num_phantoms is not None:
        phantom_files(run_folder.PHANTOMS, s.num_phantoms, s.voxel_size, in_channels, seed)
        found = _phantoms(s, seed, in_channels)
    else:
        found, left_out = find(s.source)
    unlabelled: list[str] = []
    if s.class_labels is not None:
        found, unlabelled = with_labels(found, s.class_labels)
    checked = check_files([item.path for item in found], s, in_channels, run_folder.CHECKS)
    parts = dicom.parted(item.path for item in checked if dicom.is_dicom(item.path))
    checked = [Checked(c.path, None, (*c.problems, parts[c.path])) if c.path in parts else c for c in checked]
    if not s.include_label_maps:
        found, checked, maps = _without_label_maps(found, checked)
        left_out += maps
    if s.num_phantoms is None and s.class_labels is None and is_plain_folder(s.source):
        found = with_folders(found)  # again, because folders of label maps that are left out say nothing
        tops = sorted({top for item in found if (top := class_folder(item.name)) is not None})
        if tops and not class_names_of(found):
            some = ", ".join(printable(top) for top in tops[:3])
            log.info("data: folders such as %s are not read as classes; data.class_labels can name classes", some)
    return Source(tuple(found), tuple(checked), tuple(unlabelled), tuple(left_out))


def _without_label_maps(
    found: Sequence[Found], checked: Sequence[Checked]
) -> tuple[list[Found], list[Checked], list[str]]:
    """Take out volumes that look like label maps, unless all do: then label maps are what is to be learned."""
    pairs = list(zip(found, checked, strict=True))
    maps = [pair for pair in pairs if pair[1].facts is not None and looks_like_labels(pair[1].facts)]
    if maps and len(maps) == len(pairs):
        log.warning(
            "data: every volume looks like a label map, so they are trained on as intensities; set "
            "data.include_label_maps: true if that is meant"
        )
    if not maps or len(maps) == len(pairs):
        return list(found), list(checked), []
    kept = [pair for pair in pairs if pair not in maps]
    lines = [
        f"{printable(item.name)}: left out, it looks like a label map (whole numbers in regions of equal ones); set "
        "data.include_label_maps: true to train on it"
        for item, _ in maps
    ]
    return [item for item, _ in kept], [result for _, result in kept], lines


def copies_lines(found: Sequence[Found], checked: Sequence[Checked]) -> list[str]:
    """Return a line on volumes that hold the same bytes, if there are any: they may be on both sides of the split."""
    names: dict[str, list[str]] = {}
    for item, result in zip(found, checked, strict=True):
        if result.facts is not None:
            names.setdefault(result.facts.digest, []).append(item.name)
    copies = [same for same in names.values() if len(same) > 1]
    if not copies:
        return []
    number = sum(len(same) - 1 for same in copies)
    return [
        f"{counted(number, 'volume')} of {len(found)} hold the same bytes as another, for example "
        f"{printable(copies[0][0])} and {printable(copies[0][1])}; one of them may be for training and the other for "
        "validation; remove the copies"
    ]


def split(found: Sequence[Found], s: DataSettings, seed: int) -> tuple[list[Found], list[Found]]:
    """Return the volumes to train on and those held out; raise DataError if either side has too few.

    Held out are those with the lowest hashes of (seed, name), so adding or removing a volume moves at most one other.
    Volumes of one group of `data.group_by` stay together, by hashes of (seed, group). A dataset.json with a
    "validation" list decides the split itself.
    """
    groups = groups_of(found, s)
    if any(item.split for item in found):
        train, val = ([item for item in found if item.split == side] for side in ("training", "validation"))
        where, remedy = "data.source", 'change its lists "training" and "validation"'
    else:
        names = {item: item.name if groups is None else groups[item] for item in found}
        ranked = sorted({*names.values()}, key=lambda name: _draw(seed, name))
        held_out = {*ranked[: s.num_held_out(len(ranked))]}
        train = [item for item in found if names[item] not in held_out]
        val = [item for item in found if names[item] in held_out]
        where, remedy = "data.source", "add volumes"
        if groups is not None:
            where, remedy = f"data.group_by: {counted(len(ranked), 'group')}", "change it, or add volumes"
    if not train or len(val) < LEAST_HELD_OUT:
        raise DataError(
            f"{where}: {printable(s.source)} has {counted(len(found), 'volume')}, {len(train)} to train on and "
            f"{len(val)} held out; at least 1 and {LEAST_HELD_OUT} are needed; {remedy}"
        )
    return train, val


def _draw(seed: int, name: str) -> float:
    """Return a number in [0, 1) that depends on the arguments only."""
    digest = hashlib.sha256(f"{seed}\n{name}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:7], "big") / 2**56
