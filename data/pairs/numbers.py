"""Columns of a CSV as conditions: read for each volume, and coded as the vector that the network takes."""

from __future__ import annotations

import math
import os
import statistics
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from pydantic import BaseModel, ConfigDict

from data.discovery import expanded, read_table
from data.volumes import VolumeFile
from runtime.files.names import printable
from settings import DataError
from settings.conditioning import TabularSettings
from settings.conditioning.sections import MAX_CATEGORIES

TABULAR = "ldm.conditioning.tabular"

Row = Mapping[str, str]
"""The values of one volume by column, as text."""


class NumberCode(BaseModel):
    """How values become a vector: fixed by the training volumes, and stored with the weights.

    A continuous value is standardised and followed by a 1, a categorical one has a 1 in its place. Values that are not
    given are zeros. Continuous columns come with mean and standard deviation, categorical ones with their words.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    continuous: tuple[tuple[str, float, float], ...]
    categorical: tuple[tuple[str, tuple[str, ...]], ...]
    max_categories: int
    ranges: tuple[tuple[float, float], ...] = ()
    """The lowest and the highest training value of each continuous column."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of all columns."""
        return (*(name for name, _, _ in self.continuous), *(name for name, _ in self.categorical))

    def encode(self, values: Row) -> list[float]:
        """Return the vector of some values; raise ValueError, with what is allowed, for one that cannot be coded."""
        vector: list[float] = []
        for name, mean, deviation in self.continuous:
            number = _number(values[name]) if name in values else None
            if name in values and number is None:
                raise ValueError(f"{name}={printable(values[name])} is not a number")
            vector += [0.0, 0.0] if number is None else [(number - mean) / deviation, 1.0]
        for name, known in self.categorical:
            if name in values and values[name] not in known:
                raise ValueError(f"{name}={printable(values[name])} is none of {', '.join(map(printable, known))}")
            vector += [float(name in values and values[name] == word) for word in known]
            vector += [0.0] * (self.max_categories - len(known))
        return vector


def read_numbers(
    s: TabularSettings, files: Sequence[VolumeFile], key: str = f"{TABULAR}.table"
) -> tuple[list[Row], list[str]]:
    """Return the values of each volume, and a line for each that is missing, doubled or wrong.

    `key` is the one that names the table.
    """
    assert s.table is not None, "numbers need a table"
    where = f"{key}: {printable(s.table)}"
    columns, lines = read_table(expanded(s.table), key)
    absent = [name for name in ("file", *s.columns) if columns.count(name.lower()) != 1]
    if absent:
        raise DataError(
            f"{where} has the columns {printable(', '.join(columns)) or '(none)'}; file, {', '.join(s.columns)} are "
            f"needed, once each; add {absent[0]}, or change {key.rpartition('.')[0]}"
        )
    listed: dict[str, list[Row]] = {}
    for _, line in lines:
        cells = dict(zip(columns, (cell.strip() for cell in line), strict=False))
        name = os.path.normpath(cells.get("file", "")).replace(os.sep, "/")
        listed.setdefault(name, []).append({column: cells.get(column.lower(), "") for column in s.columns})
    short_names = Counter(PurePosixPath(file.name).name for file in files)
    rows, problems = [], []
    for file in files:
        short = PurePosixPath(file.name).name
        found = listed.get(file.name) or (listed.get(short, []) if short_names[short] == 1 else [])
        if len(found) == 1:
            problems += [f"{printable(file.name)}: {wrong} in {where}; correct it" for wrong in _wrong(found[0], s)]
            rows.append(found[0])
        elif found:
            problems.append(f"{printable(file.name)}: {len(found)} rows in {where}; one is allowed; remove the others")
        else:
            problems.append(f"{printable(file.name)}: no row in {where}; each volume needs one; add it")
    for column in s.categorical:
        known = {row[column] for row in rows}
        if len(known) > MAX_CATEGORIES:
            problems.append(
                f"{where}: column {printable(column)} has {len(known)} different values; allowed: at most "
                f"{MAX_CATEGORIES}; merge some of them, or make the column continuous"
            )
        problems += [
            f"{where}: column {printable(column)} has {' and '.join(map(printable, words))}, which would count as "
            "different words; one spelling of each word is allowed; change the others"
            for words in _spellings(known)
        ]
    return rows, problems


def _spellings(words: Iterable[str]) -> list[list[str]]:
    """Return words that differ in their spelling only, such as True and true, or 1 and 1.0."""
    alike: dict[str, list[str]] = {}
    for word in sorted(words):
        number = _number(word)
        plain = unicodedata.normalize("NFKC", word).casefold() if number is None else repr(number)
        alike.setdefault(plain, []).append(word)
    return [spellings for spellings in alike.values() if len(spellings) > 1]


def code_of(s: TabularSettings, rows: Sequence[Row], num_train: int) -> NumberCode:
    """Return the code that fits the rows, the first `num_train` of which are of training volumes."""
    train = {name: [float(row[name]) for row in rows[:num_train]] for name in s.continuous}
    return NumberCode(
        # A column that is the same for all training volumes says nothing, whatever it is divided by.
        continuous=tuple((name, statistics.fmean(v), statistics.pstdev(v) or 1.0) for name, v in train.items()),
        categorical=tuple((name, tuple(sorted({row[name] for row in rows}))) for name in s.categorical),
        max_categories=MAX_CATEGORIES,
        ranges=tuple((min(values), max(values)) for values in train.values()),
    )


def _wrong(row: Row, s: TabularSettings) -> list[str]:
    """Return what is wrong with the values of one volume."""
    texts = [f"{name} is empty" for name in s.columns if not row[name]]
    texts += [
        f"{name} is {printable(row[name])}, which is not a finite number"
        for name in s.continuous
        if row[name] and _number(row[name]) is None
    ]
    return texts


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
