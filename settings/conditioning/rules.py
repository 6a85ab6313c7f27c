"""Rules between the keys of `ldm.conditioning`, and between them and the guidance of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from settings.data import intensity_problems
from settings.errors import Problem
from storage.names import counted

if TYPE_CHECKING:
    from settings.ldm import LdmSettings
    from settings.root import Settings

Found = Iterator[tuple[Problem, tuple[str, ...]]]


def conditioning_problems(settings: Settings) -> Found:
    """Yield each problem with the other keys involved."""
    ldm = settings.ldm
    conditioning = ldm.conditioning
    if conditioning.type == "class" and conditioning.num_classes < 2:
        found = f"{counted(conditioning.num_classes, 'class')} for conditioning type class"
        remedy = "set it to the number of classes in the data"
        yield (
            Problem("ldm.conditioning.num_classes", found, "allowed: 2 or more", remedy),
            ("ldm.conditioning.type",),
        )
    yield from _label_maps(ldm)
    yield from _volume(settings)
    yield from _numbers(ldm)
    yield from _scan(ldm)
    yield from _guidance(ldm)


def _label_maps(ldm: LdmSettings) -> Found:
    where, labels = "ldm.conditioning.labels", ldm.conditioning.labels
    if labels.num_classes == 1:
        remedy = "count the background too: 2 for background and one structure"
        yield Problem(f"{where}.num_classes", "1 label value", "allowed: 0, or 2 or more", remedy), ()
    if labels.num_classes and labels.source is None:
        remedy = "set it to the folder of the label maps, or num_classes: 0"
        yield Problem(f"{where}.source", "null with num_classes above 0", "", remedy), (f"{where}.num_classes",)
    if labels.source is not None and not labels.num_classes:
        remedy = "set it to the number of label values with the background, or source: null"
        yield Problem(f"{where}.num_classes", "0 with a source of label maps", "", remedy), (f"{where}.source",)


def _volume(settings: Settings) -> Found:
    where, volume = "ldm.conditioning.volume", settings.ldm.conditioning.volume
    degrade, channels = volume.degrade, settings.autoencoder.in_channels
    if volume.is_used and volume.source is None:
        remedy = "set it to the folder of the other volumes or to target, or encoding: none"
        found = f"null with encoding {volume.encoding}"
        yield Problem(f"{where}.source", found, "", remedy), (f"{where}.encoding",)
    if volume.source is not None and not volume.is_used:
        remedy = "set autoencoder or resample, or source: null"
        yield Problem(f"{where}.encoding", "none with a source of volumes", "", remedy), (f"{where}.source",)
    if volume.is_used and not volume.is_from_target:
        yield from intensity_problems(f"{where}.intensity", volume.intensity, volume.num_channels)
    if volume.autoencoder is not None and (volume.encoding != "autoencoder" or volume.is_from_target):
        found = f"given with encoding {volume.encoding} and source {volume.source or 'null'}"
        allowed = "allowed: with encoding autoencoder and other volumes"
        yield Problem(f"{where}.autoencoder", found, allowed, "set null"), (f"{where}.encoding", f"{where}.source")
    if volume.latent_channels is not None and volume.autoencoder is None:
        found = f"{volume.latent_channels} without another autoencoder"
        yield Problem(f"{where}.latent_channels", found, "", "set null"), (f"{where}.autoencoder",)
    is_encoded_alike = volume.encoding == "autoencoder" and volume.autoencoder is None
    needs_same = is_encoded_alike or volume.is_from_target
    if volume.is_used and needs_same and volume.num_channels != channels:
        found = f"{volume.num_channels}, and autoencoder.in_channels is {channels}"
        why = "the frozen autoencoder encodes" if volume.encoding == "autoencoder" else "the volumes to learn have"
        yield (
            Problem(f"{where}.num_channels", found, f"allowed: {channels}, which {why}", f"set {channels}"),
            (f"{where}.encoding", f"{where}.source", "autoencoder.in_channels"),
        )
    takes = [
        name
        for name, is_asked in (
            ("downsample", any(factor > 1 for factor in degrade.downsample)),
            ("hole", degrade.has_hole),
            ("masks", degrade.masks is not None),
        )
        if is_asked
    ]
    sources = (f"{where}.source", *(f"{where}.degrade.{name}" for name in takes))
    if takes and not volume.is_from_target:
        found = f"{', '.join(takes)} without source: target, so there is nothing to take it from"
        yield Problem(f"{where}.degrade", found, "", "set source: target with an encoding, or take it out"), sources
    if volume.is_from_target and len(takes) != 1:
        found = "nothing is taken from the target" if not takes else f"{' and '.join(takes)} at once"
        remedy = "set one of downsample, hole and masks"
        yield Problem(f"{where}.degrade", found, "allowed: one of the three", remedy), sources
    grid = settings.data.voxel_size
    if any(n % factor for n, factor in zip(grid, degrade.downsample, strict=True)):
        found = f"{list(degrade.downsample)} does not divide data.voxel_size {list(grid)}"
        yield Problem(f"{where}.degrade.downsample", found, "", "change one of the two"), ("data.voxel_size",)
    if degrade.has_hole and not all(0 < size < n for size, n in zip(degrade.hole, grid, strict=True)):
        found = f"{list(degrade.hole)} on a grid of {list(grid)} voxels"
        allowed = "allowed: at least 1 along each axis, and smaller than the grid"
        yield Problem(f"{where}.degrade.hole", found, allowed, "change it"), ("data.voxel_size",)


def _numbers(ldm: LdmSettings) -> Found:
    where, numbers = "ldm.conditioning.numbers", ldm.conditioning.numbers
    if numbers.columns and numbers.table is None:
        remedy = "set it to the CSV file that has them, or take the columns out"
        found = f"null with columns {', '.join(numbers.columns)}"
        yield Problem(f"{where}.table", found, "", remedy), (f"{where}.continuous", f"{where}.categorical")
    if numbers.table is not None and not numbers.columns:
        remedy = "name columns in continuous or categorical, or set table: null"
        yield Problem(f"{where}.continuous", "no columns for the table", "", remedy), (f"{where}.table",)
    names = [name.lower() for name in numbers.columns]
    twice = next((name for name in names if names.count(name) > 1 or name == "file"), None)
    if twice is not None:
        found = f"column {twice} " + ("names the volumes" if twice == "file" else "named twice")
        yield Problem(f"{where}.continuous", found, "", "take it out"), (f"{where}.categorical",)


def _scan(ldm: LdmSettings) -> Found:
    where, scan = "ldm.conditioning.scan", ldm.conditioning.scan
    regions = (f"{where}.top_region", f"{where}.bottom_region")
    if scan.columns and scan.table is None:
        found = f"null, but it is to say {' and '.join(scan.columns)}"
        remedy = "set it to the CSV file that has these columns, or one region for all volumes"
        yield Problem(f"{where}.table", found, "", remedy), regions
    if scan.table is not None and not scan.columns:
        remedy = "set top_region or bottom_region to table, or table: null"
        yield Problem(f"{where}.table", "given, but no region comes from it", "", remedy), regions
    if scan.num_modalities == 1:
        remedy = "count the unknown modality too: 2 for one modality"
        yield Problem(f"{where}.num_modalities", "1 modality", "allowed: 0, or 2 or more", remedy), ()
    if scan.num_modalities > 1 and scan.modality >= scan.num_modalities:
        allowed = f"allowed: 0 to {scan.num_modalities - 1}"
        remedy = "choose one of these"
        yield Problem(f"{where}.modality", str(scan.modality), allowed, remedy), (f"{where}.num_modalities",)
    if scan.num_modalities and ldm.conditioning.type == "class":
        found = f"{scan.num_modalities} with conditioning type class, which uses the same embedding"
        yield (
            Problem(f"{where}.num_modalities", found, "allowed: 0", "set 0, or type: none"),
            ("ldm.conditioning.type",),
        )


def _guidance(ldm: LdmSettings) -> Found:
    scale, dropouts = ldm.sampling.guidance_scale, ldm.conditioning.dropouts
    if scale != 1 and not dropouts:
        found = f"{scale:g} with conditioning type none, so there is no class to follow"
        yield Problem("ldm.sampling.guidance_scale", found, "allowed: 1", "set 1"), ("ldm.conditioning.type",)
    elif scale != 1 and 0 in dropouts.values():
        never = next(where for where, dropout in dropouts.items() if dropout == 0)
        what = "class" if never == "ldm.conditioning" else "condition"
        found = f"{scale:g} with conditioning dropout 0, so the network never learns to predict without a {what}"
        sources = ("ldm.conditioning.type", f"{never}.dropout")
        yield Problem("ldm.sampling.guidance_scale", found, "allowed: 1", "set 1"), sources
    lowest, highest = ldm.sampling.guidance_interval
    if lowest >= highest:
        found = f"{lowest:g} is not below {highest:g}"
        remedy = "widen it" if lowest == highest else "swap the two"
        yield Problem("ldm.sampling.guidance_interval", found, "", remedy), ()
