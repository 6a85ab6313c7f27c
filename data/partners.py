"""What belongs to each volume: its partner, by name in another folder or in a CSV file, and its row of a CSV file."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from data.checking import VolumeFacts, check_files
from data.discovery import LABEL_ENDING, VolumeFile, expanded, volumes_under
from data.formats import SUFFIXES, read_header, stem
from data.geometry import mismatch
from data.header import Note
from runtime.files import counted, printable, read_text, reason, shortened
from settings import DataError
from settings.data import DataSettings

log = logging.getLogger(__name__)

# nnU-Net numbers the channels of an image at the end of its name, and its label map has no number.
_CHANNEL = re.compile(r"_\d{4}$")


@dataclass(frozen=True)
class PartnerSource:
    """Where partners are: the value of a setting, its key, and the column that has them if it is a CSV file."""

    source: str
    key: str
    column: str


def checked_partners(
    place: PartnerSource,
    files: Sequence[VolumeFile],
    data: DataSettings,
    reading: DataSettings,
    problem_of: Callable[[Path, VolumeFacts], str | None],
    problems: list[str],
    num_channels: int = 1,
) -> tuple[VolumeFile, ...]:
    """Return the partner of each volume, measured with `reading`; append a line to `problems` for each problem.

    `problem_of` returns why a file cannot be a partner, or None if it can.
    """
    found = find_partners(place, files, problems)
    paired = [file for file in files if file.name in found]
    paths = [found[file.name] for file in paired]
    partners = []
    for file, result in zip(paired, check_files(paths, reading, num_channels) if paths else [], strict=True):
        path, facts = result.path, result.facts
        if facts is None:
            problems += map(str, result.problems)
            continue
        problems += filter(
            None, [mismatch(path, facts, file.path, read_header(file.path), data), problem_of(path, facts)]
        )
        partners.append(VolumeFile(path, printable(path), None, facts.num_channels, facts.digest))
    return tuple(partners)


def find_partners(place: PartnerSource, files: Sequence[VolumeFile], problems: list[str]) -> dict[str, Path]:
    """Return the partner of each volume by the volume's name; append a line for each volume without exactly one.

    Raises DataError if the source itself cannot be read.
    """
    where = f"{place.key}: {printable(place.source)}"
    path = expanded(place.source)
    if path.suffix.lower() == ".csv" and os.path.isfile(path):
        rows = read_rows(place.source, [place.column], files, place.key, problems)
        return {name: path.parent / row[place.column] for name, row in rows.items() if row[place.column]}
    if not os.path.isdir(path):
        raise DataError(f"{where} is neither a folder nor a CSV file; one of the two is allowed; check it")
    found = {file.name: paths for file, paths in zip(files, _by_name(path, files, where, place.key), strict=True)}
    shared = Counter(paths[0] for paths in found.values() if len(paths) == 1)
    partners = {}
    for name, paths in found.items():
        if len(paths) != 1:
            both = f" ({' and '.join(printable(path) for path in paths[:2])})" if paths else ""
            text = f"{len(paths) or 'no'} partner{'s' if paths else ''} in {where}{both}; each volume needs one"
        elif shared[paths[0]] > 1:
            text = f"its partner {printable(paths[0])} has the name of {shared[paths[0]]} volumes; each needs its own"
        else:
            partners[name] = paths[0]
            continue
        remedy = "name partners as their volumes, in the same subfolders, or list the pairs in a CSV file"
        problems.append(f"{printable(name)}: {text}; {remedy}")
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
    by: dict[tuple[str, str], list[Path]] = {}
    for place, path in sorted(volumes.items()):
        name = stem(PurePosixPath(place).name)
        start = LABEL_ENDING.sub("", name)
        forms = {("path", stem(place)), ("name", name), ("name", start)}
        for form in forms if start == name else {*forms, ("start", start)}:
            by.setdefault(form, []).append(path)
    found = []
    for file in files:
        name, own = stem(PurePosixPath(file.name).name), os.path.realpath(file.path)
        # The longest first, so that a map of this scan comes before one of the patient.
        starts = [name[: mark.start()] for mark in reversed([*re.finditer("[-_.]", name)])]
        tries = [("path", stem(file.name)), ("name", name), ("name", _CHANNEL.sub("", name))]
        tries += [("start", start) for start in starts]
        others = ([path for path in by.get(form, ()) if os.path.realpath(path) != own] for form in tries)
        found.append(next((paths for paths in others if paths), []))
    return found


Row = Mapping[str, str]
"""The values of one volume by column, as text."""


def read_rows(
    table: str, columns: Sequence[str], files: Sequence[VolumeFile], key: str, problems: list[str]
) -> dict[str, Row]:
    """Return what `rows_of` returns for files, and append a line to `problems` for each that it notes."""
    rows, notes = rows_of(table, columns, [file.name for file in files], key)
    problems += map(str, notes)
    return rows


def rows_of(table: str, columns: Sequence[str], names: Sequence[str], key: str) -> tuple[dict[str, Row], list[Note]]:
    """Return the values of each volume in a table, that of the setting `key`, by the volume's name.

    A row may give a volume's file name alone if that is unique. Each volume without a row, with several, or with empty
    cells gets a note. Raises DataError if the column file or one of `columns`, whatever their case, is not there once.
    Rows without a volume are counted in a warning, and refused if all are.
    """
    where = f"{key}: {printable(table)}"
    listed: dict[str, list[Row]] = {}
    for name, row in _read(table, columns, where):
        if row not in listed.setdefault(name, []):
            listed[name].append(row)
    file_names = [PurePosixPath(name).name for name in names]
    counts = Counter(file_names)
    known = {"", *names, *file_names}
    if unknown := [name for name in listed if name not in known]:
        examples = shortened(printable(", ".join(unknown[:3])))
        text = f"{counted(len(unknown), 'row')} without a volume of the run, such as {examples}"
        if len(unknown) == len(listed):
            raise DataError(f"{where} has only {text}; give names of files, or paths below data.source")
        log.warning("%s has %s", where, text)
    rows, notes = {}, []
    for name, short in zip(names, file_names, strict=True):
        found = listed.get(name) or (listed.get(short, []) if counts[short] == 1 else [])
        texts = [
            f"{column} is empty in {where}; correct it" for row in found for column, text in row.items() if not text
        ]
        if len(found) == 1:
            rows[name] = found[0]
        else:
            number, remedy = (f"{len(found)} rows", "remove the others") if found else ("no row", "add it")
            texts = [f"{number} in {where}; each volume needs one; {remedy}"]
        notes += [Note(printable(name), text) for text in texts]
    return rows, notes


def _read(table: str, columns: Sequence[str], where: str) -> list[tuple[str, Row]]:
    """Return the volume's name and the values of each row, those of `columns`."""
    try:
        reader = csv.reader(io.StringIO(read_text(expanded(table)), newline=""), strict=True)
        header = [name.strip().lower() for name in next(reader, [])]
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except OSError as error:
        raise DataError(f"{where} cannot be read ({reason(error)}); give a CSV file") from error
    except csv.Error as error:
        raise DataError(f"{where} line {reader.line_num} cannot be read ({error}); repair it") from error
    if any(header.count(name.lower()) != 1 for name in ("file", *columns)):
        raise DataError(
            f"{where} has the columns {shortened(printable(', '.join(header))) or '(none)'}; "
            f"{printable(', '.join(['file', *columns]))} are needed, once each; name them in its first line"
        )
    result: list[tuple[str, Row]] = []
    for number, row in rows:
        if any(row[len(header) :]):
            raise DataError(f"{where} line {number} has {len(row)} fields for {len(header)} columns; quote its commas")
        cells = dict(zip(header, row, strict=False))
        name = os.path.normpath(cells["file"]).replace(os.sep, "/") if cells.get("file") else ""
        result.append((name, {column: cells.get(column.lower(), "") for column in columns}))
    return result
