"""Reads the rows of a CSV file that belong to volumes, by the names in its column file."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from data.discovery import DiscoveredVolume, expanded
from data.files.header import Note
from runtime.files import printable, read_text, reason, shortened
from settings import DataError

if TYPE_CHECKING:
    from data.volumes import VolumeFile

Row = Mapping[str, str]
"""The values of one volume by column, as text."""

Listed = TypeVar("Listed")


def read_table(table: str, columns: Sequence[str], key: str, remedy: str) -> list[tuple[int, str, Row]]:
    """Return the line number, the volume's name and the values of each row of a CSV; `key` is the setting.

    Raises DataError, with `remedy` if the column file or one of `columns`, whatever their case, is not there once.
    """
    where = f"{key}: {printable(table)}"
    try:
        reader = csv.reader(io.StringIO(read_text(expanded(table)), newline=""), strict=True)
        header = [name.strip().lower() for name in next(reader, [])]
        rows = [(reader.line_num, row) for row in reader if row]
    except OSError as error:
        raise DataError(f"{where} cannot be read ({reason(error)}); give a CSV file") from error
    except csv.Error as error:
        raise DataError(f"{where} line {reader.line_num} cannot be read ({error}); repair it") from error
    for number, row in rows:
        if any(cell.strip() for cell in row[len(header) :]):
            raise DataError(f"{where} line {number} has {len(row)} fields for {len(header)} columns; quote its commas")
    if any(header.count(name.lower()) != 1 for name in ("file", *columns)):
        needed = f"{', '.join(['file', *columns[:-1]])} and {columns[-1]}"
        raise DataError(
            f"{where} has the columns {shortened(printable(', '.join(header))) or '(none)'}; {printable(needed)} are "
            f"needed, once each; {remedy}"
        )
    result: list[tuple[int, str, Row]] = []
    for number, row in rows:
        cells = dict(zip(header, (cell.strip() for cell in row), strict=False))
        name = normal(cells["file"]) if cells.get("file") else ""
        result.append((number, name, {column: cells.get(column.lower(), "") for column in columns}))
    return result


def with_labels(volumes: Sequence[DiscoveredVolume], table: str) -> tuple[list[DiscoveredVolume], list[Note]]:
    """Return the volumes with classes from a CSV (columns file and label), and a note on each one without."""
    key = "data.class_labels"
    where = f"{key}: {printable(table)}"
    labels: dict[str, list[str]] = {}
    for number, name, row in read_table(table, ["label"], key, "make file,label its first line"):
        if not name or not row["label"]:
            raise DataError(f"{where} line {number} has no file or no label; both are needed; complete it")
        if labels.setdefault(name, [row["label"]]) != [row["label"]]:
            raise DataError(f"{where} gives {printable(name)} two labels; one is allowed; remove the other")
    found = by_volume(labels, [volume.name for volume in volumes])
    labelled = [replace(volume, class_name=next(iter(own), None)) for volume, own in zip(volumes, found, strict=True)]
    text = f"no label in {printable(table)}; each volume needs one; add a row"
    return labelled, [Note(printable(volume.name), text) for volume in labelled if volume.class_name is None]


def read_rows(
    table: str, columns: Sequence[str], files: Sequence[VolumeFile], key: str, problems: list[str]
) -> dict[str, Row]:
    """Return the values of each volume in a table, that of the setting `key`, by the volume's name.

    A line is appended to `problems` for each row that is missing, doubled or has empty cells.
    """
    where = f"{key}: {printable(table)}"
    listed: dict[str, list[Row]] = {}
    for _, name, row in read_table(table, columns, key, f"add what is missing, or change {key.rpartition('.')[0]}"):
        listed.setdefault(name, []).append(row)
    rows = {}
    names = [file.name for file in files]
    for name, found in zip(names, by_volume(listed, names), strict=True):
        volume = printable(name)
        if len(found) == 1:
            problems += [f"{volume}: {c} is empty in {where}; correct it" for c, text in found[0].items() if not text]
            rows[name] = found[0]
        elif found:
            problems.append(f"{volume}: {len(found)} rows in {where}; one is allowed; remove the others")
        else:
            problems.append(f"{volume}: no row in {where}; each volume needs one; add it")
    return rows


def by_volume(listed: Mapping[str, list[Listed]], names: Sequence[str]) -> list[list[Listed]]:
    """Return what is listed under the name of each volume, or under its file name if that is unique."""
    file_names = [PurePosixPath(name).name for name in names]
    counts = Counter(file_names)
    return [
        listed.get(name) or (listed.get(short, []) if counts[short] == 1 else [])
        for name, short in zip(names, file_names, strict=True)
    ]


def normal(name: str) -> str:
    """Return a path in a table as volumes are named."""
    return os.path.normpath(name).replace(os.sep, "/")
