"""Keeps latents on disk, as mean and sigma.

A sampled latent is never kept: training would see the same noise in every pass.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.formats import content_digest
from data.volumes import VolumeFile
from settings import DataError, DataSettings
from storage.atomic import replacing
from storage.names import printable

# Part of the key: change it whenever the same volume and weights would be stored differently.
VERSION = 1

Moments = tuple[Tensor, Tensor]
"""Mean and sigma of one volume's latent, each float32 (C, D, H, W)."""


@dataclass(frozen=True)
class LatentFacts:
    """What stage 2 needs to know about a volume without reading its latent.

    Sums run over the latent's elements, in float64. `spacing_mm` is that of the network's grid; `lower` and `upper` are
    the intensities of each channel that map to the ends of the network's range.
    """

    sum_mean: float
    sum_squared_mean: float
    sum_squared_sigma: float
    spacing_mm: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]

    def to_row(self) -> list[float]:
        """Return the facts as a flat list of numbers, which processes can exchange."""
        sums = [self.sum_mean, self.sum_squared_mean, self.sum_squared_sigma]
        return [*sums, *self.spacing_mm, *self.lower, *self.upper]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> LatentFacts:
        """Return the facts from the numbers of `to_row`."""
        channels = (len(row) - 6) // 2
        spacing_mm, lower, upper = row[3:6], row[6 : 6 + channels], row[6 + channels :]
        return cls(row[0], row[1], row[2], tuple(spacing_mm), tuple(lower), tuple(upper))


def facts_of(
    moments: Moments, spacing_mm: Sequence[float], lower: Sequence[float], upper: Sequence[float]
) -> LatentFacts:
    """Return the facts of one latent."""
    mean, sigma = (part.double() for part in moments)
    sums = (float(mean.sum()), float(mean.square().sum()), float(sigma.square().sum()))
    return LatentFacts(*sums, tuple(map(float, spacing_mm)), tuple(lower), tuple(upper))


def latent_key(s: DataSettings, weights: str, precision: str) -> str:
    """Return a hash of everything a latent depends on besides its volume: weights, precision, reading of the data."""
    reading = s.reading({"orientation", "spacing", "voxel_size", "resize", "intensity"})
    if s.frame is not None:
        reading["frame"] = s.frame
    parts = json.dumps([VERSION, weights, precision, reading], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:24]


class LatentFolder:
    """One safetensors file per volume, named by the hash of the volume's file, so a changed volume is a cache miss."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path_of(self, file: VolumeFile) -> Path:
        """Return the path of a volume's latent."""
        return self.folder / f"{(file.digest or content_digest(file.path))[:32]}.safetensors"

    def facts(self, file: VolumeFile) -> LatentFacts | None:
        """Return the facts of a volume's latent, or None if the latent is missing or damaged and must be encoded."""
        try:
            with safe_open(self.path_of(file), framework="pt") as content:
                return LatentFacts.from_row(json.loads((content.metadata() or {})["facts"]))
        except (OSError, SafetensorError, LookupError, ValueError):
            return None

    def write(self, file: VolumeFile, moments: Moments, facts: LatentFacts) -> None:
        """Write one latent atomically."""
        metadata = {"facts": json.dumps(facts.to_row()), "volume": printable(file.name)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self.path_of(file)) as temporary:
                save_file({"mean": moments[0].contiguous(), "sigma": moments[1].contiguous()}, temporary, metadata)
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{self.folder}: the latent of {printable(file.name)} could not be written ({error}); free some space, "
                "or set ldm.latents.cache: memory"
            ) from None

    def read(self, file: VolumeFile) -> Moments:
        """Return the mean and sigma of a volume's latent."""
        path = self.path_of(file)
        try:
            content = load_file(path)
            return content["mean"], content["sigma"]
        except (OSError, SafetensorError, KeyError):
            raise DataError(
                f"{path}: the cached latent of {printable(file.name)} is missing or damaged; run the same command "
                "again to encode it; several machines need a shared folder, or ldm.latents.cache: memory"
            ) from None
