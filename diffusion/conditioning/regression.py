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

LARGEST_AXIS = 16
"""Label maps are averaged to at most this many voxels along each axis: the regression is about large patterns."""

FORMER_LARGEST_AXIS = 8
"""The same of regressions that were stored before."""

MOST_INPUTS = 2**15
"""With many label values, maps are averaged further, so that the regression has at most about this many inputs."""

NUM_PATTERNS = 64
"""The regression predicts at most this many patterns of the latent."""

PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Tried in units of the mean squared size of a map; the one that predicts best what was left out is taken."""

Move = tuple[int, ...]
"""By how many voxels a map and its latent are moved along each axis."""

STILL: Move = (0, 0, 0)

NAMES = ("regression_inputs", "regression_offset", "regression_patterns")


@dataclass(frozen=True)
class LabelRegression:
    """The regression: inputs (K, F) and an offset (K) give the weights of the patterns (K, C, D, H, W)."""

    inputs: Tensor
    offset: Tensor
    patterns: Tensor
    largest_axis: int = LARGEST_AXIS

    def weights(self, shares: Tensor) -> Tensor:
        """Return the weights (K) of the patterns for a label map (classes, D, H, W)."""
        return self.inputs @ features(shares, self.largest_axis) + self.offset

    def guess(self, weights: Tensor) -> Tensor:
        """Return the latent (C, D, H, W) with these weights of the patterns."""
        return torch.einsum("k,kcdhw->cdhw", weights, self.patterns)

    def around(self, centre: Tensor) -> LabelRegression:
        """Return a regression whose guesses are those of this one plus `centre` (C, D, H, W), a pattern of weight 1."""
        inputs = torch.cat([self.inputs, self.inputs.new_zeros(1, self.inputs.shape[1])])
        offset = torch.cat([self.offset, self.offset.new_ones(1)])
        return LabelRegression(inputs, offset, torch.cat([self.patterns, centre[None]]), self.largest_axis)

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
        shares = torch.zeros(num_classes, *latent_shape[1:])
        numbers = {axis: len(features(shares, axis)) for axis in (LARGEST_AXIS, FORMER_LARGEST_AXIS)}
        is_former = inputs.shape[-1] != numbers[LARGEST_AXIS]
        largest_axis = FORMER_LARGEST_AXIS if is_former else LARGEST_AXIS
        shapes = ((len(offset), numbers[largest_axis]), (len(offset),), (len(offset), *latent_shape))
        if any(tuple(part.shape) != shape for part, shape in zip(found, shapes, strict=True)):
            raise ValueError("the regression on label maps is of another shape")
        return cls(inputs, offset, patterns, largest_axis)


def features(shares: Tensor, largest_axis: int = LARGEST_AXIS) -> Tensor:
    """Return what the regression knows of a label map (classes, D, H, W): a vector without the background."""
    if largest_axis > FORMER_LARGEST_AXIS:
        affordable = int((MOST_INPUTS / max(1, len(shares) - 1)) ** (1 / 3))
        largest_axis = max(FORMER_LARGEST_AXIS, min(largest_axis, affordable))
    d, h, w = (min(n, largest_axis) for n in shares.shape[1:])
    return F.adaptive_avg_pool3d(shares[1:], (d, h, w)).flatten()


def moves_of(grid: Sequence[int]) -> list[Move]:
    """Return by how much maps and latents are moved: not at all, and about a twentieth of each axis both ways."""
    moves = [STILL]
    for axis, n in enumerate(grid):
        for step in (round(n / 20), -round(n / 20)):
            if step:
                moves.append(tuple(step if place == axis else 0 for place in range(3)))
    return moves


def moved(volumes: Tensor, move: Move) -> Tensor:
    """Return volumes (..., D, H, W) moved by some voxels; what comes in from outside repeats the border."""
    for axis, step in zip((-3, -2, -1), move, strict=True):
        if step:
            size = volumes.shape[axis]
            places = (torch.arange(size, device=volumes.device) - step).clamp(0, size - 1)
            volumes = volumes.index_select(axis, places)
    return volumes


def regress(
    read: Callable[[int], Tensor], numbers: Sequence[int], latents: Tensor
) -> tuple[LabelRegression, dict[int, Tensor]]:
    """Fit the regression to the latents of the volumes with these numbers, whose label maps `read` returns.

    Each map is also fitted with its latent moved a little, both alike: what moves with a structure is learned from many
    more examples. So the latents must not be differences from the mean at their position. Also return, for each of
    these volumes, the weights that the regression on the others gives it.
    """
    moves = moves_of(latents.shape[2:])
    maps = [torch.stack([features(moved(shares, move)) for move in moves]) for shares in map(read, numbers)]
    regression, weights = fit(torch.stack(maps), latents, moves)
    return regression, dict(zip(numbers, weights, strict=True))


def fit(maps: Tensor, latents: Tensor, moves: Sequence[Move] = (STILL,)) -> tuple[LabelRegression, Tensor]:
    """Regress latents (N, C, D, H, W) on the features (N, M, F) of their label maps, moved in M ways; the first is not.

    The patterns are the first principal components of the latents; fine detail, which no map tells, is left out. Also
    return the weights (N, K) that each map gets from the other maps: what a network learns from must be as good as what
    it will be given, and a regression is too good on what it was fitted to.
    """
    number, inputs = len(maps), maps.reshape(len(maps) * len(moves), -1)
    mean = inputs.mean(dim=0)
    # What is guessed is a difference from the mean of the latents where they are.
    still = inputs[:: len(moves)].mean(dim=0)
    inputs = inputs - mean
    middle = latents.mean(dim=0)
    centred = (latents - middle).flatten(1)
    values, vectors = torch.linalg.eigh(_products(centred))
    chosen = [place for place in reversed(range(number)) if values[place] > 1e-6 * values[-1]][:NUM_PATTERNS]
    patterns = (vectors[:, chosen] / values[chosen].sqrt()).T.to(centred) @ centred
    true = torch.stack([(moved(latents, move) - middle).flatten(1) @ patterns.T for move in moves], dim=1).double()

    kernel = _products(inputs)
    size = kernel.diagonal().mean().clamp_min(1e-30)
    spread, basis = torch.linalg.eigh(kernel)
    spread = spread.clamp_min(0)
    centred_true = (true - true.mean(dim=(0, 1))).flatten(0, 1)
    in_basis = basis.T @ centred_true
    found = []
    for penalty in PENALTIES:
        slopes = _slopes(inputs, basis @ (in_basis / (spread + penalty * size)[:, None]))
        guesses = _left_out(basis * (spread / (spread + penalty * size)).sqrt(), centred_true, len(moves))
        guesses = guesses - slopes @ (still - mean).double()
        found.append((float((guesses - true[:, 0]).square().sum()), slopes, guesses))
    _, slopes, guesses = min(found, key=lambda one: one[0])
    offset = -(slopes @ still.double())
    patterns = patterns.view(len(chosen), *latents.shape[1:])
    return LabelRegression(slopes.float(), offset.float(), patterns), guesses.float()


def _products(rows: Tensor) -> Tensor:
    """Return the products of all pairs of rows in double precision, some columns at a time to save memory."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for part in rows.split(2**14, dim=1):
        total += part.double() @ part.double().T
    return total


def _slopes(inputs: Tensor, coefficients: Tensor) -> Tensor:
    """Return the slopes (K, F) in double precision from coefficients (rows, K), some columns at a time likewise."""
    return torch.cat([coefficients.T @ part.double() for part in inputs.split(2**14, dim=1)], dim=1)


def _left_out(basis: Tensor, true: Tensor, num_moves: int) -> Tensor:
    """Return what the first row of each group of `num_moves` is predicted to be by the other groups.

    The products of the rows of `basis` are the shares of all rows in all predictions. Without its own group, residuals
    are larger by the inverse of 1 - the group's shares in its own predictions, and the mean moves. The result is a
    difference from the mean of the other groups.
    """
    number = len(true) // num_moves
    if number == 1:
        return torch.zeros_like(true[:1])
    groups, residuals = basis.view(number, num_moves, -1), true - basis @ (basis.T @ true)
    own = groups @ groups.mT + 1 / len(true)
    identity = torch.eye(num_moves, dtype=true.dtype)
    enlarged = torch.linalg.solve(identity - own, residuals.view(number, num_moves, -1))
    targets = true.view(number, num_moves, -1)
    return targets[:, 0] - enlarged[:, 0] + targets.sum(dim=1) / (len(true) - num_moves)
