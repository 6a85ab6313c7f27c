"""Prepared volumes on disk: one file per volume, read through a memory map that all processes share.

A file is a line of JSON, padded to whole pages, and then the voxels as float32 in C order. Its name is the hash of the
source's bytes and its folder a hash of the settings that decide the result, so neither can be stale.
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
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from data.formats import signature
from data.reading import VolumeFacts, facts_from
from runtime.files.atomic import replacing, write_text
from runtime.files.reading import check_regular, reason
from runtime.files.run_folder import PREPARED, used_caches
from settings.data import DataSettings

log = logging.getLogger(__name__)

# Part of the key: change it whenever the same file and settings would be stored differently.
VERSION = 2

PAGE = 4096
LONGEST_HEADER = 1 << 20
NUMBER = np.dtype("<f4")
SUFFIX = ".volume"

# No volume takes that long to write, so a temporary file of this age was left by a process that was killed.
ABANDONED_SECONDS = 600

# The settings that decide what is stored. Random crops and augmentation come after.
DECISIVE = {"spacing", "voxel_size", "resize", "intensity", "frame"}


class PreparedError(Exception):
    """A prepared file that is missing, damaged or of another volume; the text says which."""


class PreparedFolder:
    """The prepared volumes of one way of preparing them."""

    def __init__(self, s: DataSettings, root: Path = PREPARED) -> None:
        decisive = json.dumps([VERSION, s.model_dump(mode="json", include=DECISIVE)], sort_keys=True)
        self.folder = root / hashlib.sha256(decisive.encode()).hexdigest()[:24]
        used_caches.add(self.folder)
        self.grid = tuple(s.voxel_size)
        self._sealed = self.folder / "checked.json"

    def path_of(self, digest: str) -> Path:
        """Return the path of a volume's prepared file."""
        return self.folder / f"{digest[:32]}{SUFFIX}"

    def __len__(self) -> int:
        return sum(1 for _ in self.folder.glob(f"*{SUFFIX}"))

    def num_bytes(self, num_channels: int) -> int:
        """Return the size of one prepared file, without the rest of its header if that is longer than a page."""
        return PAGE + NUMBER.itemsize * num_channels * math.prod(self.grid)

    def write(self, image: np.ndarray, facts: VolumeFacts) -> None:
        """Write one prepared volume atomically; raise OSError if that fails."""
        voxels = np.ascontiguousarray(image, NUMBER)
        header = {"version": VERSION, "shape": voxels.shape, "checksum": _checksum(voxels), "facts": asdict(facts)}
        text = json.dumps(header).encode()
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.path_of(facts.digest)) as temporary, temporary.open("wb") as file:
            # Padded to whole pages, so that the voxels start at one.
            file.write(text.ljust(-(-(len(text) + 1) // PAGE) * PAGE - 1) + b"\n")
            file.write(voxels.data.cast("B"))

    def read(self, digest: str, num_channels: int, is_checked: bool = False) -> tuple[np.ndarray, VolumeFacts]:
        """Map one prepared volume (float32, C, D, H, W); return it with what was measured in its source.

        Raises `PreparedError` unless it is complete and what it claims to be. With `is_checked` its voxels are compared
        with their checksum too, which reads all of them.
        """
        path = self.path_of(digest)
        shape = (num_channels, *self.grid)
        try:
            size = check_regular(path)
            with path.open("rb") as file:
                line = file.readline(LONGEST_HEADER)
            header = json.loads(line)
            if header["version"] != VERSION or tuple(header["shape"]) != shape or header["facts"]["digest"] != digest:
                raise PreparedError("it holds another volume")
            expected = len(line) + NUMBER.itemsize * math.prod(shape)
            if size != expected:
                raise PreparedError(f"it has {size:,} bytes instead of {expected:,}")
            # Copy on write: nobody can change the file through the array.
            image = np.memmap(path, NUMBER, "c", len(line), shape)
            facts = facts_from(header["facts"])
        except FileNotFoundError:
            raise PreparedError("it is missing") from None
        except OSError as error:
            raise PreparedError(f"it cannot be read ({reason(error)})") from None
        except (ValueError, TypeError, LookupError, RecursionError):
            raise PreparedError("its header is damaged") from None
        if is_checked and _checksum(image) != header.get("checksum"):
            raise PreparedError("its voxels are not the ones that were written")
        return image, facts

    def tidy(self) -> None:
        """Remove files that killed processes left half-written."""
        for path in self.folder.glob(f".*{SUFFIX}.*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()

    def intact(self, digests: Iterable[str], num_channels: int) -> set[str]:
        """Return which of these volumes are there and complete; each file is read once until it changes."""
        seals, result = self._seals(), set()
        for digest in digests:
            path = self.path_of(digest)
            if os.path.lexists(path):
                try:
                    self.read(digest, num_channels, is_checked=seals.get(path.name) != signature(path))
                    result.add(digest)
                except PreparedError as error:
                    log.warning("data: %s: %s; it is prepared anew", path, error)
        self.seal(result)
        return result

    def seal(self, digests: Iterable[str]) -> None:
        """Note that the checksums of these files were right just now; warn if that cannot be written."""
        seals = self._seals()
        known = {name: value for name, value in seals.items() if (self.folder / name).exists()}
        paths = (self.path_of(digest) for digest in digests)
        known |= {path.name: signature(path) for path in paths if path.exists()}
        try:
            if known != seals:
                write_text(self._sealed, json.dumps(known))
        except OSError as error:
            text = "data: %s cannot be written (%s); the prepared volumes will be compared with their checksums again"
            log.warning(text, self._sealed, reason(error))

    def _seals(self) -> dict[str, str]:
        """Return the signatures of the files whose checksums were right, by name; a changed file has another one."""
        try:
            content = json.loads(self._sealed.read_text(encoding="utf-8"))
            return {str(name): str(value) for name, value in content.items()}
        except (OSError, ValueError, AttributeError):
            return {}


def _checksum(voxels: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(voxels).data.cast("B"))
