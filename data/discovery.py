"""Finds the volumes of a folder or of a dataset.json, and their class labels."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.files import dicom
from data.formats import SUFFIXES, suffix_of
from data.names import folder_classes, label_files
from data.notes import FileError, Note, left_out
from runtime.files.names import counted, printable, shortened
from runtime.files.reading import read_text, reason
from runtime.files.run_folder import RUNS
from settings import DataError

log = logging.getLogger(__name__)

# A longer run of digits is a name, not a number; Python refuses to convert thousands of digits.
LONGEST_NUMBER = 20


@dataclass(frozen=True)
class DiscoveredVolume:
    """A volume that was found, its file not yet opened; `split` is "training", "validation", or None if undecided."""

    path: Path
    name: str
    class_name: str | None = None
    split: str | None = None


def find(source: str) -> tuple[list[DiscoveredVolume], list[Note]]:
    """Return the volumes of a source, sorted by name, and a note on each file that was left out.

    If a folder has a dataset.json at its top, only the volumes listed there count, because such folders also hold
    segmentations and test images. Raises DataError if there is no volume.
    """
    place = expanded(source)
    # os.path, not Path: for a name that no file system can hold it returns False instead of raising.
    if os.path.isdir(place):
        real = Path(os.path.realpath(place))
        # Links there lead everywhere, and some files never end.
        if real == Path("/") or ({*real.parts[:2]} & {"proc", "sys", "dev"} and not real.is_relative_to("/dev/shm")):
            raise DataError(
                f"data.source: {printable(source)} belongs to the operating system; a folder of volumes, "
                "a dataset.json or phantoms is allowed; give the folder that holds your volumes"
            )
        if is_plain_folder(source):
            return _in_folder(place)
        log.info("data: %s lists the volumes of %s", place / "dataset.json", place)
        place /= "dataset.json"
    if place.suffix.lower() == ".json" and os.path.exists(place):
        return _in_dataset_json(place)
    if os.path.exists(place):
        raise DataError(
            f"data.source: {printable(source)} is a single file; a folder, a dataset.json or phantoms is allowed; "
            f"give the folder {printable(place.parent)}"
        )
    raise DataError(
        f"data.source: {printable(place)} does not exist; a folder, a dataset.json or phantoms is allowed; check it"
    )


def is_plain_folder(source: str) -> bool:
    """Return whether a source is a folder that has no dataset.json, so that every volume in it counts."""
    return os.path.isdir(expanded(source)) and not os.path.lexists(expanded(source) / "dataset.json")


def expanded(path: str) -> Path:
    """Return a path with its ~ replaced by the home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # a `~name` whose user does not exist
        return Path(path)


def with_labels(volumes: Sequence[DiscoveredVolume], table: str) -> tuple[list[DiscoveredVolume], list[Note]]:
    """Return the volumes with classes from a CSV (columns file and label), and a note on each one without."""
    classes = _read_label_table(table)
    file_names = Counter(Path(volume.name).name for volume in volumes)
    labelled, notes = [], []
    for volume in volumes:
        file_name = Path(volume.name).name
        label = classes.get(volume.name) or (classes.get(file_name) if file_names[file_name] == 1 else None)
        if label is None:
            text = f"no label in {printable(table)}; each volume needs one; add a row"
            notes.append(Note(printable(volume.name), text))
        labelled.append(replace(volume, class_name=label))
    return labelled, notes


def with_folders(volumes: Sequence[DiscoveredVolume]) -> list[DiscoveredVolume]:
    """Return the volumes of a folder with its subfolders as classes, if that is what they are."""
    classes = folder_classes([volume.name for volume in volumes]) or {}
    return [replace(volume, class_name=classes.get(volume.name)) for volume in volumes]


def class_names_of(volumes: Sequence[DiscoveredVolume]) -> tuple[str, ...]:
    """Return the class names, indexed by label number; empty unless every volume has a class.

    If all names are whole numbers they are sorted as numbers, else as text.
    """
    names = {volume.class_name for volume in volumes if volume.class_name is not None}
    if any(volume.class_name is None for volume in volumes):
        return ()
    is_number = all(name.removeprefix("-").isdecimal() and len(name) < LONGEST_NUMBER for name in names)
    return tuple(sorted(names, key=(lambda name: (int(name), name)) if is_number else None))


