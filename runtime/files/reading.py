"""Reads UTF-8 text from regular files of limited size."""

from __future__ import annotations

import stat
from pathlib import Path

LARGEST_TEXT = 64 * 1024 * 1024


def check_regular(path: Path) -> int:
    """Return the size in bytes of a regular file that may be read, following links; raise `OSError` for anything else.

    Check before opening, because opening a FIFO blocks until it has a writer, and a device may never end. The libraries
    that read files later may call one that they may not read missing.
    """
    try:
        status = path.stat()
    except ValueError as error:  # a NUL in the path
        raise OSError(str(error)) from None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError("a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
    path.open("rb").close()
    return status.st_size


def read_text(path: Path, largest: int = LARGEST_TEXT) -> str:
    """Return a text file without its byte order mark; raise `OSError` with the reason if it is not text."""
    size = check_regular(path)
    if size > largest:
        raise OSError(f"{size:,} bytes; the limit is {largest:,}")
    content = path.read_bytes()
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise OSError("UTF-16, not UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OSError(f"byte {error.start} is not UTF-8") from None


def reason(error: OSError) -> str:
    """Return why a file could not be read, without its name, which the caller's message gives."""
    return error.strerror or str(error)
