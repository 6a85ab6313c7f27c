"""The keys of `ldm.conditioning`: what samples are conditioned on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from settings.conditioning.scan import UNKNOWN_MODALITY, ScanSettings
from settings.data import IntensitySettings
from settings.section import FREE, LARGEST_AXIS, WITHOUT_NUL, Count, PathText, Section, Triple, key, section

_SOURCE = (
    "a folder whose files have the names of the volumes, a CSV file with columns file and {column}, or key:NAME of "
    "data.source's dataset.json"
)


TARGET = "target"
"""The source of condition volumes that are made from the volumes to learn."""

NUM_HOLES = 4
"""Different boxes that are cut out of each volume, in turn from pass to pass."""

MAX_CATEGORIES = 16
"""Room for different words in each categorical column."""

Sizes = Annotated[
    tuple[Annotated[int, Field(ge=1, le=LARGEST_AXIS)], ...], Field(strict=False, min_length=3, max_length=3)
]


class DegradeSettings(Section):
    """What a condition that is made from its target lacks."""

    downsample: Triple = key(
        (1, 1, 1), "Voxels that are averaged to one along each axis; the network learns to undo it."
    )
    hole: Sizes | PathText | None = key(
        None,
        "Size in voxels of a box that is cut out, and that the network learns to fill, at 4 different places in turn; "
        f"or masks of what is cut out, above 0 there: {_SOURCE.format(column='hole')}; null: nothing.",
    )

    @property
    def has_hole(self) -> bool:
        """Return whether a box is cut out."""
        return isinstance(self.hole, tuple)

    @property
    def masks(self) -> str | None:
        """Return where the masks of what is cut out are, if it is not a box."""
        return self.hole if isinstance(self.hole, str) else None

    @property
    def box(self) -> tuple[int, ...]:
        """Return the size of the box that is cut out."""
        assert isinstance(self.hole, tuple), "no box is cut out"
        return self.hole

    @property
    def variants(self) -> int:
        """Return the number of different conditions of one volume."""
        return NUM_HOLES if self.has_hole else 1


class VolumeSettings(Section):
    """Another volume of the same case, joined to the noisy latent with a channel that says which part is known."""

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
    def is_used(self) -> bool:
        """Return whether samples are conditioned on a volume."""
        return self.encoding != "none"

    @property
    def is_from_target(self) -> bool:
        """Return whether the condition is made from the volume to learn."""
        return self.is_used and self.source == TARGET

    @property
    def fills(self) -> bool:
        """Return whether a part of the condition is unknown, which samples fill."""
        return self.is_from_target and (self.degrade.hole is not None)

    def num_joined(self, latent_channels: int) -> int:
        """Return the number of channels that are joined to a noisy latent of `latent_channels` channels."""
        if not self.is_used:
            return 0
        if self.encoding == "resample":
            return 1 + self.num_channels
        return 1 + latent_channels


class LabelMapSettings(Section):
    """Label maps, joined to the noisy latent as the share of each label value in each voxel of the latent."""

    source: PathText | None = key(None, f"Label maps: {_SOURCE.format(column='label_map')}; null: none.", FREE)
    num_classes: int = key(
        0,
        "Number of label values, with the background: they run from 0 to one less; 0: no label maps.",
        ge=0,
        le=1024,
    )


Columns = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=100, pattern=WITHOUT_NUL)], ...],
    Field(strict=False, max_length=64),
]


class TabularSettings(Section):
    """Columns of a table, embedded and added to the embedding of the timestep."""

    table: PathText | None = key(None, "A CSV file with a column file and those named below; null: none.", FREE)
    continuous: Columns = key((), "Columns of numbers, such as age; standardised by the training volumes.")
    categorical: Columns = key((), "Columns of words, such as sex or scanner.")

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of all columns in the order of their code."""
        return (*self.continuous, *self.categorical)

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the length of each column's code: a value and whether it is given, or a place for each word."""
        return (2,) * len(self.continuous) + (MAX_CATEGORIES,) * len(self.categorical)


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
    def num_embedded_classes(self) -> int | None:
        """Return the number of classes or modalities that the U-Net embeds, with the hidden one; None without any."""
        if self.type == "class":
            return self.num_classes + 1
        return self.scan.num_modalities or None

    @property
    def hidden_class(self) -> int:
        """Return the number that stands for a hidden class or modality."""
        return self.num_classes if self.type == "class" else UNKNOWN_MODALITY

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the keys of the kinds of conditions in use that training hides from time to time."""
        used = {
            "ldm.conditioning.type": self.type == "class",
            "ldm.conditioning.label_map": self.label_map.num_classes > 0,
            "ldm.conditioning.volume": self.volume.is_used,
            "ldm.conditioning.tabular": bool(self.tabular.columns),
            "ldm.conditioning.scan": self.scan.num_modalities > 0,
        }
        return tuple(where for where, is_used in used.items() if is_used)

    @property
    def is_used(self) -> bool:
        """Return whether samples are conditioned on anything."""
        return bool(self.kinds)

    @property
    def needs_pairs(self) -> bool:
        """Return whether each volume needs more than its own file and its class."""
        return self.has_targets or bool(self.scan.columns)

    @property
    def has_targets(self) -> bool:
        """Return whether conditions say what a sample should look like, so that it can be compared with a volume."""
        return self.label_map.num_classes > 0 or self.volume.is_used or bool(self.tabular.columns)

    def num_joined(self, latent_channels: int) -> int:
        """Return the number of channels that are joined to a noisy latent of `latent_channels` channels."""
        return self.label_map.num_classes + self.volume.num_joined(latent_channels)
