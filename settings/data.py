"""The source of the volumes and their preprocessing."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from runtime.files import counted
from settings.errors import Problem, Problems
from settings.section import FREE, SAME, WITHOUT_NUL, PathText, PerChannel, Section, Triple, TripleMm, key, section

Mode = Literal["percentile", "window"]
NUM_PHANTOMS = 48
PHANTOMS = re.compile(r"phantoms(?::([0-9]{1,6}))?")
LEAST_HELD_OUT = 2
"""Held-out volumes that evaluation needs."""
Pattern = Annotated[str, Field(min_length=1, max_length=1000, pattern=WITHOUT_NUL)]
Patterns = Annotated[tuple[Pattern, ...], Field(strict=False, max_length=1000)]


class IntensitySettings(Section):
    """The linear map from a volume's intensities to the network's range."""

    mode: Mode | PerChannel[Mode] = key(
        "percentile", "Percentiles of each volume, or a fixed window; or one per channel."
    )
    lower: float | PerChannel[float] = key(
        0.5, "Percentile or intensity mapped to the lower end: one number, or one per channel."
    )
    upper: float | PerChannel[float] = key(
        99.5, "Percentile or intensity mapped to the upper end: one number, or one per channel."
    )

    @property
    def num_rules(self) -> int:
        """Return the number of channels that have a rule of their own; 1: all have the same."""
        return max(len(value) if isinstance(value, tuple) else 1 for value in (self.mode, self.lower, self.upper))

    def of_channel(self, number: int) -> tuple[Mode, float, float]:
        """Return mode, lower and upper of one channel."""
        values: tuple[Any, ...] = (self.mode, self.lower, self.upper)
        mode, lower, upper = (value[number] if isinstance(value, tuple) else value for value in values)
        return mode, lower, upper


class DataSettings(Section):
    """The `data` section."""

    source: PathText = key(
        "phantoms",
        "A folder of volumes, an MSD-style dataset.json, or phantoms for 48 generated volumes (phantoms:320 for 320); "
        "a run resumes from another place if the volumes are the same.",
        FREE,
    )
    include: Patterns = key(
        (),
        'Patterns of the volumes to use, such as ["*FLAIR*"], matched with names below the source; empty: all.',
        FREE,
    )
    exclude: Patterns = key((), "Patterns of the volumes to leave out.", FREE)
    class_labels: PathText | None = key(
        None, "A CSV file with columns file,label; null: classes come from dataset.json or folder names."
    )
    group_by: Pattern | None = key(
        None,
        "How to tell which volumes belong to one patient, so that the split keeps them together: folder, column:NAME "
        "of data.class_labels, or a regular expression found in the file name; null: split volumes one by one.",
    )
    include_label_maps: bool = key(
        False, "Also train on files that look like label maps: whole numbers in regions of equal ones.", FREE
    )
    frame: Annotated[int, Field(ge=0, lt=2**31)] | None = key(
        None,
        "Which volume of a 4D file to read, counted from 0; null: its volumes are channels. They lie along the fourth "
        "axis, in .npy and .npz along the first.",
    )
    spacing: TripleMm | None = key(None, "Spacing to resample to first, in mm; null: keep each volume's spacing.")
    voxel_size: Triple = key((64, 64, 64), "Grid that each volume is resized to, in voxels.")
    resize: Literal["resample", "crop_or_pad"] = key("resample", "How volumes are resized to the grid.")
    intensity: IntensitySettings = section(IntensitySettings, "Intensity scaling.")
    patch_size: Triple | None = key(None, "Train on random crops of this size; null: on whole volumes.")
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = key(
        0.1, "Fraction of the volumes, or of the groups of group_by, held out for validation; at least 2 of them are."
    )
    use_augmentation: bool = key(
        False,
        "Stage 1: random flips, and shifts by up to 2 voxels. Stage 2: copies of each training volume that are turned, "
        "scaled and moved a little; not scaled with ldm.conditioning.tabular.continuous, whose numbers may mean sizes.",
    )
    prepared: Literal["disk", "memory", "none"] = key(
        "disk",
        "Where volumes are kept once they are on the grid: in files that all runs share, in host memory, or nowhere, "
        "so that each use reads the source again.",
        SAME,
    )
    cache_rate: float = key(0.0, "0: as prepared says; above 0: the same as prepared: memory.", SAME, ge=0, le=1)
    num_workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = key(
        "auto", "Worker processes for loading; 0: none; auto: 1, with a GPU 2, or up to 8 if prepared is none.", SAME
    )
    pin_memory: bool | Literal["auto"] = key(
        "auto", "Page-locked host memory: faster copies to the GPU, more host memory; auto: if there is a GPU.", SAME
    )
    persistent_workers: bool = key(False, "Keep the workers alive between validations.", SAME)

    @model_validator(mode="before")
    @classmethod
    def _prepare_in_memory(cls, values: Any) -> Any:
        """Let a `cache_rate` above 0 stand for `prepared: memory`; with another `prepared` it is refused."""
        rate = values.get("cache_rate") if isinstance(values, dict) else None
        return {"prepared": "memory", **values} if isinstance(rate, int | float) and rate > 0 else values

    @property
    def num_phantoms(self) -> int | None:
        """Return the number of volumes to generate; None if the volumes are the user's."""
        match = PHANTOMS.fullmatch(self.source)
        return None if match is None else int(match[1] or NUM_PHANTOMS)

    def num_held_out(self, number: int) -> int:
        """Return how many of some volumes or groups are held out; at least one is left to train on."""
        return min(max(LEAST_HELD_OUT, math.floor(number * self.val_fraction + 0.5)), number - 1)

    @property
    def training_grid(self) -> tuple[int, ...]:
        """Return the grid of a training step: a patch or a whole volume."""
        return self.patch_size or self.voxel_size


def intensity_problems(where: str, s: IntensitySettings, num_channels: int) -> Problems:
    """Yield the problems of the rules by which intensities of `num_channels` channels are scaled."""
    lengths = {name: len(value) for name in ("mode", "lower", "upper") if isinstance(value := getattr(s, name), tuple)}
    for name, length in lengths.items():
        if length != num_channels:
            found = f"{counted(length, 'entry')} for {counted(num_channels, 'channel')}"
            remedy = "give one value, or one for each channel"
            yield Problem(f"{where}.{name}", found, "", remedy, ("autoencoder.in_channels",))
            return
    others = (f"{where}.mode", f"{where}.upper")
    for mode, lower, upper in (s.of_channel(number) for number in range(num_channels if lengths else 1)):
        if lower >= upper:
            yield Problem(f"{where}.lower", f"{lower:g} is not below upper ({upper:g})", "", "swap the two", others)
        if mode == "percentile" and not (0 <= lower <= 100 and 0 <= upper <= 100):
            found = f"lower {lower:g} and upper {upper:g} are not percentiles"
            yield Problem(where, found, "allowed: 0 to 100", "set mode: window to use intensities", others)
