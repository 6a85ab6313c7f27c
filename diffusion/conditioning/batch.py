"""The conditions of one batch as one object, which data, step, sampler and predictor pass on; and how to hide them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diffusion.conditioning.kinds import KINDS, kinds_of
from diffusion.conditioning.volume import ConditionVolume
from settings import Settings
from settings.conditioning import ConditioningSettings

# Share of the samples in which all conditions are hidden by one draw. Were all draws independent, the network would
# hardly ever see none of several conditions, which is what guidance compares with.
TOGETHER = 0.5

# What errors in all that is known count in training, beside 1 for the hole. The decoder sees both sides of the border.
OF_KNOWN = 0.5


@dataclass(frozen=True)
class ConditionBatch:
    """What a batch is conditioned on: a tensor (B, ...) for each kind of condition, by its name."""

    parts: Mapping[str, Tensor] = field(default_factory=dict)

    def map(self, change: Callable[[Tensor], Tensor]) -> ConditionBatch:
        """Return the conditions with every tensor changed."""
        return ConditionBatch({name: change(part) for name, part in self.parts.items()})

    def to(self, device: torch.device) -> ConditionBatch:
        """Return the conditions on `device`, copied without waiting for the copy."""
        return self.map(lambda part: part.to(device, non_blocking=True))

    def rows(self, places: Sequence[int]) -> ConditionBatch:
        """Return the conditions of some samples of the batch."""
        return self.map(lambda part: part[list(places)])

    def concatenate(self, other: ConditionBatch) -> ConditionBatch:
        """Return one batch: this one followed by `other`, which has the same kinds."""
        return ConditionBatch({name: torch.cat([part, other.parts[name]]) for name, part in self.parts.items()})

    @property
    def unet_inputs(self) -> dict[str, Tensor]:
        """Return what the U-Net takes besides the noisy latent and the times; kinds may share an input."""
        by_input: dict[str, list[Tensor]] = {}
        for kind in KINDS:
            if kind.name in self.parts:
                by_input.setdefault(kind.unet_input, []).append(self.parts[kind.name])
        return {name: parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for name, parts in by_input.items()}


NOTHING = ConditionBatch()
"""The condition of a network that has none."""


def hidden(condition: ConditionBatch, s: ConditioningSettings) -> ConditionBatch:
    """Return the condition of the same shape that says nothing."""
    kinds = {kind.name: kind for kind in kinds_of(s)}
    return ConditionBatch({name: kinds[name].hidden(part) for name, part in condition.parts.items()})


def some_hidden(condition: ConditionBatch, s: ConditioningSettings, draw: Callable[[str], Tensor]) -> ConditionBatch:
    """Hide each part of each sample with the probability that the settings say.

    `draw` returns a uniform number in [0, 1) for each sample and purpose.
    """
    kinds = [kind for kind in kinds_of(s) if kind.draws]
    several = sum(len(kind.draws) for kind in kinds) > 1
    together, of_all = (draw("hide together") < TOGETHER, draw("hide all")) if several else (None, None)

    def is_hidden(purpose: str) -> Tensor:
        own = draw(purpose)
        if together is not None and of_all is not None:
            own = torch.where(together, of_all, own)
        return own < s.dropout

    changed = {kind.name: kind.some_hidden(condition.parts[kind.name], is_hidden) for kind in kinds}
    return ConditionBatch({**condition.parts, **changed})


def error_weights(condition: ConditionBatch, voxel_effects: Tensor, of_known: float = OF_KNOWN) -> Tensor:
    """Return the weights (B, C, D, H, W) of errors in the latents of volumes with holes.

    Most of such a volume is known and only has to be copied. So errors count by the share that is unknown, and all that
    is known counts `of_known` times as much as the hole, whatever its size. Of a sample whose condition is hidden
    nothing is known. They count by `Latents.voxel_effects` too, because what surrounds a hole says little of most
    channels, and much of those that decide its voxels.
    """
    unknown = 1 - condition.parts[ConditionVolume.name][:, -1:]
    # A mask may be empty.
    mean = unknown.mean(dim=(1, 2, 3, 4), keepdim=True).clamp_min(torch.finfo().tiny)
    return (unknown / mean + of_known) / (1 + of_known) * voxel_effects


def empty_condition(settings: Settings, batch_size: int) -> ConditionBatch:
    """Return conditions of zeros in the shape that training uses: class 0, and everything else hidden."""
    return ConditionBatch(
        {
            kind.name: torch.zeros(
                batch_size,
                *kind.shape(settings),
                dtype=torch.long if kind.unet_input == "class_labels" else torch.float32,
            )
            for kind in kinds_of(settings.ldm.conditioning)
        }
    )
