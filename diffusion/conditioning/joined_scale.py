"""How label maps and condition volumes on the latent grid are scaled before they are joined to the noisy latent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.processes import Process
from settings import Settings

LABEL_MAP, VOLUME = "label map", "volume"

LEAST_DEVIATION = 0.2
"""A label value that hardly varies counts as if it varied this much: a rare one would become huge where it is."""


@dataclass(frozen=True)
class Centre:
    """The mean (C, D, H, W) of one kind of condition over the training set, and 1 / standard deviation (C, 1, 1, 1)."""

    mean: Tensor
    scale: Tensor


@dataclass(frozen=True)
class JoinedScale:
    """The scales of joined channels.

    `centres` are there if `ldm.conditioning.normalise` is position. Latents then lie around the mean at their position,
    and a network of convolutions hardly knows the position. From a condition around its own mean it can tell how a case
    differs from the mean; from the plain condition it would have to learn both means first.
    """

    volume_scale: float = 1.0
    centres: dict[str, Centre] | None = None

    def apply(self, kind: str, channels: Tensor) -> Tensor:
        """Return the channels (C, D, H, W) of one kind of condition as the network takes them."""
        if self.centres is None:
            if kind == LABEL_MAP:
                return channels
            return torch.cat([channels[:-1] * self.volume_scale, channels[-1:]])
        centre = self.centres[kind]
        if kind == LABEL_MAP:
            # The background follows from the other values; its place says that a map is given.
            return torch.cat([torch.ones_like(channels[:1]), (channels[1:] - centre.mean) * centre.scale])
        values, known = channels[:-1], channels[-1:]
        scaled = (values - centre.mean) * centre.scale
        return torch.cat([scaled * known, known])

    @property
    def content(self) -> dict[str, float | Tensor]:
        """Return what is stored with the weights."""
        content: dict[str, float | Tensor] = {"volume_scale": self.volume_scale}
        for kind, centre in (self.centres or {}).items():
            content |= {_name(kind, "mean"): centre.mean, _name(kind, "scale"): centre.scale}
        return content

    @classmethod
    def stored(cls, content: dict[str, Any], settings: Settings) -> JoinedScale:
        """Return the scale that `content` describes; raise ValueError if it is not of the settings' kind."""
        scale = content.get("volume_scale", 1.0)
        if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale < math.inf:
            raise ValueError("volume_scale is not a finite number above 0")
        s = settings.ldm.conditioning
        shape = settings.latent_shape
        if s.normalise == "scale":
            return cls(float(scale))
        centres = {}
        for kind, number in _numbers_of_channels(settings).items():
            shapes = {"mean": (number, *shape[1:]), "scale": (number, 1, 1, 1)}
            centres[kind] = Centre(**{name: _tensor(content, _name(kind, name), sh) for name, sh in shapes.items()})
        return cls(float(scale), centres)


AS_THEY_ARE = JoinedScale()
"""The scale that changes nothing."""


def joined_scale(
    readers: dict[str, Callable[[int, int], Tensor]],
    num_train: int,
    settings: Settings,
    process: Process,
) -> JoinedScale:
    """Return the scale of the conditions of the training volumes; a reader returns the plain channels of one kind."""
    s = settings.ldm.conditioning
    if s.normalise == "position":
        centres = {}
        for kind, read in readers.items():
            centres[kind] = _centre(kind, read, num_train, process)
        return JoinedScale(1.0, centres)
    return JoinedScale(_volume_scale(readers[VOLUME], num_train, process) if VOLUME in readers else 1.0)


def _centre(kind: str, read: Callable[[int, int], Tensor], num_train: int, process: Process) -> Centre:
    """Return the centre of what is known of the training conditions in their first variants."""
    first = read(0, 0).double()
    values = first[1:] if kind == LABEL_MAP else first[:-1]
    total, squares, count = torch.zeros_like(values), torch.zeros_like(values), torch.zeros_like(first[:1])
    with process.together():
        for number in range(process.rank, num_train, process.world_size):
            channels = read(number, 0).double()
            values, known = (channels[1:], None) if kind == LABEL_MAP else (channels[:-1], channels[-1:])
            if known is None:
                known = torch.ones_like(count)
            total += values * known
            squares += values.square() * known
            count += known
    total, squares, count = process.sum(total), process.sum(squares), process.sum(count)
    # Where nothing is ever known the mean does not matter, because the result is 0 there.
    mean = total / count.clamp_min(1e-9)
    variance = (squares - mean * total).sum(dim=(1, 2, 3), keepdim=True) / count.sum()
    deviation = variance.clamp_min(0).sqrt()
    if kind == LABEL_MAP:
        deviation = deviation.clamp_min(LEAST_DEVIATION)
    return Centre(mean.float(), torch.where(deviation > 0, 1 / deviation, 1.0).float())


def _volume_scale(read: Callable[[int, int], Tensor], num_train: int, process: Process) -> float:
    """Return 1 / standard deviation of the channels of all training volumes, but not of those that say what is known.

    The result is the same for any number of processes: one fills each row, and the rows are added in order.
    """
    sums = torch.zeros(num_train, 3, dtype=torch.float64)
    with process.together():
        for number in range(process.rank, num_train, process.world_size):
            values = read(number, 0)[:-1].double()
            sums[number] = torch.tensor([values.numel(), float(values.sum()), float(values.square().sum())])
    count, total, squares = (math.fsum(column) for column in process.sum(sums).T.tolist())
    variance = squares / count - (total / count) ** 2
    return 1 / math.sqrt(variance) if variance > 0 else 1.0


def _numbers_of_channels(settings: Settings) -> dict[str, int]:
    """Return how many channels of each kind of condition have a mean: all but the one that says what is known."""
    s = settings.ldm.conditioning
    joined = {LABEL_MAP: s.labels.num_classes, VOLUME: s.volume.num_joined(settings.autoencoder.latent_channels)}
    return {kind: number - 1 for kind, number in joined.items() if number}


def _name(kind: str, what: str) -> str:
    return f"joined_{kind.replace(' ', '_')}_{what}"


def _tensor(content: dict[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of `content`; raise ValueError unless it has this shape and finite values."""
    found = content.get(name)
    if not isinstance(found, Tensor) or found.shape != shape or not found.isfinite().all():
        raise ValueError(f"{name} is not a tensor of {shape} finite values")
    return found
