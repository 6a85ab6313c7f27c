"""Inflates gzip files: into memory of the right size at once, with Intel's inflate where it is installed."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)


def _gzip_reader() -> Any:
    try:
        from isal.igzip import IGzipFile
    except ImportError:
        log.warning("data: isal is not installed, so gzip files are read several times slower; run pip install isal")
        return gzip.GzipFile
    return IGzipFile


GzipFile = _gzip_reader()


def inflate(path: Path, size: int) -> np.ndarray:
    """Return the first `size` bytes of a gzip file's content as uint8, after checking all of it.

    Damage raises OSError, EOFError, ValueError or zlib.error; a shorter content raises EOFError.
    """
    out = np.empty(size, np.uint8)
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            raise gzip.BadGzipFile("Not a gzipped file")
        file.seek(0)
        with GzipFile(fileobj=file, mode="rb") as content:
            done = 0
            while done < size:
                count = content.readinto(out.data[done:])
                if not count:
                    raise EOFError(f"Expected {size} bytes, got {done} bytes")
                done += count
            # The checksum follows the last byte, so read to the end.
            while content.read(1 << 20):
                pass
    return out
