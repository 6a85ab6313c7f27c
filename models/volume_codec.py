"""Encodes and decodes whole volumes, one at a time, in slabs if memory is short, and through host memory if it must.

Both are exact: they leave no seams and give the same volume as decoding it whole.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from models import StockAutoencoder, build_autoencoder
from models.frozen_autoencoder import autoencoder_path, freeze, load_autoencoder
from models.lean.rows import GIB, DeviceSpace, HostMemoryError, HostSpace, host_bytes
from runtime.cli import ProgressBar
from runtime.host_memory import available_host_bytes
from runtime.observer import memory_observer
from runtime.precision import Precision, move
from runtime.processes import Process
from settings import AutoencoderSettings, Settings

log = logging.getLogger(__name__)

# Full-resolution tensors alive at once in a block without slabs: input, normalised input, two outputs, one in fp32.
_TENSORS_WITHOUT_SLABS = 5
_SLAB_ROWS = 16
_SMALLEST_SLAB_ROWS = 4

_HOST_ABOVE = GIB
"""Where memory is short even in slabs, volumes of more bytes than this lie in host memory."""
_SLABS_AT_ONCE = 3
"""What the tensors and workspaces of a slab take besides whole volumes: so many slabs in full precision."""
_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of mallopt: larger blocks are not taken from the heap. 32 MiB is the most that glibc chooses."""
_TRIM_THRESHOLD = -1
"""M_TRIM_THRESHOLD: more free memory than this at the end of the heap goes back. glibc chooses twice the other one."""
_SLAB_BYTES = 2 * GIB
"""The most bytes of a slab there, in full precision; a quarter of the free memory, if that is less."""


