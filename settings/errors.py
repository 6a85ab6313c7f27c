"""The errors that users can meet, each with the exit code of the command that met it."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pickle import UnpicklingError

# What torch.load(weights_only=True) raises for a file that is cut, changed or no checkpoint (tests/faults fuzzes it).
READ_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    RuntimeError,
    struct.error,
    UnpicklingError,
)
# It raises these for changed bytes too, but a mistake in a program does so more often.
AMBIGUOUS_READ_ERRORS: tuple[type[Exception], ...] = (TypeError, AttributeError, AssertionError)


class UserError(Exception):
    """Something that the user can put right: printed as text, without a traceback."""

    exit_code = 2
    is_reported_by_another_rank: bool | None = None
    """Whether another rank prints this error; None while the ranks are not connected."""


class DataError(UserError):
    """A volume, a folder or a label file that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint or a weight file that is missing, damaged or does not fit the settings."""


class TrainingError(UserError):
    """Training that cannot go on: a loss that is not finite, a worker that died, a disk that is full."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config: where it stands, what was found, what is allowed, what to do."""

    where: str
    found: str
    allowed: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.where}: " + "; ".join(part for part in (self.found, self.allowed, self.remedy) if part)


class ConfigError(UserError):
    """A config that cannot be used, with every problem in it."""

    def __init__(self, problems: Iterable[Problem] | str, source: str = "") -> None:
        self.problems = (Problem("config", problems),) if isinstance(problems, str) else tuple(problems)
        self.source = source
        super().__init__(problems if isinstance(problems, str) else self._report())

    def _report(self) -> str:
        count = len(self.problems)
        head = f"{count} problem{'s' if count > 1 else ''}{' in ' + self.source if self.source else ''}:"
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])
