"""Keeps the means of latents on disk, and what else is made once on the latent grid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.formats import content_digest
from data.store import ArrayFolder, StoredError
from data.volumes import VolumeFile
from runtime.files import printable
from settings import DataError, DataSettings

# Part of the key: change it whenever the same volume and weights would be stored differently.
VERSION = 4


@dataclass(frozen=True)
class LatentFacts:
    """What stage 2 needs to know about a volume without reading its latent.

    `spacing_mm` is that of the network's grid; `lower` and `upper` are the intensities of each channel that map to the
    ends of the network's range.
    """

    spacing_mm: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]

    def to_row(self) -> list[float]:
        """Return the facts as a flat list of numbers, which processes can exchange."""
        return [*self.spacing_mm, *self.lower, *self.upper]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> LatentFacts:
        """Return the facts from the numbers of `to_row`."""
        middle = (3 + len(row)) // 2
        return cls(tuple(row[:3]), tuple(row[3:middle]), tuple(row[middle:]))


def latent_key(s: DataSettings, weights: str, precision: str) -> str:
    """Return a hash of everything a latent depends on besides its volume: weights, precision, reading of the data."""
    reading = s.model_dump(mode="json", include={"spacing", "voxel_size", "resize", "intensity"})
    if s.frame is not None:
        reading["frame"] = s.frame
    parts = json.dumps([VERSION, weights, precision, reading], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:24]


class TensorCache:
    """Tensors of one shape on disk, one file per name."""

    def __init__(self, folder: Path, shape: Sequence[int]) -> None:
        self.arrays, self.folder, self.shape = ArrayFolder(folder), folder, tuple(shape)

    def find(self, name: str) -> tuple[Tensor, Any] | None:
        """Return a tensor and its facts; None if it must be made, because it is missing or, as is logged, damaged."""
        found = self.arrays.find(name, self.shape)
        return None if found is None else (torch.from_numpy(found[0]).clone(), found[1])

    def read(self, name: str, what: str) -> Tensor:
        """Return a tensor; raise `DataError`, which says of `what` it is, if it cannot be used."""
        try:
            # A copy, because matrix products may sum in another order where memory is aligned in another way.
            return torch.from_numpy(self.arrays.read(name, self.shape)[0]).clone()
        except StoredError as error:
            raise DataError(
                f"{self.arrays.path_of(name)}: the cached {what} cannot be used, {error}; run the same command again "
                "to make it; several machines need a shared folder, or ldm.latents.cache: memory"
            ) from None

    def write(self, name: str, what: str, tensor: Tensor, facts: Any = None) -> None:
        """Write a tensor and its facts atomically."""
        try:
            self.arrays.write(name, tensor.numpy(), facts)
        except OSError as error:
            raise DataError(
                f"{self.folder}: the {what} could not be written ({error}); free some space, or set "
                "ldm.latents.cache: memory"
            ) from None


class LatentFolder:
    """The latents of one autoencoder and one reading of the data, each (C, D, H, W).

    Files are named by the hash of the volume's file, so a changed volume is a cache miss. `copies_scale` says whether
    augmented copies are scaled, besides turned and moved.
    """

    def __init__(self, folder: Path, shape: Sequence[int], copies_scale: bool = True) -> None:
        self.cache = TensorCache(folder, shape)
        self.folder, self.copies_scale = folder, copies_scale

    def path_of(self, file: VolumeFile, copy: int = 0) -> Path:
        """Return the path of a volume's latent, or of that of an augmented copy."""
        return self.cache.arrays.path_of(self._name(file, copy))

    def find(self, file: VolumeFile, copy: int = 0) -> tuple[Tensor, LatentFacts] | None:
        """Return a volume's latent and its facts, or None if it is missing or damaged and must be encoded."""
        found = self.cache.find(self._name(file, copy))
        return None if found is None else (found[0], LatentFacts.from_row(found[1]))

    def write(self, file: VolumeFile, mean: Tensor, facts: LatentFacts, copy: int = 0) -> None:
        """Write one latent atomically."""
        self.cache.write(self._name(file, copy), _what(file), mean, facts.to_row())

    def read(self, file: VolumeFile, copy: int = 0) -> Tensor:
        """Return the mean of a volume's latent, or of that of an augmented copy."""
        return self.cache.read(self._name(file, copy), _what(file))

    def _name(self, file: VolumeFile, copy: int) -> str:
        digest = digest_of(file)[:32]
        if copy == 0:
            return digest
        return f"{digest}_{copy}" if self.copies_scale else f"{digest}_{copy}_same_size"


def digest_of(file: VolumeFile) -> str:
    """Return the hash of a volume's file."""
    return file.digest or content_digest(file.path)


def _what(file: VolumeFile) -> str:
    return f"latent of {printable(file.name)}"
