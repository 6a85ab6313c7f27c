"""Encodes and decodes whole volumes, one at a time, in slabs if memory is short.

Slabs are exact: decoding in slabs leaves no seams and gives the same volume as decoding without them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from models import StockAutoencoder, build_autoencoder
from models.frozen_autoencoder import autoencoder_path, freeze, load_autoencoder
from runtime.placement import move
from runtime.precision import Precision
from runtime.processes import Process
from settings import AutoencoderSettings, Settings

log = logging.getLogger(__name__)

# Full-resolution tensors alive at once in a block without slabs: input, normalised input, two outputs, one in fp32.
_TENSORS_WITHOUT_SLABS = 5
_SLAB_ROWS = 16
_SMALLEST_SLAB_ROWS = 4


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
        self.slab_rows = s.training.slab_rows
        self.has_slabs = s.implementation == "lean"

    @torch.no_grad()
    def encode(self, image: Tensor) -> Tensor:
        """Return the latent's mean, float32 (C, D, H, W), of one volume (C, D, H, W)."""
        self._choose_slabs(image.shape[1:])
        mean, _ = self._run(self.autoencoder.encode, image)
        return mean[0].float()

    @torch.no_grad()
    def decode(self, latent: Tensor) -> Tensor:
        """Return the volume, float32 (C, D, H, W), of one latent that is not normalised, (C, D, H, W)."""
        factors = self.settings.downsampling
        self._choose_slabs([axis * factor for axis, factor in zip(latent.shape[1:], factors, strict=True)])
        return self._run(self.autoencoder.decode, latent)[0].float()

    def _run(self, function: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        while True:
            self.autoencoder.set_slab_rows(self.slab_rows)
            try:
                with self.precision.autocast():
                    return function(tensor[None].to(self.precision.device, non_blocking=True))
            except torch.OutOfMemoryError:
                rows = min(self.slab_rows or 4 * _SLAB_ROWS, tensor.shape[1] * self.settings.downsampling[0]) // 2
                if not self.has_slabs or rows < _SMALLEST_SLAB_ROWS:
                    raise
                log.warning("out of memory with a whole volume: continuing in slabs of %d rows", rows)
            finally:
                self.autoencoder.set_slab_rows(self.settings.training.slab_rows)
            torch.cuda.empty_cache()
            self.slab_rows = rows - rows % 2

    def _choose_slabs(self, grid: Sequence[int]) -> None:
        """Turn slabs on if a block at full resolution would not fit into the budget or the free memory."""
        if self.slab_rows or not self.has_slabs:
            return
        if block_bytes(self.settings, self.precision, grid) > self.available_bytes():
            self.slab_rows = _SLAB_ROWS

    def available_bytes(self) -> int:
        """Return the budget, or without one the free memory of the device."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        if self.precision.device.type == "cuda":
            return torch.cuda.mem_get_info(self.precision.device)[0]
        return psutil.virtual_memory().available


def block_bytes(s: AutoencoderSettings, precision: Precision, grid: Sequence[int]) -> int:
    """Estimate the bytes that a full-resolution block needs for one volume without slabs and gradients."""
    width = 4 if precision.dtype is None else 2
    return _TENSORS_WITHOUT_SLABS * max(s.num_channels[:2]) * width * torch.Size(grid).numel()


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
