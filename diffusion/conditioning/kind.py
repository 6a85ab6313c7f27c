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

import torch
from torch import Tensor

from data import DataSplit, VolumeFile
from data.loading import Pose
from data.partners import Row
from diffusion.conditioning.space import KnownVoxels, Space
from diffusion.latent_files import TensorCache, digest_of
from models.volume_codec import VolumeCodec
from runtime.cli.bars import ProgressBar
from runtime.files import LATENTS
from runtime.processes import Process
from settings import DataSettings, Settings
from settings.conditioning import ConditioningSettings, ConditionSection

Input = Literal["class_labels", "channels", "numbers", "scan"]
"""Inputs of the U-Net: an embedded class (B,), channels (B, C, D, H, W) that are concatenated to the noisy latent,
numbers (B, N) that are embedded together, and those that MAISI's U-Net embeds one by one."""

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
        entries = [(index, variant, 0) for index in range(len(self.files)) for variant in range(num_variants)]
        copies = range(1, 1 + self.num_copies)
        entries += [(index, copy, copy) for index in range(len(self.volumes.train)) for copy in copies]
        row_of = {(index, variant if copy == 0 else 0, copy): row for row, (index, variant, copy) in enumerate(entries)}

        def made(row: int) -> Tensor:
            index, variant, copy = entries[row]
            return make(index, variant, None if copy == 0 or self.pose is None else self.pose(index, copy))

        def name(row: int) -> str:
            index, variant, copy = entries[row]
            text = made_from(index, variant)
            if copy:
                scales = self.settings.ldm.conditioning.copies_scale
                text = f"{text} {digest_of(self.volumes.train[index])} {copy}" + ("" if scales else " same size")
            return hashlib.sha256(text.encode()).hexdigest()[:32]

        is_on_disk = self.settings.ldm.latents.cache == "disk"
        text = json.dumps(["condition", VERSION, key], sort_keys=True)
        folder = TensorCache(LATENTS / hashlib.sha256(text.encode()).hexdigest()[:24], shape)
        in_memory = torch.zeros(0 if is_on_disk else len(entries), *shape)
        with self.process.raise_on_all_ranks():
            rows = range(self.process.rank, len(entries), self.process.world_size)
            missing = [row for row in rows if not is_on_disk or folder.find(name(row)) is None]
            # Passed only to hide the bar, because an explicit disable=False would override --quiet.
            hidden: dict[str, Any] = {} if self.process.is_rank_zero and missing else {"disable": True}
            for row in ProgressBar(missing, desc=title, unit="volume", leave=False, **hidden):
                if is_on_disk:
                    folder.write(name(row), "condition", made(row))
                else:
                    in_memory[row] = made(row)
        if not is_on_disk:
            # One process fills each row and the others leave zeros.
            self.process.sum(in_memory)

        def read(index: int, variant: int, copy: int) -> Tensor:
            row = row_of[index, 0 if copy else variant % num_variants, copy]
            return folder.read(name(row), "condition") if is_on_disk else in_memory[row]

        return read


@dataclass(frozen=True)
class Prepared:
    """The conditions of one kind, ready to be read.

    `metadata` is stored with the trained weights because sampling needs it. `picture` returns a condition by its
    volume's index as (D, H, W) in [0, 1], and `known` what it knows of its target.
    """

    read: Read
    metadata: dict[str, Any] = field(default_factory=dict)
    picture: Callable[[int], Tensor] | None = None
    known: Callable[[int], KnownVoxels] | None = None


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
    options: ClassVar[Mapping[str, str]] = {}
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

    def takes(self, option: str) -> bool:
        """Return whether the run can use the files of one of the options."""
        return self.is_used

    def check_options(self, given: Mapping[str, str]) -> None:
        """Raise `UserError` if options are given, by their names, that do not go together."""
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
        nothing = torch.zeros(self.shape(asked.settings))

        def of_sample(sample: Sample) -> Tensor:
            return nothing if sample.case is None else sample.case.parts.get(self.name, nothing)

        return of_sample
