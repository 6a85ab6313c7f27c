"""The space that the U-Net works in: latents of mean 0 and standard deviation 1, and the noise that hides them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diffusion.latent_files import Moments
from runtime.processes import Process
from settings import CheckpointError, Settings

MOST_EXAMPLES = 256
"""Principal components are those of at most this many training latents, which are in memory together."""

_CHUNK = 2**16

# Latents that vary less than this beside their mean square are constant: the rest is rounding.
_SMALLEST_SHARE = 1e-12

# Noise has at least this share of its mean variance at every position and in every pattern along an axis, so that it
# hides also what no training latent shows.
_LEAST_VARIANCE = 0.01


@dataclass(frozen=True)
class Texture:
    """How noise varies over the positions: its strength at each, and how alike its values are along each axis.

    Latents are smooth, and nearly constant where volumes are empty. White noise is neither, and what a network with few
    updates leaves of it is grain. `strength` is (C, D, H, W); a root (C, n, n) for each axis is the symmetric square
    root of the correlations between its n positions.
    """

    strength: Tensor
    roots: tuple[Tensor, ...]

    def __call__(self, sample: Tensor) -> Tensor:
        """Return white noise (C, D, H, W) with this texture."""
        return self.alike(sample) * self.strength

    def alike(self, sample: Tensor) -> Tensor:
        """Return white noise (C, D, H, W) whose neighbours are as alike as here, with variance 1 everywhere."""
        for axis, root in enumerate(self.roots, start=1):
            moved = sample.movedim(axis, -1)
            sample = (moved.flatten(1, 2) @ root).view(moved.shape).movedim(-1, axis)
        return sample

    def to(self, device: torch.device) -> Texture:
        """Return the same texture on a device."""
        return Texture(self.strength.to(device), tuple(root.to(device) for root in self.roots))


@dataclass(frozen=True)
class NoiseShape:
    """Noise with more variance in some directions: orthonormal (K, C, D, H, W), each with its standard deviation.

    Large patterns, such as size and brightness, vary far more between latents than white noise does in any direction.
    White noise hides them only at the end of the process, and there a network with few updates predicts their mean, so
    all samples come out alike. Noise that varies like the latents leaves such patterns as varied as they should be.
    In all other directions the noise is white, or has a texture.
    """

    directions: Tensor
    deviations: Tensor
    texture: Texture | None = None

    def __call__(self, noise: Tensor) -> Tensor:
        """Return white noise (B, C, D, H, W) in this shape."""
        if not len(self.directions) and self.texture is None:
            return noise
        directions = self.directions.flatten(1)
        # One by one, so that no sample depends on how many are drawn at once.
        if self.texture is None:
            parts = [((self.deviations - 1) * (directions @ sample.flatten())) @ directions for sample in noise]
            return noise + torch.stack(parts).view_as(noise)
        shaped = []
        for sample in noise:
            along = directions @ sample.flatten()
            rest = self.texture(sample - (along @ directions).view_as(sample))
            shaped.append(rest + ((self.deviations * along) @ directions).view_as(sample))
        return torch.stack(shaped)

    def to(self, device: torch.device) -> NoiseShape:
        """Return the same shape on a device."""
        texture = None if self.texture is None else self.texture.to(device)
        return NoiseShape(self.directions.to(device), self.deviations.to(device), texture)


@dataclass(frozen=True)
class Normalisation:
    """Latents as (latent - mean) * scale, with tensors that broadcast over (C, D, H, W), and the shape of their noise.

    One scale for all elements is a number, and then there is no mean. Without a shape the noise is white.
    """

    scale: float | Tensor
    mean: Tensor | None = None
    noise_shape: NoiseShape | None = None

    def apply(self, latents: Tensor) -> Tensor:
        """Return latents as the U-Net sees them."""
        return (latents if self.mean is None else latents - self.mean) * self.scale

    def undo(self, latents: Tensor) -> Tensor:
        """Return latents as the decoder expects them."""
        unscaled = latents / self.scale
        return unscaled if self.mean is None else unscaled + self.mean

    def shaped(self, noise: Tensor) -> Tensor:
        """Return white noise in the shape that these latents are hidden with."""
        return noise if self.noise_shape is None else self.noise_shape(noise)

    def to(self, device: torch.device) -> Normalisation:
        """Return the same normalisation with its tensors on a device."""
        scale = self.scale.to(device) if isinstance(self.scale, Tensor) else self.scale
        mean = None if self.mean is None else self.mean.to(device)
        return Normalisation(scale, mean, self.noise_shape and self.noise_shape.to(device))

    @property
    def content(self) -> dict[str, float | Tensor]:
        """Return what is stored with the weights."""
        tensors = {"latent_scale": self.scale, "latent_mean": self.mean}
        if self.noise_shape is not None:
            tensors |= {
                "noise_directions": self.noise_shape.directions,
                "noise_deviations": self.noise_shape.deviations,
            }
            if (texture := self.noise_shape.texture) is not None:
                tensors |= {"noise_strength": texture.strength}
                tensors |= {f"noise_root_{axis}": root for axis, root in enumerate(texture.roots)}
        found = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in tensors.items()}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def stored(cls, content: dict[str, Any], settings: Settings) -> Normalisation:
        """Return the normalisation that `content` describes; raise ValueError if it is not of the settings' kind."""
        return cls.neutral(settings).filled(content)

    def filled(self, content: dict[str, Any]) -> Normalisation:
        """Return one of the same kind with the values of `content`; raise ValueError if they are of another."""
        scale, mean = content.get("latent_scale"), content.get("latent_mean")
        if self.mean is None:
            number = scale if isinstance(scale, int | float) and not isinstance(scale, bool) else math.nan
            if mean is not None or not 0 < number < math.inf:
                raise ValueError("latent_scale is not a finite number above 0")
            scale = float(number)
        else:
            assert isinstance(self.scale, Tensor), "a mean comes with a scale for each channel"
            scale, mean = _tensor(content, "latent_scale", self.scale), _tensor(content, "latent_mean", self.mean)
            if not (scale > 0).all():
                raise ValueError("latent_scale is not above 0")
        if self.noise_shape is None:
            return Normalisation(scale, mean)
        expected = self.noise_shape
        found = content.get("noise_deviations")
        number = min(len(found), len(expected.deviations)) if isinstance(found, Tensor) and found.ndim else 0
        directions = _tensor(content, "noise_directions", expected.directions[:number])
        deviations = _tensor(content, "noise_deviations", expected.deviations[:number])
        texture = None
        if expected.texture is not None:
            roots = enumerate(expected.texture.roots)
            texture = Texture(
                _tensor(content, "noise_strength", expected.texture.strength),
                tuple(_tensor(content, f"noise_root_{axis}", root) for axis, root in roots),
            )
        return Normalisation(scale, mean, NoiseShape(directions, deviations, texture))

    @classmethod
    def neutral(cls, settings: Settings) -> Normalisation:
        """Return a normalisation that changes nothing, with tensors as large as those of a training set."""
        kind, shape = settings.ldm.latents.normalise, settings.latent_shape
        number, texture = settings.ldm.scheduler.noise_components, None
        if settings.ldm.scheduler.noise_texture == "latents":
            texture = Texture(torch.ones(shape), tuple(torch.eye(n).repeat(shape[0], 1, 1) for n in shape[1:]))
        has_shape = number > 0 or texture is not None
        noise_shape = NoiseShape(torch.zeros(number, *shape), torch.ones(number), texture) if has_shape else None
        if kind == "scale":
            return cls(1.0, None, noise_shape)
        by_channel = (shape[0], 1, 1, 1)
        return cls(torch.ones(by_channel), torch.zeros(shape if kind == "position" else by_channel), noise_shape)


