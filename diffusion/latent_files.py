"""Keeps the means of latents on disk, and what else is made once on the latent grid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.formats import content_digest
from data.store import ArrayFolder, StoredError
from data.volumes import VolumeFile
from runtime.processes import Process
from settings import DataError, DataSettings

# Part of the key: change it whenever the same volume and weights would be stored differently.
VERSION = 4


def latent_key(s: DataSettings, weights: str, precision: str) -> str:
    """Return a hash of everything a latent depends on besides its volume: weights, precision, reading of the data."""
    reading = s.model_dump(mode="json", include={"spacing", "voxel_size", "resize", "intensity"})
    if s.frame is not None:
        reading["frame"] = s.frame
    parts = json.dumps([VERSION, weights, precision, reading], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:24]


def latent_name(file: VolumeFile, copy: int, copies_scale: bool) -> str:
    """Return the name of a volume's latent, or of that of an augmented copy.

    It follows the content of the volume's file, so a changed volume is a cache miss. `copies_scale` says whether copies
    are scaled, besides turned and moved.
    """
    digest = digest_of(file)[:32]
    return digest if copy == 0 else f"{digest}_{copy}" + ("" if copies_scale else "_same_size")


def digest_of(file: VolumeFile) -> str:
    """Return the hash of a volume's file."""
    return file.digest or content_digest(file.path)


class TensorCache:
    """Tensors of one shape that are made once and read by their entries, such as the number of a volume and of a copy.

    Each is a file that `name_of` names by its entry or, of entries that are `in_memory`, a row of one tensor.
    """

    def __init__(
        self, folder: Path, shape: Sequence[int], name_of: Callable[..., str], in_memory: Sequence[tuple[int, ...]] = ()
    ) -> None:
        self.arrays, self.shape, self.name_of = ArrayFolder(folder), tuple(shape), name_of
        self._places = {entry: place for place, entry in enumerate(in_memory)}
        self._rows = torch.zeros(len(in_memory), *shape)

    def find(self, *entry: int) -> tuple[Tensor, Any] | None:
        """Return a tensor and its facts; None if it must be made, because it is missing or, as is logged, damaged."""
        found = None if self._places else self.arrays.find(self.name_of(*entry), self.shape)
        return None if found is None else (torch.from_numpy(found[0]).clone(), found[1])

    def read(self, what: str, *entry: int) -> Tensor:
        """Return a tensor; raise `DataError`, which says of `what` it is, if it cannot be used."""
        if self._places:
            return self._rows[self._places[entry]]
        name = self.name_of(*entry)
        try:
            # A copy, because matrix products may sum in another order where memory is aligned in another way.
            return torch.from_numpy(self.arrays.read(name, self.shape)[0]).clone()
        except StoredError as error:
            raise DataError(
                f"{self.arrays.path_of(name)}: the cached {what} cannot be used, {error}; run the same command again "
                "to make it; several machines need a shared folder, or ldm.latents.cache: memory"
            ) from None

    def write(self, what: str, tensor: Tensor, *entry: int, facts: Any = None) -> None:
        """Write a tensor and, on disk, its facts, atomically."""
        if self._places:
            self._rows[self._places[entry]] = tensor
            return
        try:
            self.arrays.write(self.name_of(*entry), tensor.numpy(), facts)
        except OSError as error:
            raise DataError(
                f"{self.arrays.folder}: the {what} could not be written ({error}); free some space, or set "
                "ldm.latents.cache: memory"
            ) from None

    def share(self, process: Process) -> None:
        """Give what is in memory to all processes, each of which wrote other entries and left zeros for the others'."""
        if self._places:
            process.sum(self._rows)
