"""Finds the partner of each volume: by file name in another folder, in a CSV, or in dataset.json."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from data.discovery import expanded, read_table, series_in
from data.files import dicom
from data.formats import SUFFIXES, suffix_of
from data.names import LABEL_ENDINGS
from data.volumes import VolumeFile
from runtime.files.names import printable
from runtime.files.reading import read_text, reason
from settings import DataError
from settings.data import DataSettings

KEY = "key:"
"""Begins a source that is a key of the entries of dataset.json."""

# nnU-Net numbers the channels of an image at the end of its name, and its label map has no number.
_CHANNEL = re.compile(r"_\d{4}$")
_ENDING = re.compile(rf"[-_.](?:{'|'.join(map(re.escape, LABEL_ENDINGS))})$", re.IGNORECASE)


def find_partners(
    source: str, files: Sequence[VolumeFile], s: DataSettings, where: str
) -> tuple[dict[str, Path], list[str]]:
    """Return the partner of each volume by the volume's name, and a line for each volume without exactly one.

    `where` is the section or key of the config that asks, and its last name is the column of a CSV. Raises DataError if
    the source itself cannot be read.
    """
    setting = where if where.endswith("masks") else f"{where}.source"
    named = f"{setting}: {printable(source)}"
    if source.startswith(KEY):
        listed = _of_dataset_json(source.removeprefix(KEY).strip(), s, setting)
        return _paired(listed, files, f"{named} in dataset.json")
    place = expanded(source)
    if os.path.isdir(place):
        return _by_name(place, files, named, setting)
    if place.suffix.lower() == ".csv" and os.path.isfile(place):
        return _paired(_of_table(place, setting, where.rsplit(".", 1)[-1]), files, named)
    raise DataError(
        f"{named} is neither a folder nor a CSV file; a folder, a CSV file or {KEY}NAME of dataset.json is allowed; "
        "check it"
    )


def _paired(
    listed: Mapping[str, list[Path]], files: Sequence[VolumeFile], where: str
) -> tuple[dict[str, Path], list[str]]:
    """Pair volumes with the paths that are listed under their names, or under their file names if these are unique."""
    file_names = Counter(PurePosixPath(file.name).name for file in files)
    partners, problems = {}, []
    for file in files:
        short = PurePosixPath(file.name).name
        found = listed.get(file.name) or (listed.get(short, []) if file_names[short] == 1 else [])
        if len(found) == 1:
            partners[file.name] = found[0]
        else:
            problems.append(_problem(file.name, found, where))
    return partners, problems


def _by_name(folder: Path, files: Sequence[VolumeFile], where: str, setting: str) -> tuple[dict[str, Path], list[str]]:
    """Pair volumes with the files of a folder: by path, then by file name, each without the ending of its type."""
    volumes = sorted(_volumes_in(folder, setting))
    by_path: dict[str, list[Path]] = {}
    by_name: dict[str, list[Path]] = {}
    by_start: dict[str, list[Path]] = {}
    for place, path in volumes:
        by_path.setdefault(_stem(place), []).append(path)
        name = _stem(PurePosixPath(place).name)
        start = _ENDING.sub("", name)
        for form in {name, start}:
            by_name.setdefault(form, []).append(path)
        if start != name:
            by_start.setdefault(start, []).append(path)
    if not volumes:
        raise DataError(f"{where} holds no volume; {' '.join(SUFFIXES)} are read, in subfolders too; check the folder")
    partners, problems = {}, []
    for file in files:
        name = _stem(PurePosixPath(file.name).name)
        # The longest first, so that a map of this scan comes before one of the patient.
        starts = [name[: mark.start()] for mark in reversed([*re.finditer("[-_.]", name)])]
        tries = (
            *(by_path.get(_stem(file.name)), by_name.get(name), by_name.get(_CHANNEL.sub("", name))),
            *map(by_start.get, starts),
        )
        own = os.path.realpath(file.path)
        others = ([path for path in paths or () if os.path.realpath(path) != own] for paths in tries)
        found = next((paths for paths in others if paths), [])
        if len(found) == 1:
            partners[file.name] = found[0]
        else:
            problems.append(_problem(file.name, found, where))
    shared = Counter(partners.values())
    for name, path in list(partners.items()):
        if shared[path] > 1:
            del partners[name]
            problems.append(
                f"{printable(name)}: its partner {printable(path)} has the name of {shared[path]} volumes; each needs "
                "one of its own; put them into the same subfolders as the volumes, or list the pairs in a CSV file"
            )
    return partners, problems


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


def _stem(name: str) -> str:
    return name[: len(name) - len(suffix_of(name) or "")]


def _of_table(table: Path, setting: str, column: str) -> dict[str, list[Path]]:
    """Return the paths in a CSV by the names in its column file; relative paths begin at the CSV's folder."""
    columns, rows = read_table(table, setting)
    if columns.count("file") != 1 or columns.count(column) != 1:
        raise DataError(
            f"{setting}: {printable(table)} has the columns {printable(', '.join(columns)) or '(none)'}; file and "
            f"{column} are needed, once each; make file,{column} its first line"
        )
    listed: dict[str, list[Path]] = {}
    for _, row in rows:
        name, path = (row[n].strip() if n < len(row) else "" for n in (columns.index("file"), columns.index(column)))
        if name and path:
            listed.setdefault(_normal(name), []).append(table.parent / path)
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
        listed.setdefault(_normal(entry["image"]), []).extend(listing.parent / path for path in paths)
    return listed


def _normal(name: str) -> str:
    return os.path.normpath(name).replace(os.sep, "/")
