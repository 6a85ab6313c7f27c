"""Turns the `data` section of the settings into checked training and validation volumes."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from data import dicom
from data.checking import Checked, VolumeFacts, check_files, looks_like_labels
from data.discovery import (
    PATIENTS,
    DiscoveredVolume,
    VolumeFile,
    chosen,
    class_names_of,
    find,
    is_plain_folder,
    mixed_modalities,
    with_folders,
)
from data.geometry import geometry_of
from data.header import Note, grouped, left_out, problem_lines
from data.partners import rows_of
from data.phantoms import phantom_files, phantom_paths
from runtime.files import PHANTOMS, counted, printable
from settings import DataError
from settings.data import LEAST_HELD_OUT, DataSettings

log = logging.getLogger(__name__)

FOLDER = "folder"
COLUMN = "column:"


def _sha256(text: str) -> Any:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape"))


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
        return _sha256("\n".join(parts)).hexdigest()

    @property
    def digests(self) -> dict[str, str]:
        """Return the hash of each file's bytes, by volume name."""
        return {printable(f.name): f.digest for f in (*self.train, *self.val)}


@dataclass(frozen=True)
class Source:
    """The volumes of a source, sorted by name, the result of checking each, and notes on those that are not used."""

    volumes: tuple[DiscoveredVolume, ...]
    checked: tuple[Checked, ...]
    unlabelled: tuple[Note, ...] = ()
    left_out: tuple[Note, ...] = ()

    @property
    def problems(self) -> list[Note]:
        """Return every problem of every volume."""
        return [problem for item in self.checked for problem in item.problems] + list(self.unlabelled)

    @property
    def usable(self) -> list[tuple[DiscoveredVolume, VolumeFacts]]:
        """Return the volumes without problems, each with its facts."""
        pairs = zip(self.volumes, self.checked, strict=True)
        return [(volume, result.facts) for volume, result in pairs if result.facts and not result.problems]


def prepare_volumes(s: DataSettings, seed: int, in_channels: int, is_dry_run: bool = False) -> DataSplit:
    """Find the volumes, check and prepare each in one pass, and split them; a dry run generates no phantoms.

    Raises one DataError that lists every problem of every file. Results are kept in runs/checks and, if `data.prepared`
    is disk, in runs/prepared, so only new or changed files are read again. Under torchrun one process per node reads
    while the others wait.
    """
    if is_dry_run and s.num_phantoms is not None and s.class_labels is None:
        return _split_files(dict.fromkeys(_phantoms(s, seed, in_channels), ""), s, seed, in_channels)
    return split_source(check_source(s, seed, in_channels), s, seed, in_channels)


def _phantoms(s: DataSettings, seed: int, in_channels: int) -> list[DiscoveredVolume]:
    """Return the phantoms, which need not exist yet."""
    assert s.num_phantoms is not None, "the source is not phantoms"
    paths = phantom_paths(PHANTOMS, s.num_phantoms, s.voxel_size, in_channels, seed)
    return [DiscoveredVolume(path, f"{path.parent.name}/{path.name}", path.parent.name) for path in paths]


