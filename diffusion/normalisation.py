"""The space that the U-Net works in: latents with mean 0 and standard deviation 1 in each channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.processes import Process
from settings import CheckpointError

# Latents that vary less than this beside their mean square are constant: the rest is rounding.
_SMALLEST_SHARE = 1e-12

_FIXED_POINT = 2**24


@dataclass(frozen=True)
class Normalisation:
    """Latents as (latent - mean) * scale, both tensors (C, 1, 1, 1)."""

    scale: Tensor
    mean: Tensor

    @classmethod
    def uniform(cls, num_channels: int, scale: float = 1.0) -> Normalisation:
        """Return one that multiplies all channels by the same number, as MAISI and MONAI do."""
        shape = (num_channels, 1, 1, 1)
        return cls(torch.full(shape, scale), torch.zeros(shape))

    def apply(self, latents: Tensor) -> Tensor:
        """Return latents as the U-Net sees them."""
        return (latents - self.mean) * self.scale

    def undo(self, latents: Tensor) -> Tensor:
        """Return latents as the decoder expects them."""
        return latents / self.scale + self.mean

    def to(self, device: torch.device) -> Normalisation:
        """Return the same normalisation with its tensors on a device."""
        return Normalisation(self.scale.to(device), self.mean.to(device))

    def content(self, what: str = "latent") -> dict[str, Tensor]:
        """Return what is stored with the weights."""
        return {f"{what}_scale": self.scale.cpu(), f"{what}_mean": self.mean.cpu()}

    @classmethod
    def stored(cls, content: dict[str, Any], num_channels: int, what: str = "latent") -> Normalisation:
        """Return the normalisation of so many channels that `content` describes; raise ValueError if it has none."""
        shape = (num_channels, 1, 1, 1)
        names = (f"{what}_scale", f"{what}_mean")
        for name in names:
            found = content.get(name)
            if not isinstance(found, Tensor) or found.shape != shape or not found.isfinite().all():
                raise ValueError(f"{name} is not a tensor of {shape} finite values")
        scale, mean = (content[name] for name in names)
        if not (scale > 0).all():
            raise ValueError(f"{what}_scale is not above 0")
        return cls(scale, mean)


class Statistics:
    """Mean and mean square of each channel, for each of `count` latents of a training set."""

    def __init__(self, count: int, num_channels: int) -> None:
        self._rows = torch.zeros(count, 2, num_channels, dtype=torch.float64)

    def add(self, index: int, latent: Tensor) -> None:
        """Add one latent (C, D, H, W) by its index; ignore held-out ones."""
        if index < len(self._rows):
            values = latent.double().flatten(1)
            self._rows[index] = torch.stack([values.mean(dim=1), values.square().mean(dim=1)])

    def normalisation(self, process: Process, may_be_constant: bool = False) -> Normalisation:
        """Return the normalisation of the latents of all processes.

        A constant channel raises `CheckpointError`, or keeps its scale if that `may_be_constant`.
        """
        # One process fills each row and the others leave zeros, so the sum is the same for any number of processes.
        mean, mean_square = process.sum(self._rows).mean(dim=0)
        variance = mean_square - mean.square()
        varies = variance.isfinite() & (variance > _SMALLEST_SHARE * mean_square)
        if not varies.all() and not may_be_constant:
            channel = int(varies.int().argmin())
            raise CheckpointError(
                f"the variance of the autoencoder's latents is {variance[channel]:g} in channel {channel}, counted "
                "from 0; it must be finite and above zero; train stage 1 again"
            )
        scale = variance.where(varies, 1.0).rsqrt()
        return Normalisation(*(part.float().view(-1, 1, 1, 1) for part in (scale, mean)))


class MeanLatent:
    """The mean of the latents of a training set, the same to the bit in any order and for any number of processes."""

    def __init__(self, count: int, shape: Sequence[int]) -> None:
        self.count = count
        # Sums of whole numbers do not depend on their order.
        self._sum = torch.zeros(*shape, dtype=torch.int64)

    def add(self, index: int, latent: Tensor) -> None:
        """Add one latent (C, D, H, W) by its index; ignore held-out ones."""
        if index < self.count:
            self._sum += (latent.double() * _FIXED_POINT).round().long()

    def over_all(self, process: Process) -> Tensor:
        """Return the mean over the latents of all processes."""
        return (process.sum(self._sum).double() / (self.count * _FIXED_POINT)).float()
