"""Columns of a table as conditions: coded as numbers, whose embedding is added to that of the timestep."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from data import VolumeFile
from data.partners import Row, read_rows
from diffusion.conditioning.kind import Asked, ConditionKind, Partners, Preparation, Prepared, Sample
from runtime.files import printable
from settings import DataError, DataSettings, Settings, UserError
from settings.conditioning import MAX_CATEGORIES, TABULAR, TabularSettings

log = logging.getLogger(__name__)


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


class Tabular(ConditionKind):
    """The coded values (B, N) of each volume."""

    name = "tabular"
    section = "tabular"
    unet_input = "numbers"

    def find(self, files: Sequence[VolumeFile], data: DataSettings, problems: list[str]) -> Partners:
        """Read the row of each volume; name each that is missing, doubled or wrong."""
        s, key = self.s.tabular, f"{TABULAR}.table"
        assert s.table is not None, "columns need a table"
        where = f"{key}: {printable(s.table)}"
        rows = read_rows(s.table, s.columns, files, key, problems)
        problems += [
            f"{printable(name)}: {column} is {printable(row[column])}, which is not a finite number in {where}; "
            "correct it"
            for name, row in rows.items()
            for column in s.continuous
            if row[column] and _number(row[column]) is None
        ]
        for column in s.categorical:
            known = {row[column] for row in rows.values()}
            if len(known) > MAX_CATEGORIES:
                problems.append(
                    f"{where}: column {printable(column)} has {len(known)} different values; allowed: at most "
                    f"{MAX_CATEGORIES}; merge some of them, or make the column continuous"
                )
        return Partners(rows=tuple(rows.values()))

    def prepare(self, partners: Partners, run: Preparation) -> Prepared:
        """Code the rows, by the code of training if there is one."""
        if run.learned is None:
            code = code_of(self.s.tabular, partners.rows, len(run.volumes.train))
        else:
            code = run.learned[self.name]
        vectors = []
        for file, row in zip(run.files, partners.rows, strict=True):
            try:
                vectors.append(code.encode(row))
            except ValueError as error:
                raise DataError(
                    f"{printable(file.name)}: {error}, which the run was trained with; correct {TABULAR}.table, or "
                    "train again"
                ) from None
        coded = torch.tensor(vectors)
        return Prepared(lambda index, number, copy: coded[index], {"numbers": code.model_dump(mode="json")})

    def learned(self, metadata: Mapping[str, Any], settings: Settings) -> NumberCode:
        """Return the code of the values."""
        return NumberCode.model_validate(metadata.get("numbers"))

    def number_names(self, asked: Asked) -> Sequence[str]:
        """Return the names of the columns."""
        return asked.learned[self.name].columns

    def from_command_line(self, asked: Asked, has_cases: bool) -> Callable[[Sample], Tensor]:
        """Return the coded values that are asked for; the others are hidden, if training hid any."""
        code: NumberCode = asked.learned[self.name]
        values = {name: asked.numbers[name] for name in code.columns if name in asked.numbers}
        missing = [printable(name) for name in code.columns if name not in values]
        if missing and not self.s.dropout:
            raise UserError(
                f"--number: {', '.join(missing)} not given, but the run was trained with every number of every volume "
                f"(dropout: 0); add --number {missing[0]}=VALUE"
            )
        try:
            vector = torch.tensor(code.encode(values))
        except ValueError as error:
            raise UserError(f"--number: {error}; correct it") from None
        for (name, _, _), (lowest, highest) in zip(code.continuous, code.ranges, strict=False):
            if name in values and not lowest <= float(values[name]) <= highest:
                text = "--number: %s=%s is outside what the run was trained on, %g to %g; the volumes are extrapolated"
                log.warning(text, printable(name), printable(values[name]), lowest, highest)
        return lambda sample: vector


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


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
