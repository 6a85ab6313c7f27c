"""Finds the volumes of a folder or of a dataset.json, and their class labels."""

from __future__ import annotations

import csv
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.formats import SUFFIXES, printable, suffix_of
from settings import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A volume that was found, before its file is opened; `split` is "training", "validation" or None: undecided."""

    path: Path
    name: str
    class_name: str | None = None
    split: str | None = None


def discover(source: str, allow_outside_root: bool) -> list[Found]:
    """List the volumes of a source in the order of their names; raises DataError when there is none.

    A folder with a dataset.json at its top is read by that file: its other folders hold segmentations and test images.
    """
    place = Path(source).expanduser()
    if place.is_dir():
        listing = place / "dataset.json"
        if not listing.is_file():
            return _in_folder(place)
        log.info("data: %s lists the volumes of %s", listing, place)
        place = listing
    if place.is_file() and place.suffix.lower() == ".json":
        return _in_dataset_json(place, allow_outside_root)
    if place.is_file():
        raise DataError(
            f"data.source: {source} is a single file; a folder, a dataset.json or phantoms is allowed; "
            f"give the folder {place.parent}"
        )
    raise DataError(f"data.source: {source} does not exist; a folder, a dataset.json or phantoms is allowed; check it")


def with_labels(found: list[Found], table: str) -> tuple[list[Found], list[str]]:
    """Give each volume its class from a CSV with the columns file and label; also return a line for each without."""
    classes = _read_label_table(Path(table).expanduser())
    file_names = Counter(Path(item.name).name for item in found)
    labelled, missing = [], []
    for item in found:
        file_name = Path(item.name).name
        label = classes.get(item.name)
        if label is None and file_names[file_name] == 1:
            label = classes.get(file_name)
        if label is None:
            missing.append(item.name)
        labelled.append(replace(item, class_name=label))
    return labelled, [f"{printable(name)}: no label in {table}; each volume needs one; add a row" for name in missing]


def class_names_of(found: Sequence[Found]) -> tuple[str, ...]:
    """Return the classes in the order of their label numbers; empty unless every volume has one.

    Classes that are whole numbers are ordered as numbers, others as text.
    """
    names = {item.class_name for item in found}
    if not names or None in names:
        return ()
    known = [name for name in names if name is not None]
    is_number = all(name.removeprefix("-").isdecimal() for name in known)
    return tuple(sorted(known, key=(lambda name: (int(name), name)) if is_number else None))


def _in_folder(root: Path) -> list[Found]:
    names = sorted(path.relative_to(root).as_posix() for path in _walk(root) if suffix_of(path.name))
    if not names:
        raise DataError(
            f"data.source: {root} holds no volume; {' '.join(SUFFIXES)} are read, in subfolders too; check the folder"
        )
    folders = [name.split("/")[0] if "/" in name else None for name in names]
    # Folder names are classes only where every volume lies in one.
    classes: list[str] | list[None] = [f for f in folders if f is not None] if all(folders) else [None] * len(names)
    return [Found(root / name, name, class_name) for name, class_name in zip(names, classes, strict=True)]


def _walk(root: Path) -> Iterator[Path]:
    """Yield the files under a folder, links followed once; names with a leading dot (macOS leaves them) are skipped."""
    seen: set[str] = set()
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder) / name for name in files if not name.startswith("."))


def _in_dataset_json(listing: Path, allow_outside_root: bool) -> list[Found]:
    try:
        content = json.loads(listing.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{listing}: cannot be read as JSON ({error}); repair it") from error
    if not isinstance(content, dict) or not isinstance(content.get("training"), list):
        raise DataError(f'{listing}: no list "training"; it lists the volumes as {{"image": PATH}} or PATH; add it')
    explicit = content.get("validation", [])
    if not isinstance(explicit, list):
        raise DataError(f'{listing}: "validation" is not a list; it is written like "training"; repair it')
    entries = [("training" if explicit else None, entry) for entry in content["training"]]
    entries += [("validation", entry) for entry in explicit]
    found, problems = [], []
    for number, (split, entry) in enumerate(entries):
        try:
            found.append(_entry(listing, entry, split, allow_outside_root))
        except ValueError as error:
            problems.append(f"  entry {number}: {error}")
    twice = [name for name, count in Counter(item.name for item in found).items() if count > 1]
    problems += [f"  {printable(name)}: listed more than once; remove all but one" for name in twice]
    if problems:
        raise DataError("\n".join([f"{listing}: {len(problems)} problems:", *problems]))
    if not found:
        raise DataError(f'{listing}: "training" is empty; at least one volume is needed; add it')
    return sorted(found, key=lambda item: item.name)


def _entry(listing: Path, entry: Any, split: str | None, allow_outside_root: bool) -> Found:
    """Read one entry; ValueError says what is wrong with it."""
    image = entry.get("image") if isinstance(entry, dict) else entry
    # Several files as the channels of one volume would be read as one of them only.
    if not isinstance(image, str) or not image or "\0" in image:
        raise ValueError(f'its image is {image!r}; one path is allowed; write {{"image": "imagesTr/a.nii.gz"}}')
    root = listing.parent
    path = root / image
    name = os.path.normpath(image).replace(os.sep, "/")
    inside = os.path.realpath(path).startswith(os.path.join(os.path.realpath(root), ""))
    if not inside and not allow_outside_root:
        raise ValueError(
            f"{printable(image)} leads out of {root}; only files inside it are allowed; "
            "move it there or set data.allow_outside_root: true"
        )
    return Found(path, name, _class_of(entry), split)


def _class_of(entry: Any) -> str | None:
    """Return the entry's class: its "class", or a "label" that is not the path of a segmentation."""
    if not isinstance(entry, dict):
        return None
    label = entry.get("class", entry.get("label"))
    if isinstance(label, bool) or not isinstance(label, str | int):
        return None
    text = str(label).strip()
    is_path = "class" not in entry and ("/" in text or suffix_of(text) is not None)
    return None if is_path or not text else text


def _read_label_table(table: Path) -> dict[str, str]:
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = [name.strip().lower() for name in reader.fieldnames or ()]
            rows = [list(row.values()) for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"data.labels: {table} cannot be read ({error}); give a CSV of file,label") from error
    if "file" not in columns or "label" not in columns:
        raise DataError(
            f"data.labels: {table} has the columns {', '.join(columns) or '(none)'}; file and label are needed; "
            "make file,label its first line"
        )
    file_column, label_column = columns.index("file"), columns.index("label")
    classes: dict[str, str] = {}
    for number, row in enumerate(rows, start=2):
        name, label = row[file_column], row[label_column]
        if not isinstance(name, str) or not isinstance(label, str) or not name.strip() or not label.strip():
            raise DataError(f"data.labels: {table} line {number} has no file or no label; both are needed; complete it")
        key = os.path.normpath(name.strip()).replace(os.sep, "/")
        if classes.setdefault(key, label.strip()) != label.strip():
            raise DataError(f"data.labels: {table} gives {key} two labels; one is allowed; remove the other")
    return classes
