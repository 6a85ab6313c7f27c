"""The bottleneck that quantises the latent: a learned codebook (vq).

The latent of the encoder stays as it is until the decoder asks for it: `encode` returns the latent before quantisation,
on which stage 2 trains, and `decode` quantises. Quantising twice is the same as quantising once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from settings import AutoencoderSettings

COMMITMENT_WEIGHT = 0.25
"""Weight of the squared distance between a latent and its code."""
DECAY = 0.99
"""Decay of the averages of latents that the codebook follows."""
RESTART_BELOW = 0.03
"""A code used less than this share of the mean starts again at a latent of the batch; 0: never."""

# Distances between latents and codes at a time: 16 MiB in double precision.
_MOST_DISTANCES = 2**21
# Keeps the average of a code that is never used above zero, as in MONAI's EMAQuantizer.
_SMOOTHING = 1e-5
# A code starts again with this multiple of the use below which it is replaced, to have time to find its latents.
_GRACE = 2.0


class VectorQuantiser(nn.Module):
    """A codebook that follows moving averages of the latents nearest to each code, as MONAI's `EMAQuantizer` does.

    The averages move once per update of the weights, by `update`, from the sums over all of its micro-batches.
    """

    codebook: Tensor
    ema_sizes: Tensor
    ema_sums: Tensor

    def __init__(
        self, num_codes: int, channels: int, decay: float = DECAY, restart_below: float = RESTART_BELOW
    ) -> None:
        super().__init__()
        self.num_codes = num_codes
        self.decay = decay
        self.restart_below = restart_below
        codebook = torch.randn(num_codes, channels)
        self.register_buffer("codebook", codebook)
        self.register_buffer("ema_sizes", torch.zeros(num_codes))
        self.register_buffer("ema_sums", codebook.clone())

    @torch.no_grad()
    def codes(self, latent: Tensor) -> Tensor:
        """Return the number of the nearest code for each position, int64 (B, D, H, W)."""
        by_position = latent.detach().movedim(1, -1)
        vectors = by_position.reshape(-1, latent.shape[1])
        # In double precision, which neither autocast nor TF32 rounds: far from zero, a distance is a small difference
        # of large numbers. A product over few channels takes about as long as writing the distances does.
        codebook = self.codebook.double()
        lengths = codebook.square().sum(dim=1)
        rows = max(1, _MOST_DISTANCES // self.num_codes)
        # The squared distance without the length of the latent, which is the same for all codes.
        nearest = [
            torch.addmm(lengths, part.double(), codebook.t(), alpha=-2).argmin(dim=1) for part in vectors.split(rows)
        ]
        return torch.cat(nearest).view(by_position.shape[:-1])

    def embed(self, codes: Tensor) -> Tensor:
        """Return the values of codes as a latent (B, C, D, H, W)."""
        return self.codebook[codes].movedim(-1, 1)

    def forward(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quantised latent and its codes; gradients pass as if nothing had been quantised."""
        codes = self.codes(latent)
        quantised = self.embed(codes)
        # In this order the sum is the quantised latent to the bit.
        return quantised + (latent - latent.detach()), codes

    @torch.no_grad()
    def update(self, sizes: Tensor, sums: Tensor, candidates: Tensor, is_blocked: Tensor) -> None:
        """Move the averages by what one update saw, and restart codes that are hardly used at some of its latents.

        `sizes` (N) counts the latents nearest to each code and `sums` (N, C) adds them up; `candidates` (M, C) are
        latents to restart at. Nothing moves if `is_blocked`, a number on the device, is not 0.
        """
        ema_sizes = self.ema_sizes * self.decay + sizes * (1 - self.decay)
        ema_sums = self.ema_sums * self.decay + sums * (1 - self.decay)
        total = ema_sizes.sum()
        smoothed = (ema_sizes + _SMOOTHING) / (total + self.num_codes * _SMOOTHING) * total
        codebook = ema_sums / smoothed[:, None]

        least = self.restart_below * total / self.num_codes
        place = (ema_sizes < least).cumsum(0) - 1
        # A code that has no candidate left waits for the next update.
        restarts = (ema_sizes < least) & (place < len(candidates))
        latents = candidates[place.clamp(0, len(candidates) - 1)]
        ema_sizes = torch.where(restarts, _GRACE * least, ema_sizes)
        ema_sums = torch.where(restarts[:, None], _GRACE * least * latents, ema_sums)
        codebook = torch.where(restarts[:, None], latents, codebook)

        for kept, moved in ((self.ema_sizes, ema_sizes), (self.ema_sums, ema_sums), (self.codebook, codebook)):
            kept.copy_(torch.where(is_blocked > 0, kept, moved))