def check_source(s: DataSettings, seed: int, in_channels: int) -> Source:
    """Find, check and prepare the volumes of a source."""
    notes: list[Note] = []
    unlabelled: list[Note] = []
    if s.num_phantoms is not None:
        phantom_files(PHANTOMS, s.num_phantoms, s.voxel_size, in_channels, seed)
        volumes = _phantoms(s, seed, in_channels)
    else:
        found, notes = find(s.source)
        volumes, others = chosen(found, s)
        notes += others
        if (several := mixed_modalities([volume.name for volume in volumes])) is not None:
            log.warning("data: %s", several)
    if s.class_labels is not None:
        rows, unlabelled = rows_of(s.class_labels, ["label"], [v.name for v in volumes], "data.class_labels")
        volumes = [replace(v, class_name=rows[v.name]["label"] if v.name in rows else None) for v in volumes]
    checked = check_files([volume.path for volume in volumes], s, in_channels)
    elsewhere = dicom.split_series(item.path for item in checked if dicom.is_dicom(item.path))
    for number, item in enumerate(checked):
        if item.path in elsewhere:
            problem = Note(printable(item.path), elsewhere[item.path])
            checked[number] = Checked(item.path, None, (*item.problems, problem))
    if not s.include_label_maps:
        maps = {c.path for c in checked if c.facts is not None and looks_like_labels(c.facts)}
        if len(maps) == len(checked):
            log.warning(
                "data: every volume looks like a label map, so they are trained on as intensities; set "
                "data.include_label_maps: true if that is meant"
            )
        else:
            why = "it looks like a label map (whole numbers in regions of equal ones); set data.include_label_maps: "
            notes += [left_out(volume.name, f"{why}true to train on it") for volume in volumes if volume.path in maps]
            volumes = [volume for volume in volumes if volume.path not in maps]
            checked = [item for item in checked if item.path not in maps]
    if s.num_phantoms is None and s.class_labels is None and is_plain_folder(s.source):
        # Only now, because folders of label maps that are left out say nothing about classes.
        volumes = with_folders(volumes)
    return Source(tuple(volumes), tuple(checked), tuple(unlabelled), tuple(notes))


def split_source(source: Source, s: DataSettings, seed: int, in_channels: int) -> DataSplit:
    """Split the volumes of a checked source; raise one DataError that lists every problem of every file."""
    if source.problems:
        number = counted(len(source.problems), "problem")
        raise DataError(f"data.source: {printable(s.source)} has {number}:\n{problem_lines(source.problems)}")
    for line in grouped(source.left_out):
        log.warning("data: %s", line)
    if (cropped := _cropping([facts for _, facts in source.usable], s)) is not None:
        log.warning("data: %s", cropped)
    digests = {volume: facts.digest for volume, facts in source.usable}
    names: dict[str, list[str]] = {}
    for volume, digest in digests.items():
        names.setdefault(digest, []).append(printable(volume.name))
    copies = [same for same in names.values() if len(same) > 1]
    if copies:
        log.warning(
            "data: %s of %d hold the same bytes as another, for example %s and %s; one of them may be for training and "
            "the other for validation; remove the copies",
            *(counted(len(digests) - len(names), "volume"), len(digests), *copies[0][:2]),
        )
    return _split_files(digests, s, seed, in_channels)


def _cropping(facts: Sequence[VolumeFacts], s: DataSettings) -> str | None:
    """Return a line on volumes that the grid cuts a part away from; None without."""
    if s.resize != "crop_or_pad":
        return None
    shapes = [geometry_of(fact, s).spaced_shape for fact in facts]
    kept = [math.prod(min(new / old, 1.0) for old, new in zip(shape, s.voxel_size, strict=True)) for shape in shapes]
    number = sum(share < 1 for share in kept)
    if not number:
        return None
    return (
        f"data.voxel_size {' x '.join(map(str, s.voxel_size))} cuts {number} of {len(facts)} volumes, by up to "
        f"{1 - min(kept):.0%} of their voxels (data.resize: crop_or_pad); a larger grid or spacing keeps them whole"
    )


def _split_files(digests: Mapping[DiscoveredVolume, str], s: DataSettings, seed: int, in_channels: int) -> DataSplit:
    """Split volumes, each with the hash of its bytes."""
    class_names = class_names_of([*digests])
    numbers = {name: number for number, name in enumerate(class_names)}
    train, val = split([*digests], s, seed)
    is_free = s.group_by is None and all(volume.split is None for volume in digests)
    if is_free and (warning := suspected_patients([*digests])) is not None:
        log.warning("data: %s", warning)
    log.info("data: %d training and %d validation volumes", len(train), len(val))

    files = {
        volume: VolumeFile(volume.path, volume.name, numbers.get(volume.class_name or ""), in_channels, digest)
        for volume, digest in digests.items()
    }
    return DataSplit(tuple(files[v] for v in train), tuple(files[v] for v in val), class_names)


