"""Writes files so that they are complete or absent, even if writing is interrupted."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; after the block, flush that file to disk and rename it to `path`.

    If the block fails, remove the temporary file and leave `path` unchanged. The folder must exist. Several processes
    and threads may write the same path; the last one to finish wins.
    """
    with temporary_beside(path) as temporary:
        yield temporary
        put_in_place(temporary, path)


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`, and remove that file if the block fails.

    For files whose final name depends on their content: write one, then call `put_in_place` inside the block.
    """
    temporary = path.with_name(f".{path.name}.{threading.get_ident()}.{os.getpid()}.tmp")
    try:
        yield temporary
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink()
        raise


def put_in_place(temporary: Path, path: Path) -> None:
    """Flush a written file to disk and rename it to `path` in the same folder; both survive a power cut."""
    _flush(temporary)
    os.replace(temporary, path)
    _flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file; readers see the old content or the new, never a part of it."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
