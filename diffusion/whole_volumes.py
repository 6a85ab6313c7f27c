"""Whole volumes through the autoencoder, one at a time, in slabs where the memory asks for them.

Slabs are exact: a volume that is decoded in slabs has no seams and equals the one that is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from diffusion.frozen_autoencoder import autoencoder_path, freeze, load_autoencoder
from models import StockAutoencoder, build_autoencoder
from runtime.placement import move
from runtime.precision import Precision
from settings import AutoencoderSettings, Settings

log = logging.getLogger(__name__)

# Full-resolution tensors alive at once in a block without slabs: input, normalised input, two results, one of fp32.
_TENSORS_WITHOUT_SLABS = 5
_SLAB_ROWS = 16
_SMALLEST_SLAB_ROWS = 4


class WholeVolumes:
    """Encodes and decodes single volumes without gradients, always one by one: no result depends on a batch size.

    The autoencoder may be one that trains: between calls it has the slabs that its settings give it.
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
    def encode(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and sigma (C, D, H, W), in float32, of one volume (C, D, H, W)."""
        self._choose_slabs(image.shape[1:])
        mean, sigma = self._run(self.autoencoder.encode, image)
        return mean[0].float(), sigma[0].float()

    @torch.no_grad()
    def decode(self, latent: Tensor) -> Tensor:
        """Return the volume (C, D, H, W), in float32, of one unscaled latent (C, D, H, W)."""
        self._choose_slabs([axis * self.settings.downsampling for axis in latent.shape[1:]])
        return self._run(self.autoencoder.decode, latent)[0].float()

    def _run(self, function: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        while True:
            self.autoencoder.set_slab_rows(self.slab_rows)
            try:
                with self.precision.autocast():
                    return function(tensor[None].to(self.precision.device, non_blocking=True))
            except torch.OutOfMemoryError:
                rows = min(self.slab_rows or 4 * _SLAB_ROWS, tensor.shape[1] * self.settings.downsampling) // 2
                if not self.has_slabs or rows < _SMALLEST_SLAB_ROWS:
                    raise
                log.warning("out of memory with a whole volume: going on in slabs of %d rows", rows)
            finally:
                self.autoencoder.set_slab_rows(self.settings.training.slab_rows)
            torch.cuda.empty_cache()
            self.slab_rows = rows - rows % 2

    def _choose_slabs(self, grid: Sequence[int]) -> None:
        """Turn slabs on when a block at full resolution would not fit the budget, or the memory that is free."""
        if self.slab_rows or not self.has_slabs:
            return
        if block_bytes(self.settings, self.precision, grid) > self._available_bytes():
            self.slab_rows = _SLAB_ROWS

    def _available_bytes(self) -> int:
        if self.budget_bytes is not None:
            return self.budget_bytes
        if self.precision.device.type == "cuda":
            return torch.cuda.mem_get_info(self.precision.device)[0]
        return psutil.virtual_memory().available


def block_bytes(s: AutoencoderSettings, precision: Precision, grid: Sequence[int]) -> int:
    """Return about what a block at full resolution holds of one volume when it runs without slabs and gradients."""
    width = 4 if precision.dtype is None else 2
    return _TENSORS_WITHOUT_SLABS * max(s.num_channels[:2]) * width * torch.Size(grid).numel()


def frozen_whole_volumes(settings: Settings, device: torch.device, load_weights: bool = True) -> WholeVolumes:
    """Return the autoencoder of a config, frozen and on the device; with its trained weights or untrained."""
    if load_weights:
        autoencoder = load_autoencoder(settings, autoencoder_path(settings))
    else:
        autoencoder = freeze(build_autoencoder(settings.autoencoder))
    return WholeVolumes(move(autoencoder, device), settings.autoencoder, Precision(settings.device, device))
