"""Errors that users can fix, with the exit code of a command that raises them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pickle import UnpicklingError

from runtime.files import counted

# What torch.load(weights_only=True) raises for files that are truncated, damaged or not checkpoints (see tests/faults).
READ_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    RuntimeError,
    struct.error,
    UnpicklingError,
)
# Damaged files can raise these as well, but they are more often bugs.
AMBIGUOUS_READ_ERRORS: tuple[type[Exception], ...] = (TypeError, AttributeError, AssertionError)


FULL_WIDTH = dict(zip("\uff1a\uff0c\uff1d\uff3b\uff3d\u3010\u3011\u201c\u201d", ':,=[][]""', strict=True))
"""Punctuation of Chinese and Japanese keyboards that YAML does not read, with what it reads."""


class UserError(Exception):
    """An error that the user can fix; printed without a traceback."""

    exit_code = 2
    is_reported_by_another_rank: bool | None = None
    """Whether another rank prints this error; None while the ranks are not connected."""


class DataError(UserError):
    """A volume, folder or label file cannot be used."""


class CheckpointError(UserError):
    """A checkpoint or weight file is missing, damaged or does not fit the settings."""


class TrainingError(UserError):
    """Training cannot continue: the loss is not finite, a worker died, or the disk is full."""


@dataclass(frozen=True)
class Problem:
    """One problem with a config: where it is, what was found, what is allowed, what to do, and other keys involved."""

    where: str
    found: str
    allowed: str = ""
    remedy: str = ""
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        marks = [mark for mark in FULL_WIDTH if mark in self.where + self.found]
        hints = [f"write {FULL_WIDTH[mark]} instead of the full-width {mark}" for mark in marks]
        return f"{self.where}: " + "; ".join(part for part in (self.found, self.allowed, self.remedy, *hints) if part)


Problems = Iterator[Problem]


class ConfigError(UserError):
    """A config cannot be used; lists every problem in it."""

    def __init__(self, problems: Iterable[Problem] | str, source: str = "") -> None:
        self.problems = (Problem("config", problems),) if isinstance(problems, str) else tuple(problems)
        head = f"{counted(len(self.problems), 'problem')}{' in ' + source if source else ''}:"
        lines = [head, *(f"  {problem}" for problem in self.problems)]
        super().__init__(problems if isinstance(problems, str) else "\n".join(lines))