def _in_folder(root: Path) -> tuple[list[DiscoveredVolume], list[Note]]:
    paths: dict[str, Path] = {}
    dicom_folders, notes = set(), []
    for path in _walk(root):
        name = path.relative_to(root).as_posix()
        if dicom.is_dicom(path):
            dicom_folders.add(path.parent)
        elif suffix_of(path.name):
            paths[name] = path
        elif path.is_symlink() and not os.path.exists(path):
            notes.append(left_out(name, "a link to nothing"))
    if RUNS.is_dir() and root.resolve() in RUNS.resolve().parents:
        notes.append(left_out(RUNS, "it holds what runs wrote"))
    for name, why in label_files(list(paths)).items():
        notes.append(left_out(name, why, is_label_map=True))
        del paths[name]
    for folder in sorted(dicom_folders):
        series, unused = series_in(root, folder)
        paths |= series
        notes += unused
    if not paths:
        raise DataError(
            f"data.source: {printable(root)} holds no volume; {' '.join(SUFFIXES)} are read, subfolders too; check it"
        )
    return [DiscoveredVolume(paths[name], name) for name in sorted(paths)], notes


def series_in(root: Path, folder: Path, key: str = "data.source") -> tuple[dict[str, Path], list[Note]]:
    """Return the DICOM series in a folder of the setting `key` by name, each as its first file, and what is none."""
    try:
        scanned = dicom.scan(folder)
    except OSError as error:
        raise DataError(f"{key}: {printable(folder)} cannot be read ({reason(error)}); check it") from error
    # At the top a series is named by its first file, since a folder may have the name of the top.
    place = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    volumes = {uid: images for uid, images in scanned.series.items() if not all(i.is_localizer for i in images)}
    names, notes = {}, []
    for uid, images in scanned.series.items():
        localizers = [image.path.name for image in images if image.is_localizer]
        if localizers:
            why = f"a localizer ({counted(len(localizers), 'image')}), not a volume"
            notes.append(left_out(f"{place}{localizers[0]}", why))
        if uid in volumes:
            first = next(image.path for image in images if not image.is_localizer)
            names[place[:-1] if place and len(volumes) == 1 else f"{place}{first.name}"] = first
    notes += [left_out(f"{place}{path.name}", "DICOM without an image") for path in scanned.others]
    if not volumes:
        # Named as a problem, because it may have been a slice.
        names |= {f"{place}{path.name}": path for path in scanned.unreadable}
    return names, notes


def _walk(root: Path) -> Iterator[Path]:
    """Yield the files under a folder, without those that runs wrote unless the folder is there.

    Follow each link once, skip names with a leading dot (macOS creates them).
    """
    seen = {os.path.realpath(RUNS)} if not root.resolve().is_relative_to(RUNS.resolve()) else set()
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder) / name for name in files if not name.startswith("."))


def _in_dataset_json(listing: Path) -> tuple[list[DiscoveredVolume], list[Note]]:
    where = printable(listing)
    try:
        content = json.loads(read_text(listing))
    except OSError as error:
        raise FileError(
            listing, f"cannot be read ({reason(error)}); a UTF-8 text file is allowed; repair it"
        ) from error
    except (ValueError, RecursionError) as error:
        raise FileError(listing, f"cannot be read as JSON ({error}); repair it") from error
    if not isinstance(content, dict) or not isinstance(content.get("training"), list):
        raise FileError(listing, 'no list "training"; it lists the volumes as {"image": PATH} or PATH; add it')
    if not content["training"]:
        raise FileError(listing, '"training" is empty; at least one volume is needed; add it')
    explicit = content.get("validation", [])
    if not isinstance(explicit, list):
        raise FileError(listing, '"validation" is not a list; it is written like "training"; repair it')
    entries = [("training" if explicit else None, entry) for entry in content["training"]]
    entries += [("validation", entry) for entry in explicit]
    volumes, problems = [], []
    for number, (split, entry) in enumerate(entries):
        try:
            volume = _entry(listing, entry, split)
            volumes.append(replace(volume, class_name=_class_of(entry, listing.parent, _label_names(content))))
        except ValueError as error:
            problems.append(f"  entry {number}: {error}")
    twice = [name for name, count in Counter(volume.name for volume in volumes).items() if count > 1]
    problems += [f"  {printable(name)}: listed more than once; remove all but one" for name in twice]
    if problems:
        raise DataError("\n".join([f"{where}: {counted(len(problems), 'problem')}:", *problems]))
    without = [volume.name for volume in volumes if volume.class_name is None]
    notes = []
    if 0 < len(without) < len(volumes):
        share = f"{len(without)} of {len(volumes)} volumes have none, for example {printable(without[0])}"
        notes.append(Note(where, f"classes left out, {share}"))
    return sorted(volumes, key=lambda volume: volume.name), notes


