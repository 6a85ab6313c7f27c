"""Brings latents to mean 0 and standard deviation 1, in which the U-Net works, and back to what the decoder expects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffusion.latent_files import Moments
from settings import CheckpointError
from settings.ldm import Normalise


@dataclass(frozen=True)
class Normalisation:
    """(latent - mean) * scale, with tensors that broadcast over (C, D, H, W).

    One scale for all elements is a number, and then there is no mean.
    """

    scale: float | Tensor
    mean: Tensor | None = None

    def apply(self, latents: Tensor) -> Tensor:
        """Return latents as the U-Net sees them."""
        return (latents if self.mean is None else latents - self.mean) * self.scale

    def undo(self, latents: Tensor) -> Tensor:
        """Return latents as the decoder expects them."""
        unscaled = latents / self.scale
        return unscaled if self.mean is None else unscaled + self.mean

    def to(self, device: torch.device) -> Normalisation:
        """Return the same normalisation with its tensors on a device."""
        scale = self.scale.to(device) if isinstance(self.scale, Tensor) else self.scale
        return Normalisation(scale, None if self.mean is None else self.mean.to(device))

    @property
    def content(self) -> dict[str, float | Tensor]:
        """Return what is stored with the weights."""
        if self.mean is None:
            return {"latent_scale": self.scale}
        assert isinstance(self.scale, Tensor), "a mean comes with a scale for each channel"
        return {"latent_scale": self.scale.cpu(), "latent_mean": self.mean.cpu()}

    @classmethod
    def stored(cls, content: dict[str, Any], kind: Normalise, shape: tuple[int, ...]) -> Normalisation:
        """Return the normalisation that `content` describes; raise ValueError if it is not one of this kind."""
        scale, mean = content.get("latent_scale"), content.get("latent_mean")
        if kind == "scale":
            number = scale if isinstance(scale, int | float) and not isinstance(scale, bool) else math.nan
            if mean is not None or not 0 < number < math.inf:
                raise ValueError("latent_scale is not a finite number above 0")
            return cls(float(number))
        expected = {"latent_scale": (scale, _by_channel(shape)), "latent_mean": (mean, _mean_shape(kind, shape))}
        for name, (values, wanted) in expected.items():
            if not isinstance(values, Tensor) or values.shape != wanted or not values.isfinite().all():
                raise ValueError(f"{name} is not a tensor of {tuple(wanted)} finite values")
        assert isinstance(scale, Tensor), "its shape was checked"
        if not (scale > 0).all():
            raise ValueError("latent_scale is not above 0")
        return cls(scale, mean)

    @classmethod
    def neutral(cls, kind: Normalise, shape: tuple[int, ...]) -> Normalisation:
        """Return a normalisation that changes nothing, with tensors as large as those of latents of `shape`."""
        if kind == "scale":
            return cls(1.0)
        return cls(torch.ones(_by_channel(shape)), torch.zeros(_mean_shape(kind, shape)))


class Statistics:
    """Sums over latents of one shape, from which their normalisation by channel or by position follows."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.squares = torch.zeros(_by_channel(shape), dtype=torch.float64)

    def add(self, moments: Moments) -> None:
        """Add one latent, as training draws it: with its mean and its sigma."""
        mean, sigma = (part.double() for part in moments)
        self.mean += mean
        self.squares += (mean.square() + sigma.square()).sum(dim=(1, 2, 3), keepdim=True)

    def normalisation(self, kind: Normalise, count: int) -> Normalisation:
        """Return what brings the `count` added latents to mean 0 and, in each channel, to standard deviation 1.

        The mean is that of each channel, or of each position in it.
        """
        mean = self.mean / count
        if kind == "channel":
            mean = mean.mean(dim=(1, 2, 3), keepdim=True)
        per_channel = self.mean[0].numel()
        explained = mean.square().expand_as(self.mean).sum(dim=(1, 2, 3), keepdim=True) / per_channel
        variance = self.squares / (count * per_channel) - explained
        for number in variance.flatten().tolist():
            check_variance(number)
        return Normalisation(variance.rsqrt().float(), mean.float())


def check_variance(variance: float) -> None:
    """Raise `CheckpointError` unless latents of this variance can be scaled to one."""
    if not (math.isfinite(variance) and variance > 0):
        raise CheckpointError(
            f"the variance of the autoencoder's latents is {variance:g}; it must be finite and above zero; "
            "train stage 1 again"
        )


def _by_channel(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], 1, 1, 1)


def _mean_shape(kind: Normalise, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape) if kind == "position" else _by_channel(shape)
