"""The pixel loss of stage 2: compares the predicted clean latent with the true one after decoding both.

The decoder is frozen, but gradients pass through it to the U-Net, so it needs as much activation memory as in training.
Chunks limit how many volumes are decoded at once, and checkpointing limits the cost of one volume; both are needed.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from models import StockAutoencoder
from runtime.precision import Precision
from settings.ldm import PixelLossSettings

log = logging.getLogger(__name__)


class PixelLoss:
    """Mean squared error of decoded latents, computed in chunks, each with its own backward to the latent."""

    def __init__(self, s: PixelLossSettings, autoencoder: StockAutoencoder, precision: Precision) -> None:
        self.weight = s.weight
        self.chunk_size = s.chunk_size
        self.is_adaptive = s.adaptive_chunk
        self.autoencoder = autoencoder
        self.precision = precision

    def __call__(
        self, predicted: Tensor, clean: Tensor, sample_weights: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and the gradient of `factor` times the loss with respect to `predicted`.

        Both latents are as the decoder expects them. `sample_weights` (B) weights the volumes of the batch.
        The gradient is multiplied by the float16 loss scale, if any. With `adaptive_chunk`, running out of memory
        halves the chunk size for the rest of the run and logs a warning.
        """
        total = torch.zeros((), device=predicted.device)
        gradient = torch.empty_like(predicted)
        start = 0
        while start < len(predicted):
            part = slice(start, start + self.chunk_size)
            try:
                loss, gradient[part] = self._chunk(
                    predicted[part], clean[part], sample_weights[part], len(predicted), factor
                )
            except torch.OutOfMemoryError:
                if not self.is_adaptive or self.chunk_size == 1:
                    raise
                self.chunk_size //= 2
                log.warning(
                    "out of memory in the pixel loss: continuing with ldm.training.pixel_loss.chunk_size %d",
                    self.chunk_size,
                )
                torch.cuda.empty_cache()
                continue
            total = total + loss
            start = part.stop
        return total, gradient

    def _chunk(
        self, predicted: Tensor, clean: Tensor, sample_weights: Tensor, batch_size: int, factor: float
    ) -> tuple[Tensor, Tensor]:
        # Detached, so that the graph of this chunk ends here and is freed before the next chunk.
        latent = predicted.detach().requires_grad_()
        with self.precision.autocast():
            with torch.no_grad():
                target = self.autoencoder.decode(clean).float()
            error = self.autoencoder.decode(latent).float() - target
            loss = (error.square().flatten(1).mean(dim=1) * sample_weights).sum() / batch_size
        scaled = self.precision.scaler.scale(factor * loss)
        return loss.detach(), torch.autograd.grad(scaled, latent)[0]
