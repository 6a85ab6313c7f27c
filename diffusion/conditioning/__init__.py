"""What samples are conditioned on: a file for each kind of condition, and here what all kinds have in common.

Partners of the volumes are found and checked; conditions are made once and read back by index as a `ConditionBatch`,
which data, step, sampler and predictor pass on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from data import DataSplit, VolumeFile
from diffusion.conditioning.class_label import ClassLabel, check_classes
from diffusion.conditioning.kind import ConditionKind, KnownVoxels, Partners, Preparation, Prepared
from diffusion.conditioning.label_map import ControlMap, LabelMap
from diffusion.conditioning.scan import Modality, Scan
from diffusion.conditioning.tabular import Tabular
from diffusion.conditioning.volume import ConditionVolume, held_out_with_hole
from runtime.files import counted
from settings import DataError, DataSettings, Settings
from settings.conditioning import ConditioningSettings

KINDS: tuple[type[ConditionKind], ...] = (ClassLabel, Modality, LabelMap, ControlMap, ConditionVolume, Tabular, Scan)
"""All kinds of conditions, in the order in which the U-Net gets them."""

# Share of the samples in which all conditions are hidden by one draw. Were all draws independent, the network would
# hardly ever see none of several conditions, which is what guidance compares with.
JOINT_DROPOUT_PROBABILITY = 0.5

# What errors in all that is known count in training, beside 1 for the hole. The decoder sees both sides of the border.
OF_KNOWN = 0.5

Pairs = Mapping[str, Partners]
"""The partners of all volumes by the name of the kind of condition."""

MOST_LINES = 10
"""Problems with partners that are named one by one; scripts/check_data.py --json has all of them."""


def kinds_of(s: ConditioningSettings) -> list[ConditionKind]:
    """Return the kinds of conditions in use."""
    return [kind for kind in (cls(s) for cls in KINDS) if kind.is_used]


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
    has_several = sum(len(kind.draws) for kind in kinds) > 1
    joint = [draw("hide together") < JOINT_DROPOUT_PROBABILITY, draw("hide all")] if has_several else []

    def is_hidden(purpose: str) -> Tensor:
        own = draw(purpose)
        return (torch.where(joint[0], joint[1], own) if joint else own) < s.dropout

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
    parts = {}
    for kind in kinds_of(settings.ldm.conditioning):
        dtype = torch.long if kind.unet_input == "class_labels" else torch.float32
        parts[kind.name] = torch.zeros(batch_size, *kind.shape(settings), dtype=dtype)
    return ConditionBatch(parts)


def find_partners_of(
    s: ConditioningSettings, data: DataSettings, files: Sequence[VolumeFile]
) -> tuple[Pairs, list[str]]:
    """Return the partners of volumes, and every problem with them; without a problem no partner is missing."""
    problems: list[str] = []
    return {kind.name: kind.find(files, data, problems) for kind in kinds_of(s)}, problems


def check_conditions(settings: Settings, volumes: DataSplit) -> Pairs:
    """Find and check what the volumes are conditioned on; raise with every problem."""
    s = settings.ldm.conditioning
    check_classes(s, volumes)
    pairs, problems = find_partners_of(s, settings.data, (*volumes.train, *volumes.val))
    if problems:
        more = [f"and {len(problems) - MOST_LINES} more"] if len(problems) > MOST_LINES else []
        lines = "\n".join(f"  {problem}" for problem in [*problems[:MOST_LINES], *more])
        raise DataError(f"ldm.conditioning: {counted(len(problems), 'problem')} with the volumes' partners:\n{lines}")
    # Evaluation would refuse it only after training.
    held_out_with_hole(pairs.get(ConditionVolume.name), volumes.val, settings.data)
    return pairs


@dataclass(frozen=True)
class ConditionStore:
    """How to read the conditions of volumes by their indices, training volumes first.

    `prepared` has each kind by its name. `digest` is the hash of the content of all partners, which decides what a run
    learns; None if there are no conditions but classes.
    """

    prepared: Mapping[str, Prepared] = field(default_factory=dict)
    digest: str | None = None

    def batch(
        self, indices: Sequence[int], copies: Sequence[int] | None = None, passes: Sequence[int] | None = None
    ) -> ConditionBatch:
        """Return the conditions of volumes.

        `copies` are the numbers of the volumes' augmented copies. A volume whose condition has variants has another in
        each pass over the volumes, the first by default.
        """
        first = [0] * len(indices)
        entries = list(zip(indices, passes or first, copies or first, strict=True))
        parts = {name: [kind.read(*entry) for entry in entries] for name, kind in self.prepared.items()}
        return ConditionBatch({name: torch.stack(rows) for name, rows in parts.items()})

    def pictures(self, index: int) -> dict[str, Tensor]:
        """Return the conditions of a volume that are volumes too, as (D, H, W) in [0, 1], to look at."""
        kinds = self.prepared.items()
        return {kind.shown_as or name: kind.picture(index) for name, kind in kinds if kind.picture is not None}

    def known(self, index: int) -> KnownVoxels | None:
        """Return what the condition of a volume knows of the volume; None if it is not made from it."""
        return next((kind.known(index) for kind in self.prepared.values() if kind.known is not None), None)

    @property
    def metadata(self) -> dict[str, Any]:
        """Return what is stored with the trained weights because sampling needs it."""
        return {name: value for kind in self.prepared.values() for name, value in kind.metadata.items()}


def prepare_conditions(pairs: Pairs, run: Preparation) -> ConditionStore:
    """Make the conditions of all volumes that are not cached yet."""
    s = run.settings.ldm.conditioning
    prepared = {kind.name: kind.prepare(pairs.get(kind.name, Partners()), run) for kind in kinds_of(s)}
    if not s.comes_from_volumes:
        return ConditionStore(prepared)
    by_role = [part for partners in pairs.values() for part in partners.files.items()]
    lines = [f"{role}\t{file.digest}" for role, files in by_role for file in files]
    lines += [json.dumps(row, sort_keys=True) for partners in pairs.values() for row in partners.rows]
    return ConditionStore(prepared, hashlib.sha256("\n".join(lines).encode()).hexdigest())