class Statistics:
    """What the normalisation of a training set needs to know of its `count` latents."""

    def __init__(self, settings: Settings, count: int) -> None:
        self.kind, self.count = settings.ldm.latents.normalise, count
        self.num_components = settings.ldm.scheduler.noise_components
        shape = settings.latent_shape
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.squares = torch.zeros(shape[0], 1, 1, 1, dtype=torch.float64)
        self.has_texture = settings.ldm.scheduler.noise_texture == "latents"
        self.needs_examples = self.num_components > 0 or self.has_texture
        self.drawn = torch.zeros(shape, dtype=torch.float64)
        number = min(count, MOST_EXAMPLES) if self.needs_examples else 0
        self.places = {place * count // number: place for place in range(number)}
        self.examples = torch.zeros(number, *shape)
        self._is_summed = False

    @property
    def is_needed(self) -> bool:
        """Return whether latents must be added: one scale alone follows from their facts."""
        return self.kind != "scale" or self.needs_examples

    def add(self, index: int, moments: Moments) -> None:
        """Add one latent by its index, as training draws it: with its mean and its sigma; ignore held-out ones."""
        if index >= self.count or not self.is_needed:
            return
        mean, sigma = (part.double() for part in moments)
        self.mean += mean
        self.squares += (mean.square() + sigma.square()).sum(dim=(1, 2, 3), keepdim=True)
        if index in self.places:
            self.examples[self.places[index]] = moments[0]
            self.drawn += sigma.square()

    def normalisation(self, scale: float, process: Process) -> Normalisation:
        """Return the normalisation of the latents of all processes; `scale` is for those that have one scale."""
        if not self.is_needed:
            return Normalisation(scale)
        result = Normalisation(scale)
        if self.kind != "scale":
            result = self._by_channel(process.sum(self.mean) / self.count, process.sum(self.squares))
        if not self.num_components and not self.has_texture:
            return result
        examples = result.apply(self._all_examples(process))
        examples -= examples.mean(dim=0)
        # Few examples vary in few directions: with all of them taken out, no texture would be left to measure.
        most = (len(examples) - 1) // 2 if self.has_texture else len(examples)
        shape = principal_components(examples, min(self.num_components, most))
        if self.has_texture:
            drawn = (process.sum(self.drawn) / len(examples)).float() * result.scale**2
            shape = NoiseShape(shape.directions, shape.deviations, texture_of(examples, shape, drawn))
        return Normalisation(result.scale, result.mean, shape)

    def _all_examples(self, process: Process) -> Tensor:
        """Return the examples of all processes, which sum in place and therefore only once."""
        if not self._is_summed:
            process.sum(self.examples)
            self._is_summed = True
        return self.examples

    def _by_channel(self, mean: Tensor, squares: Tensor) -> Normalisation:
        """Return what brings latents to mean 0, at each position or in each channel, and to deviation 1 by channel."""
        if self.kind == "channel":
            mean = mean.mean(dim=(1, 2, 3), keepdim=True)
        num_positions = self.mean[0].numel()
        explained = mean.square().expand_as(self.mean).sum(dim=(1, 2, 3), keepdim=True) / num_positions
        variance = squares / (self.count * num_positions) - explained
        mean_squares = squares.flatten().tolist()
        for channel, (found, total) in enumerate(zip(variance.flatten().tolist(), mean_squares, strict=True)):
            check_variance(found, total / (self.count * num_positions), channel)
        return Normalisation(variance.rsqrt().float(), mean.float())


def principal_components(centred: Tensor, number: int) -> NoiseShape:
    """Return at most `number` directions in which centred examples (N, C, D, H, W) vary more than white noise."""
    products = torch.zeros(len(centred), len(centred), dtype=torch.float64)
    for part in _chunks(centred):
        products += part @ part.T
    # The products of N examples have the eigenvalues of their covariance, which would be far too large to compute.
    values, vectors = torch.linalg.eigh(products / max(1, len(centred) - 1))
    chosen = [place for place in reversed(range(len(values))) if values[place] > 1][:number]
    combined = torch.cat([vectors[:, chosen].T @ part for part in _chunks(centred)], dim=1)
    directions = combined / combined.norm(dim=1, keepdim=True)
    return NoiseShape(directions.float().view(len(chosen), *centred.shape[1:]), values[chosen].sqrt().float())


def texture_of(centred: Tensor, shape: NoiseShape, drawn: Tensor) -> Texture:
    """Return the texture of centred examples (N, C, D, H, W) beside the principal components of `shape`.

    drawn: the variance (C, D, H, W) with which training draws each latent around its example.
    """
    directions = shape.directions.flatten(1)
    freedom = max(1, len(centred) - 1 - len(directions))

    def rests() -> Iterator[Tensor]:
        for example in centred:
            yield example - ((directions @ example.flatten()) @ directions).view_as(example)

    variance = drawn + sum(rest.square() for rest in rests()) / freedom
    smooth = F.avg_pool3d(F.pad(variance[None], [1] * 6, mode="replicate")[0], 3, stride=1)
    least = _LEAST_VARIANCE * smooth.mean(dim=(1, 2, 3), keepdim=True).clamp(min=_LEAST_VARIANCE)
    # Few examples vary by chance at one position, but not in a whole plane: planes get their own variance back.
    planes = [[part.sum(dim=dims, keepdim=True) for part in (variance, smooth)] for dims in ((2, 3), (1, 3), (1, 2))]
    for exact, smoothed in planes:
        smooth = smooth * exact / smoothed.clamp(min=torch.finfo().tiny)
    strength = smooth.maximum(least).sqrt()
    roots = []
    for axis in (1, 2, 3):
        own = (drawn / strength**2).double().movedim(axis, -1).flatten(1, 2).mean(dim=1)
        # One example that is never drawn around has no correlations; with this it gets white noise.
        products = torch.diag_embed(own + _SMALLEST_SHARE)
        for rest in rests():
            lines = (rest / strength).double().movedim(axis, -1).flatten(1, 2)
            products += lines.mT @ lines / (freedom * lines.shape[1])
        # A diagonal of ones leaves the variance to the strength: where that has its floor, these sums are far below 1.
        sizes = products.diagonal(dim1=1, dim2=2).sqrt()
        values, vectors = torch.linalg.eigh(products / (sizes[:, :, None] * sizes[:, None]))
        values = _LEAST_VARIANCE + (1 - _LEAST_VARIANCE) * values.clamp(min=0)
        roots.append(((vectors * values.sqrt()[:, None]) @ vectors.mT).float())
    return Texture(strength, tuple(roots))


def _chunks(examples: Tensor) -> Iterator[Tensor]:
    """Yield the examples as float64 matrices of some columns, because all columns would need twice their memory."""
    for part in examples.flatten(1).split(_CHUNK, dim=1):
        yield part.double()


def check_variance(variance: float, mean_square: float, channel: int | None = None) -> None:
    """Raise `CheckpointError` unless latents of this variance, or one channel of them, can be scaled to one."""
    if math.isfinite(variance) and variance > _SMALLEST_SHARE * mean_square:
        return
    where, remedy = "", "train stage 1 again"
    if channel is not None:
        where = f" in channel {channel}, counted from 0"
        if math.isfinite(variance):
            remedy = f"set ldm.latents.normalise: scale, or {remedy}"
    raise CheckpointError(
        f"the variance of the autoencoder's latents is {variance:g}{where}; it must be finite and above zero; {remedy}"
    )


def _tensor(content: dict[str, Any], name: str, like: Tensor) -> Tensor:
    """Return a tensor of `content`; raise ValueError unless it has the shape of `like` and finite values."""
    found = content.get(name)
    if not isinstance(found, Tensor) or found.shape != like.shape or not found.isfinite().all():
        raise ValueError(f"{name} is not a tensor of {tuple(like.shape)} finite values")
    return found
