"""Arrays on disk, prepared volumes and latents: one file each, read through a memory map that all processes share.

A file is a line of JSON, padded to whole pages, and then the values as float32 in C order. Its name is the hash of its
source and its folder a hash of the settings that decide the result, so neither can be stale.
"""

from __future__ import annotations

import json
import logging
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.files import check_regular, reason, replacing, used_caches

log = logging.getLogger(__name__)

PAGE = 4096
LONGEST_HEADER = 1 << 20
NUMBER = np.dtype("<f4")
SUFFIX = ".volume"


class StoredError(Exception):
    """A stored array that is missing, damaged or another one; the text says which."""


class ArrayFolder:
    """A folder of arrays, each with facts about it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        used_caches.add(folder)

    def path_of(self, name: str) -> Path:
        """Return the path of an array's file."""
        return self.folder / f"{name}{SUFFIX}"

    def write(self, name: str, array: np.ndarray, facts: Any) -> None:
        """Write one array atomically; raise OSError if that fails."""
        values = np.ascontiguousarray(array, NUMBER)
        place = f"{self.folder.name}/{name}"
        checksums = [_checksum(facts), zlib.crc32(values.data.cast("B"))]
        text = json.dumps({"place": place, "shape": values.shape, "checksums": checksums, "facts": facts}).encode()
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.path_of(name)) as temporary, temporary.open("wb") as file:
            # Padded to whole pages, so that the values start at one.
            file.write(text.ljust(-(-(len(text) + 1) // PAGE) * PAGE - 1) + b"\n")
            file.write(values.data.cast("B"))

    def read(self, name: str, shape: Sequence[int], is_checked: bool = True) -> tuple[np.ndarray, Any]:
        """Map one array (float32); return it with its facts.

        Raises `StoredError` unless it is complete and what it claims to be. With `is_checked` its values are compared
        with their checksum too, which reads all of them.
        """
        path, shape = self.path_of(name), tuple(shape)
        try:
            size = check_regular(path)
            with path.open("rb") as file:
                line = file.readline(LONGEST_HEADER)
            header = json.loads(line)
            if header["place"] != f"{self.folder.name}/{name}" or tuple(header["shape"]) != shape:
                raise StoredError("it holds something else")
            expected = len(line) + NUMBER.itemsize * math.prod(shape)
            if size != expected:
                raise StoredError(f"it has {size:,} bytes instead of {expected:,}")
            # Copy on write: nobody can change the file through the array.
            values = np.memmap(path, NUMBER, "c", len(line), shape)
            checksums = [_checksum(header["facts"])]
            checksums += [zlib.crc32(values.data.cast("B"))] if is_checked else []
            if checksums != header["checksums"][: len(checksums)]:
                raise StoredError("its content does not match its checksum")
            return values, header["facts"]
        except FileNotFoundError:
            raise StoredError("it is missing") from None
        except OSError as error:
            raise StoredError(f"it cannot be read ({reason(error)})") from None
        except (ValueError, TypeError, LookupError, RecursionError):
            raise StoredError("its header is damaged") from None

    def find(self, name: str, shape: Sequence[int], is_checked: bool = True) -> tuple[np.ndarray, Any] | None:
        """Return what `read` returns; None if it must be made, because it is missing or, as is logged, damaged."""
        if not os.path.lexists(self.path_of(name)):
            return None
        try:
            return self.read(name, shape, is_checked)
        except StoredError as error:
            log.warning("data: %s: %s; it is made again", self.path_of(name), error)
            return None


def _checksum(facts: Any) -> int:
    return zlib.crc32(json.dumps(facts).encode())
