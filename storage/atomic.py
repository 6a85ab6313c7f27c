"""Writes files so that they are complete or absent, even if writing is interrupted."""

from __future__ import annotations

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
    temporary = path.with_name(f".{path.name}.{threading.get_ident()}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file; readers see the old content or the new, never a part of it."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