def build_quantiser(s: AutoencoderSettings) -> VectorQuantiser | None:
    """Build the quantiser that the settings ask for; None for a Gaussian latent (kl)."""
    return None if s.bottleneck == "kl" else VectorQuantiser(s.codebook_size, s.latent_channels)


class CodeStatistics:
    """Which codes the latents of one update have, added up over its micro-batches and over all processes.

    For a codebook that learns, also the sums of the latents of each code, and latents to restart codes at. Those are
    drawn by `draw`, which returns numbers in [0, 1) that depend on the sample alone, and have their places by sample,
    so that they do not depend on how an update is divided.
    """

    def __init__(
        self,
        quantiser: VectorQuantiser,
        samples_per_update: int,
        device: torch.device,
        draw: Callable[[Sequence[int], int], Tensor] | None = None,
    ) -> None:
        self.quantiser = quantiser
        self.samples = samples_per_update
        # In double precision: a million equal latents, as in air, would otherwise move their sum by a percent.
        self.sizes = torch.zeros(quantiser.num_codes, device=device, dtype=torch.float64)
        self._collected, self._draw = [self.sizes], draw
        if draw is not None:
            self.sums = torch.zeros_like(quantiser.codebook, dtype=torch.float64)
            per_sample = math.ceil(quantiser.num_codes / samples_per_update)
            self.candidates = self.sums.new_zeros(per_sample, samples_per_update, self.sums.shape[1])
            self._collected += [self.sums, self.candidates]

    @torch.no_grad()
    def add(self, latent: Tensor, codes: Tensor, positions: Sequence[int]) -> None:
        """Add a micro-batch: its latents, their codes, and the positions of its samples in the run."""
        flat = codes.flatten()
        self.sizes.index_add_(0, flat, torch.ones_like(flat, dtype=self.sizes.dtype))
        if self._draw is None:
            return
        batch, channels = latent.shape[:2]
        vectors = latent.detach().movedim(1, -1).reshape(batch, -1, channels).to(self.sums.dtype)
        self.sums.index_add_(0, flat, vectors.flatten(0, 1))
        chosen = (self._draw(positions, len(self.candidates)) * vectors.shape[1]).long()
        found = vectors.gather(1, chosen[..., None].expand(-1, -1, channels))
        for sample, position in zip(found, positions, strict=True):
            self.candidates[:, position % self.samples] = sample

    @torch.no_grad()
    def finish(self, add_up: Callable[[Tensor], Tensor], is_blocked: Tensor) -> dict[str, Tensor]:
        """Add up over all processes with `add_up`, let the codebook learn, return how codes were used, begin anew."""
        for values in self._collected:
            add_up(values)
        if self._draw is not None:
            sizes, sums, candidates = (values.to(self.quantiser.codebook) for values in self._collected)
            self.quantiser.update(sizes, sums, candidates.flatten(0, 1), is_blocked)
        metrics = {name: value.float() for name, value in code_use(self.sizes).items()}
        for values in self._collected:
            values.zero_()
        return metrics


def code_use(counts: Tensor) -> dict[str, Tensor]:
    """Return the share of codes that occur at all, and the perplexity: how many equally frequent codes say as much."""
    shares = counts / counts.sum()
    return {"codebook_use": (counts > 0).to(shares.dtype).mean(), "perplexity": torch.special.entr(shares).sum().exp()}