class VolumeCodec:
    """Encodes and decodes volumes without gradients, one at a time, so that no result depends on a batch size.

    The autoencoder may be in training: after each call its slab size is reset to what its settings say.
    """

    def __init__(
        self,
        autoencoder: StockAutoencoder,
        s: AutoencoderSettings,
        precision: Precision,
        budget_bytes: int | None = None,
    ) -> None:
        self.autoencoder = autoencoder
        self.settings = s
        self.precision = precision
        self.budget_bytes = budget_bytes
        self.slab_rows = self._rows = s.training.slab_rows
        self.num_levels = 1
        self.host: HostSpace | None = None
        self._how, self._said = "", {""}
        self._host_bytes: int | None = None  # measured once, because torch keeps pinned memory for the next volume
        self.has_slabs = s.implementation == "lean"

    @torch.no_grad()
    def encode(self, image: Tensor) -> Tensor:
        """Return the latent's mean, float32 (C, D, H, W), of one volume (C, D, H, W)."""
        self._choose_slabs(image.shape[1:])
        mean, _ = self._run(self.autoencoder.encode, image, "encoding", self.autoencoder.encoder)
        return mean[0].float()

    @torch.no_grad()
    def decode(self, latent: Tensor) -> Tensor:
        """Return the volume, float32 (C, D, H, W), of one latent that is not normalised, (C, D, H, W)."""
        factors = self.settings.downsampling
        grid = [axis * factor for axis, factor in zip(latent.shape[1:], factors, strict=True)]
        self._choose_slabs(grid, shares_memory=True)
        return self._run(self.autoencoder.decode, latent, "decoding", self.autoencoder.decoder)[0].float()

    def _run(self, function: Callable[[Tensor], Any], tensor: Tensor, name: str, coder: Any) -> Any:
        while True:
            self.autoencoder.set_slab_rows(self._rows, self.num_levels, self.host)
            try:
                # One block of a volume that is too large for the device can take many seconds.
                is_predicted = type(tensor) is not Tensor
                if not is_predicted and self._how not in self._said:
                    self._said.add(self._how)  # once, for many volumes of a size follow one another
                    log.info(self._how)
                is_hidden = self.host is None or is_predicted or os.environ.get("RANK", "0") != "0"
                options = {"leave": False, "disable": is_hidden, "delay": int(isinstance(self.host, DeviceSpace))}
                bar = ProgressBar(desc=name, total=len(coder.blocks) - 3, unit="block", **options)
                in_slabs_on_cpu = self._rows and self.precision.device.type == "cpu" and not is_predicted
                with bar, self.precision.autocast(), freed_at_once() if in_slabs_on_cpu else nullcontext():
                    if self.host is not None:
                        self.host.on_block = bar.update
                    return function(tensor[None].to(self.precision.device, non_blocking=True))
            except torch.OutOfMemoryError:
                rows = min(self._rows or 4 * _SLAB_ROWS, tensor.shape[1] * self.settings.downsampling[0]) // 2
                if not self.has_slabs or rows < _SMALLEST_SLAB_ROWS:
                    raise
                log.warning("out of memory with a whole volume: continuing in slabs of %d rows", rows)
            finally:
                self.autoencoder.set_slab_rows(self.settings.training.slab_rows)
            torch.cuda.empty_cache()
            self.slab_rows = self._rows = rows - rows % 2
            if isinstance(self.host, DeviceSpace):
                self.host = None

    def _choose_slabs(self, grid: Sequence[int], shares_memory: bool = False) -> None:
        """Turn slabs on if a block at full resolution would not fit into the budget or the free memory.

        Blocks of lower levels run in slabs if they would not fit either. If a level's volume and the next one's would
        not fit, they are to lie in host memory. With `shares_memory`, the smaller of the two can lie in the other's.
        """
        self.host, self.num_levels, self._how = None, 1, ""
        if not self.has_slabs:
            return
        free, levels = self.available_bytes(), range(len(self.settings.num_channels))
        too_large = [level for level in levels if block_bytes(self.settings, self.precision, grid, level) > free]
        if not self.slab_rows and too_large:
            self.slab_rows = _SLAB_ROWS
        self._rows = self.slab_rows
        if not self.slab_rows:
            return
        self.num_levels = max(too_large, default=0) + 1
        grids = [level_grid(self.settings, grid, level) for level in levels]
        width = 4 if self.precision.dtype is None else 2
        channels = self.settings.num_channels
        volumes = [channels[level] * width * torch.Size(grids[level]).numel() for level in levels]
        pairs = list(zip(volumes, [*volumes[1:], 0], strict=True))
        most, size = max(map(sum, pairs)), "x".join(map(str, grid))
        row = max(4 * max(channels[level : level + 2]) * math.prod(grids[level][1:]) for level in levels)
        if max(volumes) <= _HOST_ABOVE or most <= free:
            if self.settings.training.offload_levels:
                return  # the highest levels are in host memory, as in training
            if shares_memory and free - most < _SLABS_AT_ONCE * row * (_SMALLEST_SLAB_ROWS + 2):
                most = max(volumes)
            self._rows = _fitting_rows(self.slab_rows, (free - most) // (_SLABS_AT_ONCE * row) - 2)
            self.host = DeviceSpace(max(0, free - _SLABS_AT_ONCE * row * (self._rows + 2)))
            self._how = f"{size}: in slabs of {self._rows} rows"
            return
        if self._host_bytes is None:
            self._host_bytes = memory_observer().free_host_bytes()
        host, is_pinned = self._host_bytes, self.precision.device.type == "cuda"
        needed = max(sum(host_bytes(each, is_pinned) for each in pair if each > _HOST_ABOVE) for pair in pairs)
        if needed > host and most <= self._device_bytes():
            log.warning("%s: %.1f GiB of host memory are too few, so it is computed on the device", size, host / GIB)
            return
        if needed > host:
            raise HostMemoryError(
                f"a volume of {size} takes {needed / GIB:.1f} GiB of host memory besides the {free / GIB:.1f} GiB that "
                f"are free on the device, and {host / GIB:.1f} GiB are free to this process (limits of cgroups count); "
                "make room, or use smaller volumes"
            )
        slab = _SLAB_BYTES if self.budget_bytes is not None else min(_SLAB_BYTES, free // 4)
        self._rows, self.num_levels = _fitting_rows(self.slab_rows, slab // row), len(levels)
        self.host = HostSpace(_HOST_ABOVE, host)
        self._how = f"{size}: in slabs of {self._rows} rows, through at least {needed / GIB:.1f} GiB of host memory"

    def available_bytes(self) -> int:
        """Return the budget, or without one the free memory of the device."""
        return self._device_bytes() if self.budget_bytes is None else self.budget_bytes

    def _device_bytes(self) -> int:
        """Return the free memory of the device."""
        if self.precision.device.type == "cuda":
            return torch.cuda.mem_get_info(self.precision.device)[0]
        return available_host_bytes()


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Have memory of slabs go back to the system when it is freed.

    glibc keeps blocks of up to 32 MiB for later, several slabs in all. Other C libraries are left as they are.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is None:
        yield
        return
    set_option(_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, 32 << 20)
        set_option(_TRIM_THRESHOLD, 64 << 20)  # from the first call on glibc leaves it as it is, perhaps at 128 KiB


def _fitting_rows(rows: int, most: int) -> int:
    """Return an even number of rows, at most `most` if that is not too few."""
    return max(_SMALLEST_SLAB_ROWS, min(rows, most // 2 * 2))


def level_grid(s: AutoencoderSettings, grid: Sequence[int], level: int) -> Sequence[int]:
    """Return the grid of a level, 0 being the highest resolution."""
    for strides in s.level_strides[:level]:
        grid = [size // stride for size, stride in zip(grid, strides, strict=True)]
    return grid


def block_bytes(s: AutoencoderSettings, precision: Precision, grid: Sequence[int], level: int = 0) -> int:
    """Estimate the bytes that a block of a level needs for one volume without slabs and gradients."""
    width, channels = 4 if precision.dtype is None else 2, max(s.num_channels[level : level + 2])
    return _TENSORS_WITHOUT_SLABS * channels * width * torch.Size(level_grid(s, grid, level)).numel()


def frozen_codec(
    settings: Settings, process: Process, load_weights: bool = True, budget_bytes: int | None = None
) -> VolumeCodec:
    """Return a codec with the frozen autoencoder of a config, trained unless `load_weights` is False."""
    if load_weights:
        autoencoder = load_autoencoder(settings, autoencoder_path(settings))
    else:
        autoencoder = freeze(build_autoencoder(settings.autoencoder))
    move(autoencoder, process.device, settings.device.memory_format)
    precision = Precision(settings.device, process.device, process.has_bfloat16)
    return VolumeCodec(autoencoder, settings.autoencoder, precision, budget_bytes)
