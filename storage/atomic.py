"""Files that are whole or absent, whatever interrupts the writing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; afterwards flush that file to disk and rename it to `path`.

    If the block fails, remove the temporary file and leave `path` as it was. The folder must exist.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file so that readers see the old content or the new, never half of it."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
