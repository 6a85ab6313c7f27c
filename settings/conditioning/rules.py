"""Rules between the keys of `ldm.conditioning`, and between them and the guidance of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runtime.files.names import counted
from settings.data import intensity_problems
from settings.errors import Problem

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
    yield from _tabular(ldm)
    yield from _scan(ldm)
    yield from _guidance(ldm)


def _label_maps(ldm: LdmSettings) -> Found:
    where, labels = "ldm.conditioning.label_map", ldm.conditioning.label_map
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
    needs_same = volume.encoding == "autoencoder" or volume.is_from_target
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
            ("hole", degrade.hole is not None),
        )
        if is_asked
    ]
    sources = (f"{where}.source", *(f"{where}.degrade.{name}" for name in takes))
    if takes and not volume.is_from_target:
        found = f"{', '.join(takes)} without source: target, so there is nothing to take it from"
        yield Problem(f"{where}.degrade", found, "", "set source: target with an encoding, or take it out"), sources
    if volume.is_from_target and len(takes) != 1:
        found = "nothing is taken from the target" if not takes else f"{' and '.join(takes)} at once"
        remedy = "set downsample or hole"
        yield Problem(f"{where}.degrade", found, "allowed: one of the two", remedy), sources
    grid = settings.data.voxel_size
    if any(n % factor for n, factor in zip(grid, degrade.downsample, strict=True)):
        found = f"{list(degrade.downsample)} does not divide data.voxel_size {list(grid)}"
        yield Problem(f"{where}.degrade.downsample", found, "", "change one of the two"), ("data.voxel_size",)
    if degrade.has_hole and not all(size < n for size, n in zip(degrade.box, grid, strict=True)):
        found = f"{list(degrade.box)} on a grid of {list(grid)} voxels"
        allowed = "allowed: smaller than the grid along each axis"
        yield Problem(f"{where}.degrade.hole", found, allowed, "change it"), ("data.voxel_size",)


def _tabular(ldm: LdmSettings) -> Found:
    where, tabular = "ldm.conditioning.tabular", ldm.conditioning.tabular
    if tabular.columns and tabular.table is None:
        remedy = "set it to the CSV file that has them, or take the columns out"
        found = f"null with columns {', '.join(tabular.columns)}"
        yield Problem(f"{where}.table", found, "", remedy), (f"{where}.continuous", f"{where}.categorical")
    if tabular.table is not None and not tabular.columns:
        remedy = "name columns in continuous or categorical, or set table: null"
        yield Problem(f"{where}.continuous", "no columns for the table", "", remedy), (f"{where}.table",)
    names = [name.lower() for name in tabular.columns]
    twice = next((name for name in names if names.count(name) > 1 or name == "file"), None)
    if twice is not None:
        found = f"column {twice} " + ("names the volumes" if twice == "file" else "named twice")
        yield Problem(f"{where}.continuous", found, "", "take it out"), (f"{where}.categorical",)


def _scan(ldm: LdmSettings) -> Found:
    where, scan = "ldm.conditioning.scan", ldm.conditioning.scan
    if scan.num_modalities and ldm.conditioning.type == "class":
        found = f"{scan.modality} with conditioning type class, which uses the same embedding"
        yield (
            Problem(f"{where}.modality", found, "allowed: null", "set null, or type: none"),
            ("ldm.conditioning.type",),
        )


def _guidance(ldm: LdmSettings) -> Found:
    scale, kinds = ldm.sampling.guidance_scale, ldm.conditioning.kinds
    if scale != 1 and not kinds:
        found = f"{scale:g} with conditioning type none, so there is no class to follow"
        yield Problem("ldm.sampling.guidance_scale", found, "allowed: 1", "set 1"), ("ldm.conditioning.type",)
    elif scale != 1 and ldm.conditioning.dropout == 0:
        found = f"{scale:g} with conditioning dropout 0, so the network never learns to predict without a condition"
        sources = (*kinds, "ldm.conditioning.dropout")
        yield Problem("ldm.sampling.guidance_scale", found, "allowed: 1", "set 1, or a dropout above 0"), sources
