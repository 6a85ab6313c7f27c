"""Reads the rows of a CSV file that belong to volumes, by the names in its column file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TypeVar

from data.discovery import expanded, read_table
from data.volumes import VolumeFile
from runtime.files.names import printable
from settings import DataError

Row = Mapping[str, str]
"""The values of one volume by column, as text."""

Listed = TypeVar("Listed")


def read_rows(
    table: str, columns: Sequence[str], files: Sequence[VolumeFile], key: str, problems: list[str]
) -> dict[str, Row]:
    """Return the values of each volume in a table, that of the setting `key`, by the volume's name.

    A line is appended to `problems` for each row that is missing, doubled or has empty cells.
    """
    where = f"{key}: {printable(table)}"
    header, lines = read_table(expanded(table), key)
    absent = [name for name in ("file", *columns) if header.count(name.lower()) != 1]
    if absent:
        raise DataError(
            f"{where} has the columns {printable(', '.join(header)) or '(none)'}; file, {', '.join(columns)} are "
            f"needed, once each; add {absent[0]}, or change {key.rpartition('.')[0]}"
        )
    listed: dict[str, list[Row]] = {}
    for _, line in lines:
        cells = dict(zip(header, (cell.strip() for cell in line), strict=False))
        row = {column: cells.get(column.lower(), "") for column in columns}
        listed.setdefault(normal(cells.get("file", "")), []).append(row)
    rows = {}
    for file, found in zip(files, by_volume(listed, files), strict=True):
        name = printable(file.name)
        if len(found) == 1:
            problems += [f"{name}: {c} is empty in {where}; correct it" for c, text in found[0].items() if not text]
            rows[file.name] = found[0]
        elif found:
            problems.append(f"{name}: {len(found)} rows in {where}; one is allowed; remove the others")
        else:
            problems.append(f"{name}: no row in {where}; each volume needs one; add it")
    return rows


def by_volume(listed: Mapping[str, list[Listed]], files: Sequence[VolumeFile]) -> list[list[Listed]]:
    """Return what is listed under the name of each volume, or under its file name if that is unique."""
    file_names = [PurePosixPath(file.name).name for file in files]
    counts = Counter(file_names)
    return [
        listed.get(file.name) or (listed.get(short, []) if counts[short] == 1 else [])
        for file, short in zip(files, file_names, strict=True)
    ]


def normal(name: str) -> str:
    """Return a path in a table as volumes are named."""
    return os.path.normpath(name).replace(os.sep, "/")
