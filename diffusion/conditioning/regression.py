"""A linear regression of latents on label maps, which gives the network a first guess of the latent.

Where a structure lies says something about the whole volume, such as how it is turned and framed. A network of
convolutions needs long to learn that from a few hundred volumes; a ridge regression finds it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST_AXIS = 8
"""Label maps are averaged to at most this many voxels along each axis: the regression is about large patterns."""

NUM_PATTERNS = 32
"""The regression predicts at most this many patterns of the latent."""

PENALTIES = (0.3, 1.0, 3.0, 10.0, 30.0)
"""Tried in units of the mean squared size of a map; the one that predicts best what was left out is taken."""

NAMES = ("regression_inputs", "regression_offset", "regression_patterns")


@dataclass(frozen=True)
class LabelRegression:
    """The regression: inputs (K, F) and an offset (K) give the weights of the patterns (K, C, D, H, W)."""

    inputs: Tensor
    offset: Tensor
    patterns: Tensor

    def weights(self, shares: Tensor) -> Tensor:
        """Return the weights (K) of the patterns for a label map (classes, D, H, W)."""
        return self.inputs @ features(shares) + self.offset

    def guess(self, weights: Tensor) -> Tensor:
        """Return the latent (C, D, H, W) with these weights of the patterns."""
        return torch.einsum("k,kcdhw->cdhw", weights, self.patterns)

    @property
    def content(self) -> dict[str, Tensor]:
        """Return what is stored with the weights."""
        return dict(zip(NAMES, (self.inputs, self.offset, self.patterns), strict=True))

    @classmethod
    def stored(cls, content: dict[str, Any], num_classes: int, latent_shape: tuple[int, ...]) -> LabelRegression:
        """Return the regression that `content` describes; raise ValueError if it is not of these shapes."""
        found = [part for name in NAMES if isinstance(part := content.get(name), Tensor) and part.isfinite().all()]
        if len(found) < len(NAMES):
            raise ValueError("the regression on label maps is missing or not finite")
        inputs, offset, patterns = found
        number = len(features(torch.zeros(num_classes, *latent_shape[1:])))
        shapes = ((len(offset), number), (len(offset),), (len(offset), *latent_shape))
        if any(tuple(part.shape) != shape for part, shape in zip(found, shapes, strict=True)):
            raise ValueError("the regression on label maps is of another shape")
        return cls(inputs, offset, patterns)


def features(shares: Tensor) -> Tensor:
    """Return what the regression knows of a label map (classes, D, H, W): a vector without the background."""
    d, h, w = (min(n, LARGEST_AXIS) for n in shares.shape[1:])
    return F.adaptive_avg_pool3d(shares[1:], (d, h, w)).flatten()


def regress(
    read: Callable[[int], Tensor], numbers: Sequence[int], latents: Tensor
) -> tuple[LabelRegression, dict[int, Tensor]]:
    """Fit the regression to the latents of the volumes with these numbers, whose label maps `read` returns.

    Also return, for each of these volumes, the weights that the regression on the others gives it.
    """
    regression, weights = fit(torch.stack([features(read(number)) for number in numbers]), latents)
    return regression, dict(zip(numbers, weights, strict=True))


def fit(maps: Tensor, latents: Tensor) -> tuple[LabelRegression, Tensor]:
    """Regress latents (N, C, D, H, W) on the features (N, F) of their label maps.

    The patterns are the first principal components of the latents; fine detail, which no map tells, is left out. Also
    return the weights (N, K) that each map gets from the other maps: what a network learns from must be as good as what
    it will be given, and a regression is too good on what it was fitted to.
    """
    number = len(maps)
    inputs, mean = maps.double(), maps.double().mean(dim=0)
    inputs = inputs - mean
    centred = (latents - latents.mean(dim=0)).flatten(1)
    values, vectors = torch.linalg.eigh(_products(centred))
    chosen = [place for place in reversed(range(number)) if values[place] > 1e-6 * values[-1]][:NUM_PATTERNS]
    sizes = values[chosen].sqrt()
    patterns = ((vectors[:, chosen] / sizes).T.to(centred) @ centred).view(len(chosen), *latents.shape[1:])
    true = vectors[:, chosen] * sizes

    kernel = inputs @ inputs.T
    size = kernel.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
    identity = torch.eye(number, dtype=torch.float64)
    solved = [torch.linalg.solve(kernel + penalty * size * identity, identity) for penalty in PENALTIES]
    guesses = [_left_out(kernel @ one, true) for one in solved]
    best = min(range(len(PENALTIES)), key=lambda place: float((guesses[place] - true).square().sum()))
    slopes = (inputs.T @ solved[best] @ true).T
    return LabelRegression(slopes.float(), -(slopes @ mean).float(), patterns), guesses[best].float()


def _products(rows: Tensor) -> Tensor:
    """Return the products of all pairs of rows in double precision, some columns at a time to save memory."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for part in rows.split(2**16, dim=1):
        total += part.double() @ part.double().T
    return total


def _left_out(hat: Tensor, true: Tensor) -> Tensor:
    """Return what each row of `true` is predicted to be by the others, as a difference from their mean.

    `hat` are the shares of all rows in all predictions. Without its own row, a residual is larger by 1 / (1 - the row's
    share in its own prediction), and the mean moves.
    """
    number = len(hat)
    if number == 1:
        return torch.zeros_like(true)
    own = hat.diagonal()[:, None] + 1 / number
    return true - (true - hat @ true) / (1 - own) + true / (number - 1)
