"""Turns the `data` section of the settings into checked training and validation volumes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.checking import Checked, check_files
from data.discovery import (
    DiscoveredVolume,
    chosen,
    class_folder,
    class_names_of,
    find,
    is_plain_folder,
    mixed_modalities,
    with_folders,
)
from data.files import dicom
from data.files.header import Note, grouped, left_out, problem_lines
from data.overview import looks_like_labels
from data.phantoms import phantom_files, phantom_paths
from data.reading import VolumeFacts
from data.split import split, suspected_patients
from data.tables import with_labels
from runtime.files import PHANTOMS, counted, printable
from settings import DataError
from settings.data import DataSettings

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
        volumes, unlabelled = with_labels(volumes, s.class_labels)
    checked = check_files([volume.path for volume in volumes], s, in_channels)
    for path, text in dicom.parted(item.path for item in checked if dicom.is_dicom(item.path)).items():
        place = next(place for place, item in enumerate(checked) if item.path == path)
        checked[place] = Checked(path, None, (*checked[place].problems, Note(printable(path), text)))
    if not s.include_label_maps:
        maps = {c.path for c in checked if c.facts is not None and looks_like_labels(c.facts)}
        if len(maps) == len(checked):
            log.warning(
                "data: every volume looks like a label map, so they are trained on as intensities; set "
                "data.include_label_maps: true if that is meant"
            )
        else:
            why = "it looks like a label map (whole numbers in regions of equal ones); set data.include_label_maps: "
            names = [volume.name for volume in volumes if volume.path in maps]
            notes += [left_out(name, f"{why}true to train on it", is_label_map=True) for name in names]
            volumes = [volume for volume in volumes if volume.path not in maps]
            checked = [item for item in checked if item.path not in maps]
    if s.num_phantoms is None and s.class_labels is None and is_plain_folder(s.source):
        # Only now, because folders of label maps that are left out say nothing about classes.
        volumes = with_folders(volumes)
        tops = sorted({top for volume in volumes if (top := class_folder(volume.name)) is not None})
        if tops and not class_names_of(volumes):
            some = ", ".join(printable(top) for top in tops[:3])
            log.info("data: folders such as %s are not read as classes; data.class_labels can name classes", some)
    return Source(tuple(volumes), tuple(checked), tuple(unlabelled), tuple(notes))


def split_source(source: Source, s: DataSettings, seed: int, in_channels: int) -> DataSplit:
    """Split the volumes of a checked source; raise one DataError that lists every problem of every file."""
    if source.problems:
        number = counted(len(source.problems), "problem")
        raise DataError(f"data.source: {printable(s.source)} has {number}:\n{problem_lines(source.problems)}")
    digests = {volume: facts.digest for volume, facts in source.usable}
    for line in (*grouped(source.left_out), *_copies_lines(digests)):
        log.warning("data: %s", line)
    return _split_files(digests, s, seed, in_channels)


def _split_files(digests: Mapping[DiscoveredVolume, str], s: DataSettings, seed: int, in_channels: int) -> DataSplit:
    """Split volumes, each with the hash of its bytes."""
    class_names = class_names_of([*digests])
    numbers = {name: number for number, name in enumerate(class_names)}
    train, val = split([*digests], s, seed)
    if s.group_by is None and all(volume.split is None for volume in digests):
        warning = suspected_patients([*digests])
        if warning is not None:
            log.warning("data: %s", warning)
    log.info("data: %d training and %d validation volumes", len(train), len(val))

    def files(volumes: Sequence[DiscoveredVolume]) -> tuple[VolumeFile, ...]:
        return tuple(
            VolumeFile(volume.path, volume.name, numbers.get(volume.class_name or ""), in_channels, digests[volume])
            for volume in volumes
        )

    return DataSplit(files(train), files(val), class_names)


def _copies_lines(digests: Mapping[DiscoveredVolume, str]) -> list[str]:
    """Return a line on volumes that hold the same bytes, if there are any: they may be on both sides of the split."""
    names: dict[str, list[str]] = {}
    for volume, digest in digests.items():
        names.setdefault(digest, []).append(volume.name)
    copies = [same for same in names.values() if len(same) > 1]
    if not copies:
        return []
    number = sum(len(same) - 1 for same in copies)
    return [
        f"{counted(number, 'volume')} of {len(digests)} hold the same bytes as another, for example "
        f"{printable(copies[0][0])} and {printable(copies[0][1])}; one of them may be for training and the other for "
        "validation; remove the copies"
    ]
