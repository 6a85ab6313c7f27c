"""The keys of `ldm.conditioning`: what samples are conditioned on, with a section for each kind but classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from settings.data import IntensitySettings, intensity_problems
from settings.errors import Problem, Problems
from settings.section import (
    FREE,
    WITHOUT_NUL,
    Channels,
    Count,
    PathText,
    PerAxis,
    Section,
    Triple,
    key,
    section,
    value_text,
)

if TYPE_CHECKING:
    from settings.root import Settings

LABEL_MAP, VOLUME, TABULAR = "ldm.conditioning.label_map", "ldm.conditioning.volume", "ldm.conditioning.tabular"
SCAN = "ldm.conditioning.scan"

_SOURCE = "a folder whose files have the names of the volumes, or a CSV file with columns file and {column}"


class ConditionSection(Section):
    """The keys of one kind of condition."""

    switch: ClassVar[str]
    """What is 0, none or empty unless samples are conditioned on it."""

    @property
    def is_used(self) -> bool:
        """Return whether samples are conditioned on it."""
        return getattr(self, self.switch) not in (0, "none", ())

    @property
    def is_ever_hidden(self) -> bool:
        """Return whether training hides it from time to time."""
        return self.is_used

    @property
    def embedded_numbers(self) -> dict[str, int]:
        """Return the names of what the U-Net embeds, with how many numbers each is."""
        return {}

    def num_concatenated(self, latent_channels: int) -> int:
        """Return the number of channels that are concatenated to a noisy latent of `latent_channels` channels."""
        return 0

    def problems(self, settings: Settings) -> Problems:
        """Yield each problem with the keys."""
        yield from ()


def _incomplete(where: str, **is_set: bool) -> Problems:
    """Yield a problem if only one of two keys that belong together is set."""
    given, missing = sorted(is_set, key=lambda name: not is_set[name])
    if is_set[given] and not is_set[missing]:
        others = (f"{where}.{given}",)
        yield Problem(f"{where}.{missing}", f"not set, and {given} is", "allowed: both or neither", "", others)


class LabelMapSettings(ConditionSection):
    """Label maps, concatenated to the noisy latent as the share of each label value in each voxel of the latent."""

    switch: ClassVar[str] = "num_classes"
    source: PathText | None = key(None, f"Label maps: {_SOURCE.format(column='label_map')}; null: none.", FREE)
    num_classes: Literal[0] | Annotated[int, Field(ge=2, le=1024)] = key(
        0, "Number of label values, with the background: they run from 0 to one less; 0: no label maps."
    )

    controlnet: Annotated[tuple[Channels, ...], Field(strict=False, max_length=8)] = key(
        (),
        "Not empty: the U-Net of ldm.pretrained stays frozen, and a ControlNet beside it, which sees the label maps at "
        "full resolution, is trained. The channels of its embedding, each after the first on half the grid, such as "
        "[8, 32, 64], down to the latent's.",
    )

    def num_concatenated(self, latent_channels: int) -> int:
        """Return the number of channels that are concatenated to a noisy latent."""
        return 0 if self.controlnet else self.num_classes

    def problems(self, settings: Settings) -> Problems:
        """Yield each problem with the keys."""
        yield from _incomplete(LABEL_MAP, source=self.source is not None, num_classes=self.is_used)
        if not self.controlnet:
            return
        where, given = f"{LABEL_MAP}.controlnet", list(self.controlnet)
        if not 2 <= self.num_classes <= 256:  # binary numbers of eight digits
            found, classes = f"{given} with {self.num_classes} label values", f"{LABEL_MAP}.num_classes"
            yield Problem(where, found, "allowed: 2 to 256", "change num_classes, or leave it out", (classes,))
        if settings.ldm.pretrained is None:
            remedy = "train a U-Net without it first, and set ldm.pretrained to its ldm.safetensors"
            yield Problem("ldm.pretrained", "null, and a ControlNet needs a U-Net to control", "", remedy, (where,))
        strides, others = settings.autoencoder.level_strides, ("autoencoder.strides", "autoencoder.num_channels")
        if not settings.autoencoder.has_stock_strides or len(given) != 1 + len(strides):
            found = f"{given}, and the autoencoder has strides of {list(map(list, strides))}"
            remedy = "set one number and one more for each halving, such as [8, 32, 64] for two"
            yield Problem(where, found, "allowed: strides of 2", remedy, others)


TARGET = "target"
"""The source of condition volumes that are made from the volumes to learn."""

NUM_HOLES = 4
"""Different boxes that are cut out of each volume, in turn from pass to pass."""


class DegradeSettings(Section):
    """What a condition that is made from its target lacks."""

    downsample: Triple = key(
        (1, 1, 1), "Voxels that are averaged to one along each axis; the network learns to undo it."
    )
    hole: PerAxis[Count] | PathText | None = key(
        None,
        "Size in voxels of a box that is cut out, and that the network learns to fill, at 4 different places in turn; "
        f"or masks of what is cut out, above 0 there: {_SOURCE.format(column='hole')}; null: nothing.",
    )

    @property
    def is_coarser(self) -> bool:
        """Return whether blocks of voxels are averaged."""
        return any(factor > 1 for factor in self.downsample)

    @property
    def box(self) -> tuple[int, ...] | None:
        """Return the size of the box that is cut out, if it is not a mask."""
        return self.hole if isinstance(self.hole, tuple) else None

    @property
    def variants(self) -> int:
        """Return the number of different conditions of one volume."""
        return 1 if self.box is None else NUM_HOLES


class VolumeSettings(ConditionSection):
    """Another volume of the same case, concatenated to the noisy latent with a channel of which part is known."""

    switch: ClassVar[str] = "encoding"
    encoding: Literal["none", "autoencoder", "resample"] = key(
        "none",
        "How a volume gets to the latent grid: encoded by the frozen autoencoder, or averaged as it is; none: unused.",
    )
    source: PathText | None = key(
        None,
        f"The other volumes: {_SOURCE.format(column='volume')}; or target: each is made from the volume to learn by "
        "degrade.",
        FREE,
    )
    num_channels: Count = key(1, "Channels of the other volumes.", le=1024)
    intensity: IntensitySettings = section(IntensitySettings, "Intensity scaling of the other volumes.")
    degrade: DegradeSettings = section(DegradeSettings, "What is taken from the target, if the source is target.")

    @property
    def is_from_target(self) -> bool:
        """Return whether the condition is made from the volume to learn."""
        return self.is_used and self.source == TARGET

    @property
    def has_hole(self) -> bool:
        """Return whether a part of the condition is unknown, which samples fill."""
        return self.is_from_target and self.degrade.hole is not None

    def num_concatenated(self, latent_channels: int) -> int:
        """Return the number of channels that are concatenated to a noisy latent."""
        if not self.is_used:
            return 0
        return 1 + (self.num_channels if self.encoding == "resample" else latent_channels)

    def problems(self, settings: Settings) -> Problems:
        """Yield each problem with the keys."""
        yield from _incomplete(VOLUME, source=self.source is not None, encoding=self.is_used)
        degrade, channels, grid = self.degrade, settings.autoencoder.in_channels, settings.data.voxel_size
        if self.is_used and not self.is_from_target:
            yield from intensity_problems(f"{VOLUME}.intensity", self.intensity, self.num_channels)
        if self.is_used and self.num_channels != channels and (self.encoding == "autoencoder" or self.is_from_target):
            found = f"{self.num_channels}, and autoencoder.in_channels is {channels}"
            keys = (f"{VOLUME}.encoding", f"{VOLUME}.source", "autoencoder.in_channels")
            yield Problem(f"{VOLUME}.num_channels", found, "", f"set {channels}", keys)
        if degrade.is_coarser + (degrade.hole is not None) != int(self.source == TARGET):
            hole = value_text(degrade.hole)
            found = f"downsample {list(degrade.downsample)} and hole {hole} with source {self.source}"
            remedy = "set one of them with source: target, and none with another source"
            yield Problem(f"{VOLUME}.degrade", found, "", remedy, (f"{VOLUME}.source",))
        if any(n % factor for n, factor in zip(grid, degrade.downsample, strict=True)):
            found = f"{list(degrade.downsample)} does not divide data.voxel_size {list(grid)}"
            yield Problem(f"{VOLUME}.degrade.downsample", found, "", "change one", ("data.voxel_size",))
        if degrade.box is not None and not all(size < n for size, n in zip(degrade.box, grid, strict=True)):
            found = f"{list(degrade.box)} is not smaller than data.voxel_size {list(grid)}"
            yield Problem(f"{VOLUME}.degrade.hole", found, "", "change one", ("data.voxel_size",))


MAX_CATEGORIES = 16
"""Room for different words in each categorical column."""

Column = Annotated[str, Field(min_length=1, max_length=100, pattern=WITHOUT_NUL)]
Columns = Annotated[tuple[Column, ...], Field(strict=False, max_length=64)]


class TabularSettings(ConditionSection):
    """Columns of a table, embedded and added to the embedding of the timestep."""

    switch: ClassVar[str] = "columns"
    table: PathText | None = key(None, "A CSV file with a column file and those named below; null: none.", FREE)
    continuous: Columns = key((), "Columns of numbers, such as age; standardised by the training volumes.")
    categorical: Columns = key((), "Columns of words, such as sex or scanner.")

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of all columns in the order of their code."""
        return (*self.continuous, *self.categorical)

    @property
    def embedded_numbers(self) -> dict[str, int]:
        """Return the length of each column's code: a value and whether it is given, or a place for each word."""
        return dict.fromkeys(self.continuous, 2) | dict.fromkeys(self.categorical, MAX_CATEGORIES)

    def problems(self, settings: Settings) -> Problems:
        """Yield each problem with the keys."""
        yield from _incomplete(TABULAR, table=self.table is not None, continuous=self.is_used)
        names = ["file", *(name.lower() for name in self.columns)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            found = f"column {twice} named twice"
            yield Problem(f"{TABULAR}.continuous", found, "", "take it out", (f"{TABULAR}.categorical",))


REGIONS = ("head", "chest", "abdomen", "pelvis")
"""The body regions that MAISI tells apart, in the order of its code."""

WIDTHS = {"top_region": len(REGIONS), "bottom_region": len(REGIONS), "spacing": 3}
"""The inputs in the order in which MAISI concatenates their embeddings, with the numbers that each takes."""

COLUMNS = ("top_region", "bottom_region")
"""The columns of a table of regions, named as the inputs."""

NUM_MODALITIES = 128
"""The modalities that MAISI's U-Net tells apart."""

TopAndBottom = Annotated[tuple[Literal[REGIONS], ...], Field(strict=False, min_length=2, max_length=2)]  # type: ignore[valid-type]


class ScanSettings(ConditionSection):
    """Spacing, regions and modality of a scan, in MAISI's way: embeddings concatenated to that of the timestep."""

    regions: TopAndBottom | PathText | None = key(
        None,
        "Body regions at the upper and the lower end of all volumes, such as [chest, abdomen], or a CSV file with "
        "columns file, top_region and bottom_region; null: the U-Net has no such inputs.",
    )
    modality: Annotated[int, Field(ge=0, lt=NUM_MODALITIES)] | None = key(
        None,
        "The volumes' modality; MAISI's: 0 unknown, 1 CT, 2 without contrast, 3 with contrast, 8 MR, 9 T1, 10 T2; "
        "null: the U-Net has no such input. With regions or a modality it also takes the voxel spacing.",
    )

    @property
    def is_used(self) -> bool:
        """Return whether samples are conditioned on it."""
        return self.regions is not None or self.modality is not None

    @property
    def is_ever_hidden(self) -> bool:
        """Return whether training hides it: the modality, not the rest."""
        return self.modality is not None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the inputs that the U-Net has, in MAISI's order."""
        return tuple(name for name in WIDTHS if (self.is_used if name == "spacing" else self.regions is not None))

    @property
    def table(self) -> str | None:
        """Return the file with the regions of each volume, if they differ."""
        return self.regions if isinstance(self.regions, str) else None

    @property
    def width(self) -> int:
        """Return how many numbers the U-Net takes for all inputs together."""
        return sum(WIDTHS[name] for name in self.inputs)

    def problems(self, settings: Settings) -> Problems:
        """Yield each problem with the keys."""
        if self.modality is not None and settings.ldm.conditioning.type == "class":
            found, remedy = f"{self.modality} with type class, which uses the same embedding", "set null, or type: none"
            yield Problem(f"{SCAN}.modality", found, "allowed: null", remedy, ("ldm.conditioning.type",))


class ConditioningSettings(Section):
    """What samples are conditioned on: any combination of a class and the subsections."""

    type: Literal["none", "class"] = key("none", "Whether samples are conditioned on the class of their volume.")
    num_classes: int = key(0, "Number of classes in the data; required if the type is class.", ge=0, le=65_536)
    dropout: float = key(
        0.1, "Fraction of the conditions of each kind hidden in training; guidance needs it.", ge=0, lt=1
    )
    label_map: LabelMapSettings = section(LabelMapSettings, "Label maps as conditions.")
    volume: VolumeSettings = section(VolumeSettings, "Other volumes as conditions.")
    tabular: TabularSettings = section(TabularSettings, "Columns of a table as conditions.")
    scan: ScanSettings = section(ScanSettings, "Spacing, body regions and modality, as MAISI's U-Net takes them.")

    @property
    def sections(self) -> dict[str, ConditionSection]:
        """Return the sections of all kinds by their keys."""
        sections = {f"ldm.conditioning.{name}": getattr(self, name) for name in type(self).model_fields}
        return {where: value for where, value in sections.items() if isinstance(value, ConditionSection)}

    @property
    def num_embedded_classes(self) -> int | None:
        """Return the number of classes or modalities that the U-Net embeds, with the hidden one; None without any."""
        if self.type == "class":
            return self.num_classes + 1
        return None if self.scan.modality is None else NUM_MODALITIES

    @property
    def hidden_class(self) -> int:
        """Return the number that stands for a hidden class or modality."""
        return self.num_classes if self.type == "class" else 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the keys of the kinds of conditions in use that training hides from time to time."""
        classes = ("ldm.conditioning.type",) if self.type == "class" else ()
        return (*classes, *(where for where, section in self.sections.items() if section.is_ever_hidden))

    @property
    def is_used(self) -> bool:
        """Return whether samples are conditioned on anything."""
        return bool(self.kinds)

    @property
    def always_given(self) -> tuple[str, ...]:
        """Return the keys of the kinds without which the network never predicted in training.

        Beside a ControlNet there is a U-Net that knows nothing of its label maps.
        """
        if self.dropout:
            return ()
        return tuple(where for where in self.kinds if where != LABEL_MAP or not self.label_map.controlnet)

    @property
    def copies_scale(self) -> bool:
        """Return whether augmented copies may be scaled: a number, such as a volume in ml, would contradict them."""
        return not self.tabular.continuous

    @property
    def comes_from_volumes(self) -> bool:
        """Return whether samples have the conditions of certain volumes, not only a class."""
        return any(section.is_used for section in self.sections.values())

    @property
    def describes_volumes(self) -> bool:
        """Return whether conditions say what a sample should look like, so that it can be compared with a volume."""
        return any(section.is_used for section in self.sections.values() if section is not self.scan)

    @property
    def embedded_numbers(self) -> dict[str, int]:
        """Return the names of what the U-Net embeds, such as tabular.age, with how many numbers each is."""
        return {
            f"{where.removeprefix('ldm.conditioning.')}.{name}": width
            for where, section in self.sections.items()
            for name, width in section.embedded_numbers.items()
        }

    def num_concatenated(self, latent_channels: int) -> int:
        """Return the number of channels that are concatenated to a noisy latent of `latent_channels` channels."""
        return sum(section.num_concatenated(latent_channels) for section in self.sections.values())

    def problems(self, settings: Settings) -> Problems:
        """Yield each problem with the keys, and with the guidance of samples."""
        if self.type == "class" and self.num_classes < 2:
            found, remedy = f"{self.num_classes} with type class", "set the number of classes in the data"
            others = ("ldm.conditioning.type",)
            yield Problem("ldm.conditioning.num_classes", found, "allowed: 2 or more", remedy, others)
        for part in self.sections.values():
            yield from part.problems(settings)
        scale, where = settings.ldm.sampling.guidance_scale, "ldm.sampling.guidance_scale"
        if scale != 1 and not self.kinds:
            found = f"{scale:g} with conditioning type none, so there is no class to follow"
            yield Problem(where, found, "allowed: 1", "set 1", ("ldm.conditioning.type",))
        elif scale != 1 and self.always_given:
            found = f"{scale:g} with conditioning dropout 0, so the network never learns to predict without a condition"
            sources = (*self.always_given, "ldm.conditioning.dropout")
            yield Problem(where, found, "allowed: 1", "set 1, or a dropout above 0", sources)
