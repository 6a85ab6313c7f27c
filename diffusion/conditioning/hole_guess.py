"""A first guess of what is in a hole, from the rest of the volume, by a Gaussian model of the training volumes.

What lies around a hole, and how large, bright and turned the whole volume is, says much about what is in it. A network
of convolutions needs long to learn that from a few hundred volumes; under a Gaussian it is a system of equations.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from data import NETWORK_RANGE
from diffusion.normalisation import (
    MOST_EXAMPLES,
    NoiseShape,
    Normalisation,
    Texture,
    principal_components,
    texture_of,
)
from runtime.processes import Process

LARGEST_AXIS = 32
"""The model knows volumes averaged to at most this many voxels along each axis: it is about large patterns."""

NUM_PATTERNS = 32
"""How many principal components the model has; besides, neighbours are alike."""

DOUBT = 1.0
"""The variance of known voxels around the model, beside their own: it is estimated from few volumes."""

LEAST_DEVIATION = 0.01
"""A channel that hardly varies counts as if it varied this much: anything new in it would outweigh all the rest."""

FEWEST_TO_SPLIT = 4
"""Fewer training volumes than this are too few for models of half of them."""

LARGEST_RESIDUAL = 1e-3
MOST_ITERATIONS = 500
"""Models of a few smooth volumes need up to 180, and what fewer give can be worse than the mean."""

_PREFIX = "hole_"


@dataclass(frozen=True)
class HoleGuess:
    """The model: mean, scale and covariance of averaged volumes, the covariance being that of noise of their shape."""

    space: Normalisation

    def fill(self, image: Tensor, unknown: Tensor) -> Tensor:
        """Return the volume (C, D, H, W) with a guess wherever `unknown`, bool (D, H, W), is True.

        What the volume holds there has no influence.
        """
        assert self.space.mean is not None, "the model has a mean at each position"
        _, d, h, w = self.space.mean.shape
        grid = (d, h, w)
        share = F.adaptive_avg_pool3d((~unknown)[None].float(), grid)
        known = share >= 0.5
        values = F.adaptive_avg_pool3d(image.masked_fill(unknown, 0), grid) / share.clamp_min(0.5)
        guess = self.space.undo(self._expected(self.space.apply(values) * known, known))
        guess = torch.where(known, values, guess)
        fine = F.interpolate(guess[None], size=image.shape[1:], mode="trilinear", align_corners=False)[0]
        return torch.where(unknown, fine.clamp_(*NETWORK_RANGE), image)

    def _expected(self, values: Tensor, known: Tensor) -> Tensor:
        """Return the expected volume given normalised values where `known`, which are 0 elsewhere.

        This is covariance @ weights, and conjugate gradients find the weights with which it agrees with what is known.
        """
        covariance = self._covariance()
        weights, residual = torch.zeros_like(values), values
        direction, size = residual, residual.square().sum()
        enough = LARGEST_RESIDUAL**2 * size
        for _ in range(MOST_ITERATIONS):
            if size <= enough:
                break
            image = covariance(direction) * known + DOUBT * direction
            step = size / (direction * image).sum()
            weights, residual = weights + step * direction, residual - step * image
            size, before = residual.square().sum(), size
            direction = residual + size / before * direction
        return covariance(weights)

    def _covariance(self) -> Callable[[Tensor], Tensor]:
        """Return what multiplies a volume by the covariance."""
        shape = self.space.noise_shape
        assert shape is not None, "the model has components"
        assert shape.texture is not None, "the model has a texture"
        directions, variances, texture = shape.directions.flatten(1), shape.deviations.square(), shape.texture

        def without_components(sample: Tensor) -> Tensor:
            return sample - ((directions @ sample.flatten()) @ directions).view_as(sample)

        def product(sample: Tensor) -> Tensor:
            rest = texture.strength * texture.alike(without_components(texture.alike(texture.strength * sample)))
            return rest + ((variances * (directions @ sample.flatten())) @ directions).view_as(sample)

        return product

    @property
    def content(self) -> dict[str, float | Tensor]:
        """Return what is stored with the weights."""
        return {f"{_PREFIX}{name}": value for name, value in self.space.content.items()}

    @property
    def digest(self) -> str:
        """Return a hash of the model."""
        found = hashlib.sha256()
        for name, value in sorted(self.content.items()):
            assert isinstance(value, Tensor), "the model consists of tensors"
            found.update(name.encode() + value.contiguous().numpy().tobytes())
        return found.hexdigest()[:24]

    @classmethod
    def stored(cls, content: dict[str, Any], num_channels: int, grid: Sequence[int]) -> HoleGuess:
        """Return the model that `content` describes; raise ValueError if it is not one of such volumes."""
        shape = (num_channels, *coarse_grid(grid))
        texture = Texture(torch.ones(shape), tuple(torch.eye(n).repeat(num_channels, 1, 1) for n in shape[1:]))
        noise_shape = NoiseShape(torch.zeros(NUM_PATTERNS, *shape), torch.ones(NUM_PATTERNS), texture)
        like = Normalisation(torch.ones(num_channels, 1, 1, 1), torch.zeros(shape), noise_shape)
        found = {name.removeprefix(_PREFIX): v for name, v in content.items() if name.startswith(_PREFIX)}
        try:
            return cls(like.filled(found))
        except ValueError as error:
            raise ValueError(f"the model of what is in holes: {error}") from None


@dataclass(frozen=True)
class Guesses:
    """The model, if there is one, and for volumes that it was fitted to, by their number, one that was not.

    A network must learn from guesses that are as good as those it will be given, and a model is too good on what it was
    fitted to.
    """

    model: HoleGuess | None = None
    of_others: Mapping[int, HoleGuess] = field(default_factory=dict)

    def of(self, number: int) -> HoleGuess | None:
        """Return the model that fills the holes of a volume."""
        return self.of_others.get(number, self.model)

    def digests(self, number: int) -> list[str]:
        """Return a hash of the model of each of the first `number` volumes."""
        of_model = "" if self.model is None else self.model.digest
        known = {id(model): model.digest for model in self.of_others.values()}
        return [known.get(id(self.of(place)), of_model) for place in range(number)]


def coarse_grid(grid: Sequence[int]) -> tuple[int, int, int]:
    """Return the grid of the model for volumes on `grid`: about a whole number of voxels is averaged to one."""
    d, h, w = (math.ceil(n / math.ceil(n / LARGEST_AXIS)) for n in grid)
    return d, h, w


def fit(examples: Tensor) -> HoleGuess:
    """Return the model of averaged volumes (N, C, D, H, W)."""
    mean = examples.mean(dim=0)
    centred = examples - mean
    variance = centred.square().mean(dim=(0, 2, 3, 4))[:, None, None, None]
    scale = variance.clamp_min(LEAST_DEVIATION**2).rsqrt()
    centred *= scale
    components = principal_components(centred, min(NUM_PATTERNS, (len(examples) - 1) // 2))
    texture = texture_of(centred, components, torch.zeros_like(mean))
    return HoleGuess(Normalisation(scale, mean, NoiseShape(components.directions, components.deviations, texture)))


def fit_to_volumes(read: Callable[[int], Tensor], num_train: int, shape: Sequence[int], process: Process) -> Guesses:
    """Fit the model to training volumes of `shape` (C, D, H, W), which `read` returns by their number.

    A volume among those that it was fitted to has the model of the half of them that it is not in.
    """
    number, grid = min(num_train, MOST_EXAMPLES), coarse_grid(shape[1:])
    numbers = [place * num_train // number for place in range(number)]
    examples = torch.zeros(number, shape[0], *grid)
    with process.together():
        for place in range(process.rank, number, process.world_size):
            examples[place] = F.adaptive_avg_pool3d(read(numbers[place]), grid)
    examples = process.sum(examples)
    # Kept conditions are found by the model's hash, which rounding on another machine would change.
    guesses: Guesses = process.from_first(_fitted(numbers, examples) if process.is_first else None)
    return guesses


def _fitted(numbers: Sequence[int], examples: Tensor) -> Guesses:
    if len(numbers) < FEWEST_TO_SPLIT:
        return Guesses(fit(examples))
    halves = [fit(examples[half::2]) for half in (0, 1)]
    return Guesses(fit(examples), {volume: halves[1 - place % 2] for place, volume in enumerate(numbers)})
