"""Output files of commands: checked before any long work starts, written at its end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from settings.errors import UserError


def check_output_file(path: str | Path, option: str = "--json", inputs: Iterable[str | Path] = ()) -> None:
    """Raise `UserError`, naming the option, unless a file can be written to this path. Creates nothing.

    An output that would replace one of the command's `inputs` is refused.
    """
    if not str(path):
        raise UserError(f"{option}: the path is empty; give the name of a file")
    existing = _nearest_existing(path, option)
    if existing != Path(path):
        _check_writable(existing, path, option)
    elif existing.is_dir():
        raise UserError(f"{option}: {path} is a folder; a file is needed; add a file name")
    elif existing.is_fifo():
        raise UserError(f"{option}: {path} is a pipe; a file is needed; give another name")
    elif any(Path(source).exists() and existing.samefile(source) for source in inputs):
        raise UserError(f"{option}: {path} is an input of this command and would be lost; give another name")
    elif not os.access(existing, os.W_OK):
        raise UserError(f"{option}: {path} cannot be overwritten; change its permissions, or give another name")


def check_output_folder(path: str | Path) -> None:
    """Raise `UserError`, naming --out, unless files can be written to this folder, which need not exist yet.

    Creates nothing.
    """
    option = "--out"
    if not str(path):
        raise UserError(f"{option}: the path is empty; give the name of a folder")
    _check_writable(_nearest_existing(path, option), path, option)


def write_output(path: str | Path, text: str) -> None:
    """Write a text file, creating its folder. The path may be a device such as /dev/stdout."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def _nearest_existing(path: str | Path, option: str) -> Path:
    """Return the path itself if it exists, else the nearest of its parents that does."""
    for candidate in (Path(path), *Path(path).absolute().parents):
        try:
            candidate.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise UserError(f"{option}: {path} cannot be used ({error.strerror}); give another path") from None
        return candidate
    raise AssertionError(f"{path}: none of its parents exists, not even the root")


def _check_writable(folder: Path, path: str | Path, option: str) -> None:
    """Raise `UserError` unless `folder`, where `path` will be written, is a folder that accepts new files."""
    if not folder.is_dir():
        raise UserError(f"{option}: {path} cannot be written because {folder} is not a folder; give another path")
    try:
        # Permissions do not show that a disk is read-only, so try it. On Linux this file never gets a name.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"{option}: {path} cannot be written because {folder} is not writable ({error.strerror}); give another path"
        ) from None
