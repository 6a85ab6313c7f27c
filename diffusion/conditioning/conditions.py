"""The conditions of a run: made once from the volumes' partners, and read back for each batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data import DataSplit
from data.pairs.label_maps import label_shares
from data.pairs.pairs import Pairs
from diffusion.conditioning.condition import Condition
from diffusion.conditioning.kept import Read, keep
from runtime.processes import Process
from settings import Settings

LABEL_MAP = "label map"

READING = {"orientation", "spacing", "voxel_size", "resize"}
"""The settings that decide where a voxel of a file lies on the network's grid."""


@dataclass(frozen=True)
class Conditions:
    """How to read the conditions of the volumes, whose numbers are found by their names.

    `joined` has a reader for each kind of condition that is joined to the noisy latent, whose grid is `grid`.
    """

    numbers: dict[str, int]
    joined: dict[str, Read]
    grid: tuple[int, ...]
    digest: str

    def of(self, names: Sequence[str]) -> Condition:
        """Return the conditions of the volumes with these names, without their classes."""
        return Condition(joined=torch.stack([self._joined(self.numbers[name]) for name in names]))

    def _joined(self, number: int) -> Tensor:
        return torch.cat([read(number) for read in self.joined.values()])

    def shown(self, name: str) -> list[tuple[str, Tensor]]:
        """Return each kind of condition of a volume as a (D, H, W) volume in [0, 1], to look at."""
        return [(kind, _shown(kind, read(self.numbers[name]))) for kind, read in self.joined.items()]


def prepare_conditions(settings: Settings, pairs: Pairs, volumes: DataSplit, process: Process) -> Conditions | None:
    """Make the conditions of all volumes that are not kept yet; None if volumes need no partners.

    They are kept on disk with `ldm.latents.cache: disk`, and otherwise in memory: they are about as large as latents.
    """
    conditioning = settings.ldm.conditioning
    if not conditioning.needs_pairs:
        return None
    on_disk = settings.ldm.latents.cache == "disk"
    readers: dict[str, Read] = {}
    grid = settings.latent_shape[1:]
    if pairs.labels:
        number = conditioning.labels.num_classes
        reading = settings.data.model_dump(mode="json", include=READING)

        def shares(index: int) -> Tensor:
            return torch.from_numpy(label_shares(pairs.labels[index].path, number, settings.data, grid))

        digests = [file.digest for file in pairs.labels]
        key = ["labels", number, reading, list(grid)]
        readers[LABEL_MAP] = keep(shares, digests, (number, *grid), key, on_disk, process, "label maps")
    names = [file.name for file in (*volumes.train, *volumes.val)]
    return Conditions({name: place for place, name in enumerate(names)}, readers, grid, pairs.digest)


def _shown(kind: str, joined: Tensor) -> Tensor:
    values = torch.linspace(0, 1, len(joined))
    return torch.einsum("c,cdhw->dhw", values, joined)


def empty_condition(settings: Settings, batch_size: int) -> Condition:
    """Return a condition of zeros in the shape that training uses: class 0, and everything else hidden."""
    conditioning = settings.ldm.conditioning
    classes = torch.zeros(batch_size, dtype=torch.long) if conditioning.type == "class" else None
    number = conditioning.num_joined(settings.autoencoder.latent_channels)
    joined = torch.zeros(batch_size, number, *settings.latent_shape[1:]) if number else None
    return Condition(classes, joined)