def _entry(listing: Path, entry: Any, split: str | None) -> DiscoveredVolume:
    """Read one entry; raise ValueError with what is wrong with it."""
    image = entry.get("image") if isinstance(entry, dict) else entry
    # A list of files, one per channel, is refused: only one of them would be read.
    if not isinstance(image, str) or not image or "\0" in image:
        raise ValueError(f'its image is {_shown(image)}; one path is allowed; write {{"image": "imagesTr/a.nii.gz"}}')
    root = listing.parent
    path = root / image
    name = os.path.normpath(image).replace(os.sep, "/")
    os.fsencode(image)  # raises ValueError for what no file can be called
    if os.path.isabs(image) or name.split("/")[0] == "..":
        raise ValueError(
            f"{printable(image)} leads out of {printable(root)}; only files inside it are allowed; "
            "move it there, or put a link to it there"
        )
    return DiscoveredVolume(path, name, split=split)


def _label_names(content: dict[str, Any]) -> set[str]:
    """Return the numbers and names in the table "labels", in whichever order it has them."""
    table = content.get("labels")
    parts = [*table, *table.values()] if isinstance(table, dict) else []
    return {str(name) for part in parts for name in (part if isinstance(part, list) else [part])}


def _class_of(entry: Any, root: Path, names: set[str]) -> str | None:
    """Return the entry's "class", or its "label" unless that is the path of a segmentation.

    Raises ValueError with what is wrong with it.
    """
    if not isinstance(entry, dict):
        return None
    key = "class" if "class" in entry else "label"
    label = entry.get(key)
    if key == "label" and label is None:
        return None
    paths: list[Any] = label if isinstance(label, list) else [label]
    if key == "label" and paths and all(isinstance(p, str) and ("/" in p or suffix_of(p.strip())) for p in paths):
        missing = next((path for path in paths if not os.path.exists(root / path.strip())), None)
        if missing is not None:
            raise ValueError(
                f"its label {shortened(printable(missing))} is not a file; restore it or remove the label, or name a "
                'class as "class"'
            )
        return None
    if isinstance(label, bool) or not isinstance(label, str | int) or not str(label).strip():
        raise ValueError(f"its {key} is {_shown(label)}; text or a whole number is allowed; repair it")
    text = str(label).strip()
    if key == "label" and names and text not in names:
        raise ValueError(
            f'its label {shortened(printable(text))} is not in the table "labels"; add it there or change it'
        )
    return text


def _shown(value: Any) -> str:
    return shortened(printable(json.dumps(value, ensure_ascii=False)))


def columns_of(table: str, wanted: str, key: str, remedy: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line numbers, names and values of a CSV from its column file and another; `key` is the setting."""
    columns, rows = read_table(expanded(table), key)
    if columns.count("file") != 1 or columns.count(wanted) != 1:
        raise DataError(
            f"{key}: {printable(table)} has the columns {shortened(printable(', '.join(columns))) or '(none)'}; file "
            f"and {printable(wanted)} are needed, once each; {remedy}"
        )
    for number, row in rows:
        name, value = (row[n].strip() if n < len(row) else "" for n in (columns.index("file"), columns.index(wanted)))
        yield number, os.path.normpath(name).replace(os.sep, "/") if name else "", value


def read_table(table: Path, key: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the column names of a CSV in lower case, and its other rows with their line numbers."""
    where = f"{key}: {printable(table)}"
    try:
        reader = csv.reader(io.StringIO(read_text(table), newline=""), strict=True)
        columns = [name.strip().lower() for name in next(reader, [])]
        rows = [(reader.line_num, row) for row in reader if row]
    except OSError as error:
        raise DataError(f"{where} cannot be read ({reason(error)}); give a CSV file") from error
    except csv.Error as error:
        raise DataError(f"{where} line {reader.line_num} cannot be read ({error}); repair it") from error
    for number, row in rows:
        if any(cell.strip() for cell in row[len(columns) :]):
            raise DataError(f"{where} line {number} has {len(row)} fields for {len(columns)} columns; quote its commas")
    return columns, rows


def _read_label_table(table: str) -> dict[str, str]:
    key = "data.class_labels"
    where = f"{key}: {printable(table)}"
    classes: dict[str, str] = {}
    for number, name, label in columns_of(table, "label", key, "make file,label its first line"):
        if not name or not label:
            raise DataError(f"{where} line {number} has no file or no label; both are needed; complete it")
        if classes.setdefault(name, label) != label:
            raise DataError(f"{where} gives {printable(name)} two labels; one is allowed; remove the other")
    return classes
