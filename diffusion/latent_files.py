"""Latents of volumes, kept as mean and sigma: on disk or in memory, and batches of them addressed by step.

Never a sampled latent: its noise would be baked in and seen again at every pass.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.checking import content_digest
from data.volumes import VolumeFile
from settings import DataError, DataSettings
from storage.names import printable

# Part of the key: change it whenever the same volume and weights would be stored in another way.
VERSION = 1

Moments = tuple[Tensor, Tensor]
"""Mean and sigma of one volume's latent, each float32 (C, D, H, W)."""


@dataclass(frozen=True)
class LatentFacts:
    """What stage 2 wants to know of a volume without reading its latent.

    Sums over the latent's elements, in float64; spacing of the network's grid; the intensities of each channel that map
    to the ends of the network's range.
    """

    sum_mean: float
    sum_squared_mean: float
    sum_squared_sigma: float
    spacing_mm: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]

    def to_row(self) -> list[float]:
        """Return the numbers in a row, which processes can exchange."""
        sums = [self.sum_mean, self.sum_squared_mean, self.sum_squared_sigma]
        return [*sums, *self.spacing_mm, *self.lower, *self.upper]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> LatentFacts:
        """Return the facts that `to_row` wrote."""
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
    """Return a hash of what a latent depends on besides its volume: weights, precision, how volumes are read."""
    reading = s.model_dump(mode="json", include={"orientation", "spacing", "voxel_size", "resize", "intensity"})
    parts = json.dumps([VERSION, weights, precision, reading], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:24]


class LatentFolder:
    """One safetensors file per volume, named by the content of the volume's file: a changed volume is not found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path_of(self, file: VolumeFile) -> Path:
        """Return where the latent of a volume is kept."""
        return self.folder / f"{(file.digest or content_digest(file.path))[:32]}.safetensors"

    def facts(self, file: VolumeFile) -> LatentFacts | None:
        """Return the facts of a volume's latent, or None when it has to be encoded: absent or not whole."""
        try:
            with safe_open(self.path_of(file), framework="pt") as content:
                return LatentFacts.from_row(json.loads((content.metadata() or {})["facts"]))
        except (OSError, SafetensorError, LookupError, ValueError):
            return None

    def write(self, file: VolumeFile, moments: Moments, facts: LatentFacts) -> None:
        """Write one latent so that it is whole or absent, whatever interrupts."""
        path = self.path_of(file)
        temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp")
        metadata = {"facts": json.dumps(facts.to_row()), "volume": printable(file.name)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({"mean": moments[0].contiguous(), "sigma": moments[1].contiguous()}, temporary, metadata)
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise DataError(
                f"{self.folder}: the latent of {printable(file.name)} could not be written ({error}); make room, or "
                "set ldm.latents.cache: memory"
            ) from None

    def read(self, file: VolumeFile) -> Moments:
        """Return mean and sigma of a volume's latent."""
        path = self.path_of(file)
        try:
            content = load_file(path)
            return content["mean"], content["sigma"]
        except (OSError, SafetensorError, KeyError):
            raise DataError(
                f"{path}: the cached latent of {printable(file.name)} is gone or damaged; run the same command again, "
                "which encodes it anew; several machines need a shared folder, or ldm.latents.cache: memory"
            ) from None