def split(
    volumes: Sequence[DiscoveredVolume], s: DataSettings, seed: int
) -> tuple[list[DiscoveredVolume], list[DiscoveredVolume]]:
    """Return the volumes to train on and those held out; raise DataError if either side has too few.

    Held out are those with the lowest hashes of (seed, name), so adding or removing a volume moves at most one other.
    Volumes of one group of `data.group_by` stay together, by hashes of (seed, group). A dataset.json with a
    "validation" list decides the split itself.
    """
    groups = groups_of(volumes, s)
    where, remedy = "data.source", "add volumes"
    if any(volume.split for volume in volumes):
        remedy = 'change its lists "training" and "validation"'
        train, val = ([volume for volume in volumes if volume.split == side] for side in ("training", "validation"))
    else:
        names = groups or {volume: volume.name for volume in volumes}
        ranked = sorted({*names.values()}, key=lambda name: _sha256(f"{seed}\n{name}").digest()[:7])
        held_out = {*ranked[: s.num_held_out(len(ranked))]}
        train = [volume for volume in volumes if names[volume] not in held_out]
        val = [volume for volume in volumes if names[volume] in held_out]
        if groups is not None:
            where, remedy = f"data.group_by: {counted(len(ranked), 'group')}", "change it, or add volumes"
    if not train or len(val) < LEAST_HELD_OUT:
        raise DataError(
            f"{where}: {printable(s.source)} has {counted(len(volumes), 'volume')}, {len(train)} to train on and "
            f"{len(val)} held out; at least 1 and {LEAST_HELD_OUT} are needed; {remedy}"
        )
    return train, val


def groups_of(volumes: Sequence[DiscoveredVolume], s: DataSettings) -> dict[DiscoveredVolume, str] | None:
    """Return the group of each volume by `data.group_by`, or None if it is not set; raise DataError if it fits none.

    A volume that a pattern does not match is a group of its own.
    """
    if s.group_by is None:
        return None
    where = f"data.group_by: {printable(s.group_by)}"
    if s.group_by == FOLDER:
        return {volume: PurePosixPath(volume.name).parent.as_posix() for volume in volumes}
    if s.group_by.startswith(COLUMN):
        if s.class_labels is None:
            raise DataError(f"{where} without data.class_labels; it names a column of that table; set it")
        column = s.group_by.removeprefix(COLUMN).strip()
        rows, notes = rows_of(s.class_labels, [column], [volume.name for volume in volumes], "data.group_by")
        if notes:
            raise DataError(f"{where} has {counted(len(notes), 'problem')}:\n{problem_lines(notes)}")
        return {volume: rows[volume.name][column] for volume in volumes}
    try:
        pattern = re.compile(s.group_by)
    except (re.error, OverflowError, RecursionError) as error:
        raise DataError(
            f"{where} is not a pattern ({error}); folder, column:NAME or a regular expression is allowed; correct it"
        ) from error
    found = {volume: match for volume in volumes if (match := pattern.search(volume.name))}
    groups = {v: match[1] if pattern.groups and match[1] is not None else match[0] for v, match in found.items()}
    unmatched = [volume for volume in volumes if volume not in groups]
    if unmatched:
        text = f"{where} matches {len(groups)} of {len(volumes)} volumes, not {printable(unmatched[0].name)}"
        if not groups:
            raise DataError(f"{text}; change the pattern, or use folder or column:NAME")
        log.warning("%s; each of the others is a group of its own", text)
    return groups | {volume: f"{volume.name}/" for volume in unmatched}


def suspected_pattern(volumes: Sequence[DiscoveredVolume]) -> str | None:
    """Return a `data.group_by` by which names say, as in BIDS, that patients have several scans; None without."""
    for pattern in PATIENTS:
        groups = Counter(match[0] for volume in volumes if (match := re.search(pattern, volume.name)))
        if len(groups) > 1 and max(groups.values()) > 1:
            return pattern
    return None


def suspected_patients(volumes: Sequence[DiscoveredVolume]) -> str | None:
    """Return a line on patients with several scans, by their names; None if names suggest none."""
    pattern = suspected_pattern(volumes)
    if pattern is None:
        return None
    return (
        "some patients seem to have several scans by their names; "
        f"data.group_by: '{pattern}' keeps each on one side of the split"
    )
