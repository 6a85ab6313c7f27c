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

    Also return the weights (N, K) that each map gets from the other maps, up to the choice of patterns: what a network
    learns from must be as good as what it will be given, and a regression is too good on what it was fitted to.
    """
    number = len(maps)
    inputs, mean = maps.double(), maps.double().mean(dim=0)
    inputs = inputs - mean
    centred = (latents - latents.mean(dim=0)).flatten(1)
    kernel, products = inputs @ inputs.T, _products(centred)
    size = kernel.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
    identity = torch.eye(number, dtype=torch.float64)
    inverses = [torch.linalg.inv(kernel + penalty * size * identity) for penalty in PENALTIES]
    inverse = min(inverses, key=lambda one: _error_left_out(kernel @ one, products))
    hat = kernel @ inverse
    # The patterns are the principal components of what the regression predicts.
    values, vectors = torch.linalg.eigh(hat @ products @ hat.T)
    chosen = [place for place in reversed(range(number)) if values[place] > 1e-6 * values[-1].clamp_min(1e-12)]
    vectors, sizes = vectors[:, chosen[:NUM_PATTERNS]], values[chosen[:NUM_PATTERNS]].sqrt()
    combine = hat.T @ vectors / sizes
    patterns = (combine.T.to(centred) @ centred).view(-1, *latents.shape[1:])
    true = products @ combine
    weights = inverse @ true
    # Without its own row, a residual is larger by 1 / (1 - the row's share in its own prediction). The last term counts
    # from the mean of the others.
    left_out = true - (true - hat @ true) / (1 - _own_shares(hat)) + true / max(1, number - 1)
    slopes = (inputs.T @ weights).T
    regression = LabelRegression(slopes.float(), -(slopes @ mean).float(), patterns)
    return regression, left_out.float()


def _products(rows: Tensor) -> Tensor:
    """Return the products of all pairs of rows in double precision, some columns at a time to save memory."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for part in rows.split(2**16, dim=1):
        total += part.double() @ part.double().T
    return total


def _error_left_out(hat: Tensor, products: Tensor) -> float:
    """Return the squared error of all predictions that are made without the row that they are for."""
    residual = (torch.eye(len(hat), dtype=hat.dtype) - hat) / (1 - _own_shares(hat))
    return float((residual @ products @ residual.T).trace())


def _own_shares(hat: Tensor) -> Tensor:
    """Return the share (N, 1) that each row has in its own prediction, by the mean and by the regression."""
    shares = hat.diagonal()[:, None] + 1 / len(hat)
    # A single row is all that its mean knows.
    return shares if len(hat) > 1 else torch.zeros_like(shares)
