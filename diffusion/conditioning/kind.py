"""What a kind of condition is: one class that finds, checks, prepares, reads, hides and stores it.

A kind is one tensor of a batch, by its name in `ConditionBatch.parts`, and belongs to one input of the U-Net, which may
take others too. Its keys are in `settings/conditioning.py`, and `KINDS` in `diffusion/conditioning` lists it.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from data import DataSplit, VolumeFile
from data.geometry import Geometry
from data.loading import Pose, on_file_grid
from data.partners import Row
from diffusion.latent_files import TensorCache, digest_of
from models.volume_codec import VolumeCodec
from runtime.cli import ProgressBar
from runtime.files import LATENTS
from runtime.processes import Process
from settings import DataSettings, Settings
from settings.conditioning import ConditioningSettings, ConditionSection

Input = Literal["class_labels", "channels", "numbers", "scan", "control"]
"""Inputs of the U-Net: an embedded class (B,), channels (B, C, D, H, W) that are concatenated to the noisy latent,
numbers (B, N) that are embedded together, those that MAISI's U-Net embeds one by one, and what a ControlNet sees."""

Make = Callable[[int, int, Pose | None], Tensor]
"""Returns the condition of a volume by its index and the number of its variant, in a pose: float32 (C, D, H, W)."""

Read = Callable[[int, int, int], Tensor]
"""Returns the condition of a volume by its index, the pass over the volumes and the number of the augmented copy."""

# Part of the cache's key: change it whenever the same file and settings would be stored differently.
VERSION = 4


@dataclass(frozen=True)
class Partners:
    """What volumes are paired with, training volumes first: files by their role, and rows of a table."""

    files: Mapping[str, tuple[VolumeFile, ...]] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Preparation:
    """What conditions are prepared with. `learned` has what was stored with trained weights; None before training.

    Each training volume has `num_copies` augmented copies, numbered from 1, and `pose` returns the pose of one by the
    volume's index and its own.
    """

    settings: Settings
    volumes: DataSplit
    process: Process
    codec: VolumeCodec
    learned: Mapping[str, Any] | None = None
    num_copies: int = 0
    pose: Callable[[int, int], Pose] | None = None

    @property
    def files(self) -> tuple[VolumeFile, ...]:
        """Return all volumes, training volumes first."""
        return (*self.volumes.train, *self.volumes.val)

    def cached(
        self,
        make: Make,
        made_from: Callable[[int, int], str],
        shape: Sequence[int],
        key: Any,
        title: str,
        num_variants: int = 1,
    ) -> Read:
        """Make the conditions that are not cached yet, shared among the processes, and return how to read them.

        `made_from` says what the condition of a volume is made from, by its index and its variant, and `key` has all
        settings that decide the result. The variant changes from pass to pass, and each augmented copy is another one.
        They are on disk with `ldm.latents.cache: disk`, and otherwise in memory: they are about as large as latents.
        """
        copies = range(1, 1 + self.num_copies)
        entries = [(index, variant, 0) for index in range(len(self.files)) for variant in range(num_variants)]
        entries += [(index, copy, copy) for index in range(len(self.volumes.train)) for copy in copies]

        def name(index: int, variant: int, copy: int) -> str:
            text = made_from(index, variant)
            if copy:
                scales = self.settings.ldm.conditioning.copies_scale
                text = f"{text} {digest_of(self.volumes.train[index])} {copy}" + ("" if scales else " same size")
            return hashlib.sha256(text.encode()).hexdigest()[:32]

        text = json.dumps(["condition", VERSION, key], sort_keys=True)
        place = LATENTS / hashlib.sha256(text.encode()).hexdigest()[:24]
        cache = TensorCache(place, shape, name, () if self.settings.ldm.latents.cache == "disk" else entries)
        with self.process.raise_on_all_ranks():
            share = entries[self.process.rank :: self.process.world_size]
            missing = [entry for entry in share if cache.find(*entry) is None]
            is_hidden = not (self.process.is_rank_zero and missing)
            for entry in ProgressBar(missing, desc=title, unit="volume", leave=False, disable=is_hidden):
                index, variant, copy = entry
                pose = None if copy == 0 or self.pose is None else self.pose(index, copy)
                cache.write("condition", make(index, variant, pose), *entry)
        cache.share(self.process)
        return lambda index, variant, copy: cache.read("condition", index, copy or variant % num_variants, copy)


def block_means(image: Tensor, factors: Sequence[int]) -> Tensor:
    """Average blocks of `factors` voxels of a (C, D, H, W) volume."""
    return F.avg_pool3d(image[None], tuple(factors), tuple(factors))[0]


