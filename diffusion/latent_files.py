"""Keeps the means of latents on disk, and what else is made once on the latent grid."""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from data.formats import content_digest
from data.volumes import VolumeFile
from models.weight_files import read_tensors, write_tensors
from runtime.files.names import printable
from runtime.files.reading import reason
from runtime.files.run_folder import used_caches
from settings import DataError, DataSettings

log = logging.getLogger(__name__)

# Part of the key: change it whenever the same volume and weights would be stored differently.
VERSION = 3


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
    """Tensors of known shapes on disk, one file per name.

    Each file holds its checksum and its place, so one that was changed, damaged or moved is noticed. Its folder must be
    named after everything that its tensors depend on besides their name.
    """

    def __init__(self, folder: Path, shapes: dict[str, Sequence[int]]) -> None:
        self.folder = folder
        used_caches.add(folder)
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}

    def path_of(self, name: str) -> Path:
        """Return the path of a file."""
        return self.folder / f"{name}.safetensors"

    def find(self, name: str, what: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """Return tensors and texts; None if they must be made, because the file is missing or, as logged, damaged."""
        try:
            return self._read(name, what)
        except FileNotFoundError:
            return None
        except _UnusableError as error:
            log.warning("%s: the cached %s cannot be used, %s; it is made again", self.path_of(name), what, error)
            return None

    def read(self, name: str, what: str) -> dict[str, Tensor]:
        """Return the tensors; raise `DataError`, which says of `what` they are, if they cannot be used."""
        try:
            return self._read(name, what)[0]
        except (FileNotFoundError, _UnusableError) as error:
            found = "it is missing" if isinstance(error, FileNotFoundError) else str(error)
            raise DataError(
                f"{self.path_of(name)}: the cached {what} cannot be used, {found}; run the same command again to make "
                "it; several machines need a shared folder, or ldm.latents.cache: memory"
            ) from None

    def write(self, name: str, what: str, tensors: dict[str, Tensor], texts: dict[str, str]) -> None:
        """Write tensors and texts atomically."""
        path = self.path_of(name)
        tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
        texts = {**texts, "place": _place(path)}
        try:
            write_tensors(path, tensors, {**texts, "checksum": _checksum(tensors, texts)})
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{self.folder}: the {what} could not be written ({error}); free some space, or set "
                "ldm.latents.cache: memory"
            ) from None

    def _read(self, name: str, what: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        path = self.path_of(name)
        try:
            tensors, texts = read_tensors(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DataError(
                f"{path}: the cached {what} cannot be read ({reason(error)}); make it readable, move {self.folder} "
                "away, or set ldm.latents.cache: memory"
            ) from None
        except SafetensorError:
            raise _UnusableError("it is damaged") from None
        if texts.pop("checksum", None) != _checksum(tensors, texts):
            raise _UnusableError("its content does not match its checksum")
        if texts.get("place") != _place(path) or {key: part.shape for key, part in tensors.items()} != self.shapes:
            raise _UnusableError("it holds something else")
        return tensors, texts


class _UnusableError(Exception):
    """A file of the cache is not what was written there; the text says what is wrong with it."""


def _place(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _checksum(tensors: dict[str, Tensor], texts: dict[str, str]) -> str:
    digest = zlib.crc32(json.dumps(sorted(texts.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), digest)
        digest = zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, digest)
    return f"{digest:08x}"


class LatentFolder:
    """The latents of one autoencoder and one reading of the data, each (C, D, H, W).

    Files are named by the hash of the volume's file, so a changed volume is a cache miss. `copies_scale` says whether
    augmented copies are scaled, besides turned and moved.
    """

    def __init__(self, folder: Path, shape: Sequence[int], copies_scale: bool = True) -> None:
        self.cache = TensorCache(folder, {"mean": shape})
        self.folder, self.shape, self.copies_scale = folder, tuple(shape), copies_scale

    def path_of(self, file: VolumeFile, copy: int = 0) -> Path:
        """Return the path of a volume's latent, or of that of an augmented copy."""
        return self.cache.path_of(self._name(file, copy))

    def facts(self, file: VolumeFile, copy: int = 0) -> LatentFacts | None:
        """Return the facts of a volume's latent, or None if the latent is missing or damaged and must be encoded."""
        content = self.cache.find(self._name(file, copy), _what(file))
        return None if content is None else LatentFacts.from_row(json.loads(content[1]["facts"]))

    def write(self, file: VolumeFile, mean: Tensor, facts: LatentFacts, copy: int = 0) -> None:
        """Write one latent atomically."""
        texts = {"facts": json.dumps(facts.to_row()), "volume": printable(file.name)}
        self.cache.write(self._name(file, copy), _what(file), {"mean": mean}, texts)

    def read(self, file: VolumeFile, copy: int = 0) -> Tensor:
        """Return the mean of a volume's latent, or of that of an augmented copy."""
        return self.cache.read(self._name(file, copy), _what(file))["mean"]

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
