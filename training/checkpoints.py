"""Complete checkpoints that survive a crash: written to a temporary file, then renamed to a name with their hash."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import re
from pathlib import Path
from typing import Any

import torch

from runtime.files import check_regular, put_in_place, reason, temporary_beside
from settings import CheckpointError, TrainingError
from settings.errors import AMBIGUOUS_READ_ERRORS, READ_ERRORS

log = logging.getLogger(__name__)

_NAME = re.compile(r"^(?P<stage>[a-z]+)_step_(?P<step>\d{8})_(?P<digest>[0-9a-f]{16})\.pt$")


class _HashingFile(io.BufferedWriter):
    """A file that hashes what is written to it, so that the checksum needs no second read."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.hash = hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Hash and write; keep the error of a failed write, because torch's writer hides it."""
        self.hash.update(data)
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


class Checkpoints:
    """The checkpoints of one stage in one folder."""

    def __init__(self, folder: Path, stage: str, keep: int) -> None:
        self.folder = folder
        self.stage = stage
        self.keep = keep

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove the oldest beyond `keep`; an interrupted save leaves the others alone."""
        stem = f"{self.stage}_step_{step:08d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary_beside(self.folder / stem) as temporary:
                digest = _write(temporary, {**state, "stage": self.stage, "step": step})
                path = self.folder / f"{stem}_{digest[:16]}.pt"
                put_in_place(temporary, path)
        except OSError as error:
            raise TrainingError(
                f"{self.folder}: the checkpoint of step {step} could not be written ({reason(error)}); "
                "earlier checkpoints are untouched; make room or choose another name, then run the same command again"
            ) from error
        self._remove_old(path)
        return path

    def newest(self) -> Path | None:
        """Return the newest undamaged checkpoint, or None when there are no checkpoints.

        Damaged ones are logged and renamed to *.damaged. Raise `CheckpointError` if all are damaged.
        """
        damaged: list[Path] = []
        for path in self._newest_first():
            if _is_whole(path):
                _set_aside(damaged)
                return path
            log.warning("%s: damaged, because its content does not match its checksum; trying the one before it", path)
            damaged.append(path)
        if damaged:
            raise CheckpointError(
                f"{self.folder}: every checkpoint of stage {self.stage} is damaged "
                f"({', '.join(path.name for path in damaged)}); restore one from a backup, or delete them all"
            )
        return None

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint by its name, damaged or not; 0 without one."""
        names = [_NAME.match(path.name) for path in self._newest_first()[:1]]
        return max((int(name["step"]) for name in names if name is not None), default=0)

    def read(self, path: Path) -> dict[str, Any]:
        """Return a checkpoint's state on the CPU; never execute code from the file."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (*READ_ERRORS, *AMBIGUOUS_READ_ERRORS) as error:
            if isinstance(error, AMBIGUOUS_READ_ERRORS) and _is_whole(path):
                raise  # the file is undamaged, so this is a bug
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"{path}: cannot be read ({first_line}); when several machines train together, put the run folder on a "
                "shared disk"
            ) from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: contains a {type(state).__name__}, not a checkpoint; move it away")
        return state

    def _newest_first(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [
            (int(m["step"]), p)
            for p in self.folder.iterdir()
            if (m := _NAME.match(p.name)) and m["stage"] == self.stage
        ]
        by_age = sorted(found, key=lambda entry: (entry[0], entry[1].lstat().st_mtime_ns), reverse=True)
        return [path for _, path in by_age]

    def _remove_old(self, newest: Path) -> None:
        """Remove checkpoints beyond `keep`, except the newest, and temporary files of interrupted saves."""
        for path in [p for p in self._newest_first() if p != newest][self.keep - 1 :]:
            path.unlink(missing_ok=True)
        for path in self.folder.glob(f".{self.stage}_step_*.tmp"):
            path.unlink(missing_ok=True)


def _write(path: Path, state: dict[str, Any]) -> str:
    """Write a checkpoint file and return the SHA-256 of its content."""
    with _HashingFile(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch's writer reports a full disk as an internal error of its own.
            raise file.failure or error from None
        return file.hash.hexdigest()


def _is_whole(path: Path) -> bool:
    """Return whether the content matches the hash in the name; raise `CheckpointError` if it cannot be read."""
    match = _NAME.match(path.name)
    assert match is not None, f"{path.name} is not the name of a checkpoint"
    try:
        check_regular(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest().startswith(match["digest"])
    except OSError as error:
        if error.errno == errno.EIO:  # a bad sector: the file is damaged
            return False
        raise CheckpointError(f"{path}: cannot be read ({reason(error)}); make it readable, or move it away") from error


def _set_aside(damaged: list[Path]) -> None:
    """Rename damaged checkpoints, so that they do not count towards `keep`."""
    for path in damaged:
        try:
            path.rename(path.with_suffix(".damaged"))
        except OSError as error:
            raise CheckpointError(f"{path}: damaged, and cannot be renamed ({error.strerror}); move it away") from error
