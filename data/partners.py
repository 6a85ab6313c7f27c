"""Finds and checks the partner of each volume: by name in another folder, or in a CSV file."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from data.checking import check_files
from data.discovery import LABEL_ENDING, expanded, volumes_under
from data.formats import SUFFIXES, read_header, stem
from data.geometry import mismatch
from data.reading import VolumeFacts
from data.tables import by_volume, read_table
from data.volumes import VolumeFile
from runtime.files import printable
from settings import DataError
from settings.data import DataSettings

# nnU-Net numbers the channels of an image at the end of its name, and its label map has no number.
_CHANNEL = re.compile(r"_\d{4}$")


@dataclass(frozen=True)
class PartnerSource:
    """Where partners are: the value of a setting, its key, and the column that has them if it is a CSV file."""

    source: str
    key: str
    column: str


Check = Callable[[Path, VolumeFacts], str | None]
"""Returns why a file cannot be a partner, or None if it can."""


def checked_partners(
    place: PartnerSource,
    files: Sequence[VolumeFile],
    data: DataSettings,
    reading: DataSettings,
    problem_of: Check,
    problems: list[str],
    num_channels: int = 1,
) -> tuple[VolumeFile, ...]:
    """Return the partner of each volume, measured with `reading`; append a line to `problems` for each problem."""
    found = find_partners(place, files, problems)
    paired = [file for file in files if file.name in found]
    paths = [found[file.name] for file in paired]
    partners = []
    for file, result in zip(paired, check_files(paths, reading, num_channels) if paths else [], strict=True):
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
    return tuple(partners)


def find_partners(place: PartnerSource, files: Sequence[VolumeFile], problems: list[str]) -> dict[str, Path]:
    """Return the partner of each volume by the volume's name; append a line for each volume without exactly one.

    Raises DataError if the source itself cannot be read.
    """
    where = f"{place.key}: {printable(place.source)}"
    path = expanded(place.source)
    names = [file.name for file in files]
    if os.path.isdir(path):
        found = _by_name(path, files, where, place.key)
    elif path.suffix.lower() == ".csv" and os.path.isfile(path):
        listed: dict[str, list[Path]] = {}
        remedy = f"make file,{place.column} its first line"
        for _, name, row in read_table(place.source, [place.column], place.key, remedy):
            if name and row[place.column]:
                listed.setdefault(name, []).append(path.parent / row[place.column])
        found = by_volume(listed, names)
    else:
        raise DataError(f"{where} is neither a folder nor a CSV file; one of the two is allowed; check it")
    partners = {}
    for name, paths in zip(names, found, strict=True):
        if len(paths) == 1:
            partners[name] = paths[0]
        elif paths:
            both = " and ".join(printable(path) for path in paths[:2])
            problems.append(
                f"{printable(name)}: {len(paths)} partners in {where} ({both}); one is allowed; remove the others"
            )
        else:
            problems.append(
                f"{printable(name)}: no partner in {where}; each volume needs one; add it, list the pairs in a CSV "
                "file, or remove the volume"
            )
    shared = Counter(partners.values())
    for name, partner in list(partners.items()) if os.path.isdir(path) else ():
        if shared[partner] > 1:
            del partners[name]
            problems.append(
                f"{printable(name)}: its partner {printable(partner)} has the name of {shared[partner]} volumes; each "
                "needs one of its own; put them into the subfolders of their volumes, or list the pairs in a CSV file"
            )
    return partners


def named_after(files: Mapping[str, Path], volumes: Collection[str]) -> dict[str, Path]:
    """Return files under the names of the volumes that they belong to by name; the others keep their own names."""
    plain = {_CHANNEL.sub("", name): name for name in volumes}

    def volume_of(name: str) -> str:
        return name if name in volumes else plain.get(name) or plain.get(LABEL_ENDING.sub("", name)) or name

    named = {volume_of(name): path for name, path in files.items()}
    return named if len(named) == len(files) else dict(files)


def _by_name(folder: Path, files: Sequence[VolumeFile], where: str, key: str) -> list[list[Path]]:
    """Return the files of a folder that belong to each volume: by path, then by name, without the type's ending."""
    volumes, _ = volumes_under(folder, key)
    if not volumes:
        raise DataError(f"{where} holds no volume; {' '.join(SUFFIXES)} are read, in subfolders too; check the folder")
    by_path: dict[str, list[Path]] = {}
    by_name: dict[str, list[Path]] = {}
    by_start: dict[str, list[Path]] = {}
    for place, path in sorted(volumes.items()):
        by_path.setdefault(stem(place), []).append(path)
        name = stem(PurePosixPath(place).name)
        start = LABEL_ENDING.sub("", name)
        for form in {name, start}:
            by_name.setdefault(form, []).append(path)
        if start != name:
            by_start.setdefault(start, []).append(path)
    found = []
    for file in files:
        name = stem(PurePosixPath(file.name).name)
        # The longest first, so that a map of this scan comes before one of the patient.
        starts = [name[: mark.start()] for mark in reversed([*re.finditer("[-_.]", name)])]
        tries = (
            *(by_path.get(stem(file.name)), by_name.get(name), by_name.get(_CHANNEL.sub("", name))),
            *map(by_start.get, starts),
        )
        own = os.path.realpath(file.path)
        others = ([path for path in paths or () if os.path.realpath(path) != own] for paths in tries)
        found.append(next((paths for paths in others if paths), []))
    return found
