"""Keeps loaded volumes in host memory, shared with the workers of this process."""

from __future__ import annotations

import math
import mmap
import threading

import numpy as np
import psutil
import torch
from torch import Tensor

from settings import ConfigError, Problem

# One row per volume: whether it is filled (1.0), and the three spacings of its grid.
ROW = 4


class VolumeMemory:
    """Slots for `number` volumes of one shape, each filled when its volume is first loaded.

    Workers forked later share the memory: the one that loads a volume first fills its slot. If two load the same volume
    at once, both write the same bytes.
    """

    def __init__(self, number: int, shape: tuple[int, ...]) -> None:
        volume_bytes = 4 * math.prod(shape)
        _require_memory(number, number * volume_bytes)
        self._rows = np.frombuffer(mmap.mmap(-1, 8 * ROW * number), np.float64).reshape(number, ROW)
        volumes = np.frombuffer(mmap.mmap(-1, number * volume_bytes), np.float32)
        self._volumes = torch.from_numpy(volumes.reshape(number, *shape))
        # A memory barrier: no CPU may see the flag before the volume it announces.
        self._fence = threading.Lock()

    def get(self, index: int) -> tuple[Tensor, np.ndarray] | None:
        """Return a volume and its spacing, or None if it is not there yet; the tensor is a view: do not write to it."""
        with self._fence:
            row = self._rows[index].copy()
        return (self._volumes[index], row[1:]) if row[0] == 1.0 else None

    def put(self, index: int, image: Tensor, spacing_mm: np.ndarray) -> None:
        """Fill the slot of a volume."""
        self._volumes[index].copy_(image)
        self._rows[index, 1:] = spacing_mm
        with self._fence:
            self._rows[index, 0] = 1.0


def _require_memory(number: int, size: int) -> None:
    available = psutil.virtual_memory().available
    if size > available:
        found = f"memory: {number} volumes need {size / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB is free"
        fits = f"at most {number * available // size} volumes fit"
        raise ConfigError([Problem("data.prepared", found, fits, "set disk, which needs no memory, or none")])
