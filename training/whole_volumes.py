"""Whole volumes through the frozen autoencoder, one at a time, in slabs where the memory asks for them.

Slabs are exact: a volume that is decoded in slabs has no seams and equals the one that is not.
"""

from __future__ import annotations

import logging

import psutil
import torch
from torch import Tensor

from models import StockAutoencoder
from settings import AutoencoderSettings
from training.precision import Precision

log = logging.getLogger(__name__)

# Full-resolution tensors alive at once in a block without slabs: input, normalised input, two results, one of fp32.
_TENSORS_WITHOUT_SLABS = 5
_SLAB_ROWS = 16
_SMALLEST_SLAB_ROWS = 4


class WholeVolumes:
    """Encodes and decodes single volumes without gradients, always one by one: no result depends on a batch size."""

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

    def _run(self, function, tensor: Tensor):
        while True:
            try:
                with self.precision.autocast():
                    return function(tensor[None].to(self.precision.device, non_blocking=True))
            except torch.OutOfMemoryError:
                rows = min(self.slab_rows or 4 * _SLAB_ROWS, tensor.shape[1] * self.settings.downsampling) // 2
                if not self.has_slabs or rows < _SMALLEST_SLAB_ROWS:
                    raise
                log.warning("out of memory with a whole volume: going on in slabs of %d rows", rows)
            torch.cuda.empty_cache()
            self._set_slabs(rows)

    def _choose_slabs(self, grid) -> None:
        """Turn slabs on when a block at full resolution would not fit the budget, or the memory that is free."""
        if self.slab_rows or not self.has_slabs:
            return
        channels = max(self.settings.num_channels[:2])
        width = 4 if self.precision.dtype is None else 2
        needed = _TENSORS_WITHOUT_SLABS * channels * width * int(torch.Size(grid).numel())
        if needed > self._available_bytes():
            self._set_slabs(_SLAB_ROWS)

    def _available_bytes(self) -> int:
        if self.budget_bytes is not None:
            return self.budget_bytes
        if self.precision.device.type == "cuda":
            return torch.cuda.mem_get_info(self.precision.device)[0]
        return psutil.virtual_memory().available

    def _set_slabs(self, rows: int) -> None:
        self.slab_rows = rows - rows % 2
        self.autoencoder.set_slab_rows(self.slab_rows)