def filled(image: Tensor, unknown: Tensor) -> Tensor:
    """Return a volume (C, D, H, W) whose known voxels go on smoothly where it is `unknown`, bool (D, H, W).

    There it has means of known voxels, interpolated from the finest grid that has any. If nothing is known, it is 0.
    """
    if not unknown.any() or unknown.all():
        return image.masked_fill(unknown, 0.0)
    d, h, w = unknown.shape
    size = ((d + 1) // 2, (h + 1) // 2, (w + 1) // 2)
    share = F.adaptive_avg_pool3d((~unknown)[None].float(), size)
    means = F.adaptive_avg_pool3d(image.masked_fill(unknown, 0.0), size) / share.clamp_min(torch.finfo().tiny)
    coarse = filled(means, share[0] == 0)
    finer = F.interpolate(coarse[None], size=image.shape[1:], mode="trilinear", align_corners=False)[0]
    return image.where(~unknown, finer)


@dataclass(frozen=True)
class KnownVoxels:
    """What is known of a volume: all but where `unknown`, bool (D, H, W), is True, or the means of blocks of `factors`.

    Without either nothing is.
    """

    unknown: Tensor | None = None
    factors: tuple[int, ...] = (1, 1, 1)

    def kept_in(self, sample: Tensor, known: Tensor) -> Tensor:
        """Return a sample (C, D, H, W) with what is known: `known` is the target, or the means of its blocks.

        In a hole, what the sample lacks around it goes on smoothly, so that no step is left at its border.
        """
        if self.unknown is not None:
            return (sample + filled(known - sample, self.unknown)).where(self.unknown, known)
        if max(self.factors) == 1:
            return sample
        means = block_means(known, self.factors) if known.shape == sample.shape else known
        missing = means - block_means(sample, self.factors)
        for axis, factor in enumerate(self.factors, start=1):
            missing = missing.repeat_interleave(factor, dim=axis)
        return sample + missing


NOTHING_KNOWN = KnownVoxels()


@dataclass(frozen=True)
class Space:
    """Where a condition from the command line lies, which its samples are written in: grid, affine, intensities.

    `lower` and `upper` are its intensities if its samples have the same, as they have if it is made from its target.
    Then `voxels` (C, X, Y, Z) are those of its file, and samples keep what is `known`, on the file's axes. With a hole,
    `on_grid` has what is known on the network's grid, and the condition there in [0, 1].
    """

    geometry: Geometry
    lower: tuple[float, ...] | None = None
    upper: tuple[float, ...] | None = None
    voxels: np.ndarray | None = None
    known: KnownVoxels = NOTHING_KNOWN
    on_grid: tuple[KnownVoxels, Tensor] | None = None

    def restored(self, unit: np.ndarray, lower: tuple[float, ...], upper: tuple[float, ...]) -> np.ndarray:
        """Return a sample (C, D, H, W) in [0, 1] on the file's grid; `lower` and `upper` are the training set's."""
        if self.on_grid is not None:
            known, image = self.on_grid
            unit = known.kept_in(torch.from_numpy(unit), image).clamp(0, 1).numpy()
        result = on_file_grid(unit * 2 - 1, self.geometry, self.lower or lower, self.upper or upper)
        if self.voxels is None:
            return result
        if self.known.unknown is not None:
            return np.where(self.known.unknown.numpy(), result, self.voxels)
        return self.known.kept_in(torch.from_numpy(result), torch.from_numpy(self.voxels)).numpy()

    def shown(
        self, restored: np.ndarray, lower: tuple[float, ...], upper: tuple[float, ...]
    ) -> tuple[Tensor, tuple[float, ...], tuple[int, ...] | None]:
        """Return the first channel of what `restored` returned for a picture, (D, H, W) in [0, 1], and its spacing.

        The third result is a voxel amid those that were unknown; None if there were none.
        """
        low, high = (np.float32(ends[0]) for ends in (self.lower or lower, self.upper or upper))
        unit = (self.geometry.oriented(restored)[0] - low) / np.maximum(high - low, np.finfo(np.float32).tiny)
        spacing_mm = np.linalg.norm(self.geometry.affine[:3, list(self.geometry.axes)], axis=0)
        at, unknown = None, self.known.unknown
        if unknown is not None and unknown.any():
            places = np.argwhere(self.geometry.oriented(unknown.numpy()[None])[0])
            distances = np.square(places - places.mean(axis=0)).sum(axis=1)
            at = tuple(places[distances.argmin()].tolist())
        return torch.from_numpy(unit.clip(0, 1)), tuple(spacing_mm.tolist()), at


@dataclass(frozen=True)
class Prepared:
    """The conditions of one kind, ready to be read.

    `metadata` is stored with the trained weights because sampling needs it. `picture` returns a condition by its
    volume's index as (D, H, W) in [0, 1], shown as what the kind is called or `shown_as`, and `known` what it knows of
    its target.
    """

    read: Read
    metadata: dict[str, Any] = field(default_factory=dict)
    picture: Callable[[int], Tensor] | None = None
    known: Callable[[int], KnownVoxels] | None = None
    shown_as: str | None = None


@dataclass(frozen=True)
class Case:
    """Files of one name from the command line: a tensor for each kind that has one, and the space that they lie in.

    `digest` is the hash of its files, which tells it from another case of the same name.
    """

    name: str
    parts: Mapping[str, Tensor]
    space: Space
    digest: str


@dataclass(frozen=True)
class Asked:
    """What the command line says: a class of `class_names`, files or folders by option, and texts such as 63 by name.

    `learned` is as in `Preparation`.
    """

    settings: Settings
    learned: Mapping[str, Any]
    class_names: Sequence[str] = ()
    class_name: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One sample that the command line asks for: its position, the spacing of its grid, and its case, if it has one."""

    position: int
    spacing_mm: Sequence[float]
    case: Case | None = None


class ConditionKind(ABC):
    """One kind of condition."""

    name: ClassVar[str]
    section: ClassVar[str]
    """The section of `ldm.conditioning` with its keys."""
    unet_input: ClassVar[Input]
    all_options: ClassVar[Mapping[str, str]] = {}
    """Options of scripts/sample.py that name files, with what these are."""

    def __init__(self, s: ConditioningSettings) -> None:
        self.s = s

    @property
    def keys(self) -> ConditionSection:
        """Return its section of the settings."""
        return self.s.sections[f"ldm.conditioning.{self.section}"]

    @property
    def is_used(self) -> bool:
        """Return whether samples are conditioned on it."""
        return self.keys.is_used

    def shape(self, settings: Settings) -> tuple[int, ...]:
        """Return the shape of the condition of one sample."""
        if self.unet_input == "channels":
            return (self.keys.num_concatenated(settings.autoencoder.latent_channels), *settings.latent_shape[1:])
        return (sum(self.keys.embedded_numbers.values()),)

    def find(self, files: Sequence[VolumeFile], data: DataSettings, problems: list[str]) -> Partners:
        """Find and check what the volumes are paired with; append a line to `problems` for each problem."""
        return Partners()

    @property
    def options(self) -> Mapping[str, str]:
        """Return those of its options whose files the run can use."""
        return self.all_options

    @abstractmethod
    def prepare(self, partners: Partners, run: Preparation) -> Prepared:
        """Make what is not cached yet, and return how to read it."""

    @property
    def num_encodings(self) -> int:
        """Return how often the frozen autoencoder encodes the condition of one volume."""
        return 0

    # Hiding, for guidance. Hidden channels and numbers are zeros, which no condition that is given can be: the shares
    # of label values add up to 1, a volume comes with a channel that says where it is known, and a number with a 1.

    @property
    def draws(self) -> tuple[str, ...]:
        """Return the names of the random draws that hide it in training; empty if it is never hidden."""
        numbers = tuple(f"number {name}" for name in self.keys.embedded_numbers)
        return numbers if self.unet_input == "numbers" else (self.name,)

    def hidden(self, part: Tensor) -> Tensor:
        """Return a condition of the same shape that says nothing."""
        return torch.zeros_like(part)

    def some_hidden(self, part: Tensor, is_hidden: Callable[[str], Tensor]) -> Tensor:
        """Hide the samples for which `is_hidden` returns True, by the name of a draw; each number by itself."""
        widths = list(self.keys.embedded_numbers.values()) if self.unet_input == "numbers" else [part.shape[1]]
        shown = [
            columns * (~is_hidden(draw)).view(-1, *[1] * (part.ndim - 1))
            for draw, columns in zip(self.draws, part.split(widths, dim=1), strict=True)
        ]
        return shown[0] if len(shown) == 1 else torch.cat(shown, dim=1)

    # What is stored with the weights, and what the command line says.

    def learned(self, metadata: Mapping[str, Any], settings: Settings) -> Any:
        """Return what sampling needs from the metadata of trained weights; raise ValueError if it is wrong."""
        return None

    def read_files(
        self, paths: Mapping[str, Path], asked: Asked, codec: VolumeCodec | None
    ) -> tuple[Tensor, Space] | None:
        """Return the condition of a case and its space, from files by option; None without such files."""
        return None

    def number_names(self, asked: Asked) -> Sequence[str]:
        """Return the names that --number may give."""
        return ()

    def from_command_line(self, asked: Asked, has_cases: bool) -> Callable[[Sample], Tensor]:
        """Return what gives the condition of each sample; raise `UserError` for what is wrong or missing."""
        nothing = self.hidden(torch.zeros(self.shape(asked.settings)))
        return lambda sample: nothing if sample.case is None else sample.case.parts.get(self.name, nothing)
