"""Arrays on disk, prepared volumes and latents: one file each, read through a memory map that all processes share.

A file is a line of JSON, padded to whole pages, and then the values as float32 in C order. Its name is the hash of its
source and its folder a hash of the settings that decide the result, so neither can be stale.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from data.reading import VolumeFacts, facts_from
from runtime.files import PREPARED, check_regular, reason, replacing, used_caches
from settings.data import DataSettings

log = logging.getLogger(__name__)

# Part of the key: change it whenever the same file and settings would be stored differently.
VERSION = 3

PAGE = 4096
LONGEST_HEADER = 1 << 20
NUMBER = np.dtype("<f4")
SUFFIX = ".volume"

# No array takes that long to write, so a temporary file of this age was left by a process that was killed.
ABANDONED_SECONDS = 600

# The settings that decide how a volume is prepared. Random crops and augmentation come after.
DECISIVE = {"spacing", "voxel_size", "resize", "intensity", "frame"}


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


class PreparedFolder(ArrayFolder):
    """The prepared volumes of one way of preparing them, by the hash of the source's bytes."""

    def __init__(self, s: DataSettings, root: Path = PREPARED) -> None:
        decisive = json.dumps([VERSION, s.model_dump(mode="json", include=DECISIVE)], sort_keys=True)
        super().__init__(root / hashlib.sha256(decisive.encode()).hexdigest()[:24])
        self.grid = tuple(s.voxel_size)

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob(f"*{SUFFIX}"))

    def num_bytes(self, num_channels: int) -> int:
        """Return the size of one prepared file, without the rest of its header if that is longer than a page."""
        return PAGE + NUMBER.itemsize * num_channels * math.prod(self.grid)

    def keep(self, image: np.ndarray, facts: VolumeFacts) -> None:
        """Write one prepared volume; raise OSError if that fails."""
        self.write(facts.digest, image, asdict(facts))

    def volume(self, digest: str, num_channels: int, is_checked: bool = False) -> tuple[np.ndarray, VolumeFacts]:
        """Return one prepared volume (float32, C, D, H, W) with what was measured in its source, as `read` does."""
        image, facts = self.read(digest, (num_channels, *self.grid), is_checked)
        return image, facts_from(facts)

    def tidy(self) -> None:
        """Remove files that killed processes left half-written."""
        for path in self.folder.glob(f".*{SUFFIX}.*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()

    def intact(self, digests: Iterable[str], num_channels: int) -> set[str]:
        """Return which of these volumes are there and complete."""
        shape = (num_channels, *self.grid)
        return {digest for digest in digests if self.find(digest, shape, is_checked=False) is not None}


def _checksum(facts: Any) -> int:
    return zlib.crc32(json.dumps(facts).encode())
