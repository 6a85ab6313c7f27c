"""Finds and checks the partner of each volume: by name in another folder, in a CSV, or in dataset.json."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from data.checking import check_files
from data.discovery import expanded, read_table, series_in
from data.files import dicom
from data.formats import SUFFIXES, read_header, suffix_of
from data.names import LABEL_ENDINGS
from data.pairs.geometry import mismatch
from data.pairs.tables import by_volume, normal
from data.reading import VolumeFacts
from data.volumes import VolumeFile
from runtime.files.names import printable
from runtime.files.reading import read_text, reason
from runtime.files.run_folder import CHECKS
from settings import DataError
from settings.data import DataSettings

KEY = "key:"
"""Begins a source that is a key of the entries of dataset.json."""

# nnU-Net numbers the channels of an image at the end of its name, and its label map has no number.
_CHANNEL = re.compile(r"_\d{4}$")
_ENDING = re.compile(rf"[-_.](?:{'|'.join(map(re.escape, LABEL_ENDINGS))})$", re.IGNORECASE)


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
    found = find_partners(place, files, data, problems)
    paired = [file for file in files if file.name in found]
    paths = [found[file.name] for file in paired]
    partners = []
    for file, result in zip(paired, check_files(paths, reading, num_channels, CHECKS) if paths else [], strict=True):
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


def find_partners(
    place: PartnerSource, files: Sequence[VolumeFile], s: DataSettings, problems: list[str]
) -> dict[str, Path]:
    """Return the partner of each volume by the volume's name; append a line for each volume without exactly one.

    Raises DataError if the source itself cannot be read.
    """
    source, where = place.source, f"{place.key}: {printable(place.source)}"
    path = expanded(source)
    if source.startswith(KEY):
        found = by_volume(_of_dataset_json(source.removeprefix(KEY).strip(), s, place.key), files)
        where = f"{where} in dataset.json"
    elif os.path.isdir(path):
        found = _by_name(path, files, where, place.key)
    elif path.suffix.lower() == ".csv" and os.path.isfile(path):
        found = by_volume(_of_table(path, place), files)
    else:
        raise DataError(
            f"{where} is neither a folder nor a CSV file; a folder, a CSV file or {KEY}NAME of dataset.json is "
            "allowed; check it"
        )
    partners = {}
    for file, paths in zip(files, found, strict=True):
        if len(paths) == 1:
            partners[file.name] = paths[0]
        else:
            problems.append(_problem(file.name, paths, where))
    shared = Counter(partners.values())
    for name, path in list(partners.items()) if os.path.isdir(expanded(source)) else ():
        if shared[path] > 1:
            del partners[name]
            problems.append(
                f"{printable(name)}: its partner {printable(path)} has the name of {shared[path]} volumes; each needs "
                "one of its own; put them into the same subfolders as the volumes, or list the pairs in a CSV file"
            )
    return partners


def _by_name(folder: Path, files: Sequence[VolumeFile], where: str, setting: str) -> list[list[Path]]:
    """Return the files of a folder that belong to each volume: by path, then by name, without the type's ending."""
    volumes = sorted(_volumes_in(folder, setting))
    if not volumes:
        raise DataError(f"{where} holds no volume; {' '.join(SUFFIXES)} are read, in subfolders too; check the folder")
    by_path: dict[str, list[Path]] = {}
    by_name: dict[str, list[Path]] = {}
    by_start: dict[str, list[Path]] = {}
    for place, path in volumes:
        by_path.setdefault(stem(place), []).append(path)
        name = stem(PurePosixPath(place).name)
        start = _ENDING.sub("", name)
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


def named_after(files: Mapping[str, Path], volumes: Collection[str]) -> dict[str, Path]:
    """Return files under the names of the volumes that they belong to by name; the others keep their own names."""
    plain = {_CHANNEL.sub("", name): name for name in volumes}

    def volume_of(name: str) -> str:
        return name if name in volumes else plain.get(name) or plain.get(_ENDING.sub("", name)) or name

    named = {volume_of(name): path for name, path in files.items()}
    return named if len(named) == len(files) else dict(files)


def _problem(name: str, found: Sequence[Path], where: str) -> str:
    if not found:
        return (
            f"{printable(name)}: no partner in {where}; each volume needs one; add it, list the pairs in a CSV file, "
            "or remove the volume"
        )
    both = " and ".join(printable(path) for path in found[:2])
    return f"{printable(name)}: {len(found)} partners in {where} ({both}); one is allowed; remove the others"


def _volumes_in(folder: Path, setting: str) -> Iterator[tuple[str, Path]]:
    """Yield the volumes under a folder by their names in it; a DICOM series has the name of its folder.

    Links to folders are followed, each folder once.
    """
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(place) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(place))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = [Path(place) / name for name in names if not name.startswith(".")]
        slices = [path for path in files if dicom.is_dicom(path)]
        if slices:
            yield from series_in(folder, Path(place), setting)[0].items()
        others = (path for path in files if suffix_of(path.name) and path not in slices)
        yield from ((path.relative_to(folder).as_posix(), path) for path in others)


def stem(name: str) -> str:
    """Return the name of a volume without the ending of its type."""
    return name[: len(name) - len(suffix_of(name) or "")]


def _of_table(table: Path, place: PartnerSource) -> dict[str, list[Path]]:
    """Return the paths in a CSV by the names in its column file; relative paths begin at the CSV's folder."""
    columns, rows = read_table(table, place.key)
    column = place.column
    if columns.count("file") != 1 or columns.count(column) != 1:
        raise DataError(
            f"{place.key}: {printable(table)} has the columns {printable(', '.join(columns)) or '(none)'}; file and "
            f"{column} are needed, once each; make file,{column} its first line"
        )
    listed: dict[str, list[Path]] = {}
    for _, row in rows:
        name, path = (row[n].strip() if n < len(row) else "" for n in (columns.index("file"), columns.index(column)))
        if name and path:
            listed.setdefault(normal(name), []).append(table.parent / path)
    return listed


def _of_dataset_json(key: str, s: DataSettings, setting: str) -> dict[str, list[Path]]:
    """Return the paths under one key of the entries of dataset.json, by the names of their images."""
    place = expanded(s.source)
    listing = place / "dataset.json" if os.path.isdir(place) else place
    try:
        content = json.loads(read_text(listing))
    except (OSError, ValueError, RecursionError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise DataError(
            f"{setting}: {KEY}{printable(key)} needs a dataset.json as data.source, and {printable(listing)} "
            f"cannot be read ({why}); give a folder or a CSV file instead"
        ) from error
    lists = [content.get(name) for name in ("training", "validation")] if isinstance(content, dict) else []
    entries: list[Any] = [entry for part in lists if isinstance(part, list) for entry in part]
    listed: dict[str, list[Path]] = {}
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("image"), str):
            continue
        found = entry.get(key)
        paths = [path for path in (found if isinstance(found, list) else [found]) if isinstance(path, str) and path]
        listed.setdefault(normal(entry["image"]), []).extend(listing.parent / path for path in paths)
    return listed
