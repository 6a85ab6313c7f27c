"""Caches loaded volumes in host memory, once per node, shared by all workers and ranks."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil
import torch
from torch import Tensor

from settings import ConfigError, Problem

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "training-volumes-"

# One row per volume: whether it is filled (1.0), and the three spacings of its grid.
ROW = 4
HEADER_BYTES = 4096


class VolumeCache:
    """Slots for `number` volumes of one shape, each filled when its volume is first loaded.

    The memory is shared with workers forked later and, under torchrun, with the other ranks of this node: the process
    that loads a volume first fills its slot. If two load the same volume at once, both write the same bytes. `identity`
    describes the content and must be equal on all ranks that share it; None keeps the cache in this process.
    """

    def __init__(self, number: int, shape: tuple[int, ...], identity: Sequence[str] | None) -> None:
        self.number = number
        volume_bytes = 4 * math.prod(shape)
        rows_bytes = -(-8 * ROW * number // HEADER_BYTES) * HEADER_BYTES
        size = HEADER_BYTES + rows_bytes + number * volume_bytes
        _require_memory(number, size)
        self._file, memory = None, None
        if identity is not None and _ranks_here() > 1:
            self._file, memory = _node_memory(size, identity)
        memory = memory or mmap.mmap(-1, size)
        self._rows = np.frombuffer(memory, np.float64, ROW * number, HEADER_BYTES).reshape(number, ROW)
        volumes = np.frombuffer(memory, np.float32, number * math.prod(shape), HEADER_BYTES + rows_bytes)
        self._volumes = torch.from_numpy(volumes.reshape(number, *shape))
        # A memory barrier: no CPU may see the flag before the volume it announces.
        self._fence = threading.Lock()

    def get(self, index: int) -> tuple[Tensor, np.ndarray] | None:
        """Return a volume and its spacing, or None if it is not cached; the tensor is a view: do not write to it."""
        if index >= self.number:
            return None
        with self._fence:
            row = self._rows[index].copy()
        return (self._volumes[index], row[1:]) if row[0] == 1.0 else None

    def put(self, index: int, image: Tensor, spacing_mm: np.ndarray) -> None:
        """Fill the slot of a volume, if it has one."""
        if index >= self.number:
            return
        self._volumes[index].copy_(image)
        self._rows[index, 1:] = spacing_mm
        with self._fence:
            self._rows[index, 0] = 1.0


def _require_memory(number: int, size: int) -> None:
    available = psutil.virtual_memory().available
    if size > available:
        fits = number * available // size
        raise ConfigError(
            [
                Problem(
                    "data.cache_rate",
                    f"caching {number} volumes needs {size / 2**30:.1f} GiB of memory, "
                    f"{available / 2**30:.1f} GiB is free",
                    f"at most {fits} volumes fit",
                    "lower it, or set 0",
                )
            ]
        )


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if SHARED_MEMORY.is_dir() else 1


def _node_memory(size: int, identity: Sequence[str]) -> tuple[BinaryIO | None, mmap.mmap | None]:
    """Return the file and the memory that all ranks of this node share; keep both open."""
    session = [str(os.getuid()), str(os.getppid())]
    session += [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")]
    content = "\n".join([*session, str(size), *identity])
    path = SHARED_MEMORY / f"{PREFIX}{hashlib.sha256(content.encode('utf-8', 'surrogateescape')).hexdigest()[:24]}"
    _remove_leftovers(path)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
    # Two independent locks: flock marks the file as in use while this process lives, lockf guards the count of ranks.
    fcntl.flock(file, fcntl.LOCK_SH)
    fcntl.lockf(file, fcntl.LOCK_EX)
    try:
        # Reserve the space now: a full /dev/shm is an error here, but a later write to it would kill the process.
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        file.close()
        log.warning(
            "data: %s has no room for %.1f GiB (%s); each rank keeps its own cache", SHARED_MEMORY, size / 2**30, error
        )
        return None, None
    memory = mmap.mmap(file.fileno(), size)
    memory[0] += 1
    # The last rank to arrive unlinks the file, so the system frees the memory when the last process ends.
    if memory[0] >= _ranks_here():
        path.unlink(missing_ok=True)
    fcntl.lockf(file, fcntl.LOCK_UN)
    return file, memory


def _remove_leftovers(own: Path) -> None:
    """Remove the files of ranks that died before all had arrived; a live process holds a lock on its file."""
    for path in SHARED_MEMORY.glob(f"{PREFIX}*"):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path != own:
                    path.unlink(missing_ok=True)
        except OSError:
            continue
