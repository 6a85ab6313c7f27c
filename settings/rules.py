"""Rules that involve more than one key; each problem says how to fix it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from runtime.files.names import counted
from runtime.files.run_folder import SHARED_NAMES
from settings.autoencoder import bottleneck_problems
from settings.data import intensity_problems
from settings.errors import Problem

if TYPE_CHECKING:
    from settings.autoencoder import AutoencoderSettings
    from settings.root import Settings

Grid = tuple[int, ...]

# 1 PiB: more than any machine has, and well below the 63 bits in which torch counts bytes.
LARGEST_ACTIVATION_BYTES = 2**50

LONGEST_NAME_BYTES = 200
MOST_SLABS = 2048
MOST_PHANTOMS = 100_000


def _text(values: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(v) for v in values) + "]"


def nearest_multiples(grid: Sequence[float], factors: Sequence[int]) -> Grid:
    """Return the grid nearest to `grid` whose axes are multiples of their `factors`."""
    return tuple(max(factor, factor * round(axis / factor)) for axis, factor in zip(grid, factors, strict=True))


def _is_divisible(grid: Grid, factors: Grid) -> bool:
    return not any(axis % factor for axis, factor in zip(grid, factors, strict=True))


def _factor_text(factors: Grid) -> str:
    """Return one number for factors that are the same along each axis, else all three."""
    return str(factors[0]) if len(set(factors)) == 1 else _text(factors)


def find_problems(settings: Settings) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    """Yield each problem with the other keys involved."""
    if len(settings.name.encode()) > LONGEST_NAME_BYTES:
        found = f"{len(settings.name.encode())} bytes are too long for a folder name"
        yield Problem("name", found, f"allowed: at most {LONGEST_NAME_BYTES}", "shorten it"), ()
    if settings.name.lower() in SHARED_NAMES:
        found = f"runs/{settings.name} is a folder that all runs share"
        yield Problem("name", found, f"allowed: any name but {', '.join(SHARED_NAMES)}", "choose another"), ()
    yield from _data(settings)
    yield from _levels("autoencoder", settings.autoencoder)
    strides = list(_strides(settings.autoencoder))
    yield from strides
    if not strides:
        yield from _grids(settings)
    yield from _memory_knobs(settings)
    yield from bottleneck_problems(settings.autoencoder)
    yield from _levels("ldm.unet", settings.ldm.unet)
    yield from _heads(settings)
    yield from _sampling(settings)
    for section in ("autoencoder", "ldm"):
        training = getattr(settings, section).training
        if training.num_warmup_steps >= training.last_step:
            where = f"{section}.training"
            found = f"{training.warmup_steps} is not below max_steps ({training.max_steps})"
            allowed = f"allowed: 0 to {training.max_steps - 1}"
            yield Problem(f"{where}.warmup_steps", found, allowed, "shorten the warm-up"), (f"{where}.max_steps",)


def _data(settings: Settings) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    data = settings.data
    yield from intensity_problems("data.intensity", data.intensity, settings.autoencoder.in_channels)
    if data.num_phantoms is not None and not 3 <= data.num_phantoms <= MOST_PHANTOMS:
        allowed = f"allowed: phantoms:3 to phantoms:{MOST_PHANTOMS}"
        yield Problem("data.source", data.source, allowed, "for example phantoms:48"), ()
    if data.persistent_workers and data.num_workers == 0:
        remedy = "set num_workers to 1 or more, or persistent_workers to false"
        yield Problem("data.persistent_workers", "true with num_workers 0", "", remedy), ("data.num_workers",)
    if data.patch_size is not None and any(p > v for p, v in zip(data.patch_size, data.voxel_size, strict=True)):
        found = f"{_text(data.patch_size)} is larger than voxel_size {_text(data.voxel_size)}"
        remedy = f"set {_text(tuple(map(min, data.patch_size, data.voxel_size)))}"
        yield Problem("data.patch_size", found, "allowed: at most voxel_size", remedy), ("data.voxel_size",)


def _levels(where: str, network) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    """Check the per-level keys of the autoencoder or the U-Net."""
    levels = len(network.num_channels)
    channels = f"{where}.num_channels"
    for name in ("attention_levels", "num_res_blocks", "num_head_channels"):
        value = getattr(network, name, None)
        if isinstance(value, tuple) and len(value) != levels:
            yield (
                Problem(
                    f"{where}.{name}",
                    f"{counted(len(value), 'entry')} for {counted(levels, 'level')}",
                    f"allowed: {levels}, one for each entry of num_channels {_text(network.num_channels)}",
                    f"give {counted(levels, 'entry')}" + ("" if name == "attention_levels" else " or one number"),
                ),
                (channels,),
            )
    groups = network.norm_num_groups
    if isinstance(groups, int) and any(c % groups for c in network.num_channels):
        fits = [n for n in range(1, min(network.num_channels) + 1) if all(c % n == 0 for c in network.num_channels)]
        bad = ", ".join(str(c) for c in dict.fromkeys(network.num_channels) if c % groups)
        yield (
            Problem(
                f"{where}.norm_num_groups",
                f"{groups} does not divide {bad} of num_channels",
                f"allowed: {', '.join(map(str, fits))}",
                f"set {max(n for n in fits if n <= max(groups, 1))} or auto",
            ),
            (channels,),
        )


def _strides(autoencoder: AutoencoderSettings) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    strides, needed = autoencoder.level_strides, len(autoencoder.num_channels) - 1
    where, channels = "autoencoder.strides", "autoencoder.num_channels"
    if len(strides) != needed:
        found = f"{counted(len(strides), 'entry')} for {counted(needed + 1, 'level')}"
        allowed = f"allowed: 2, or {needed}, one for each downsampling from one level to the next"
        yield Problem(where, found, allowed, f"give {counted(needed, 'entry')} or 2"), (channels,)
    for entry in strides:
        if set(entry) == {1}:
            found = f"{_text(entry)} shrinks no axis"
            yield Problem(where, found, "allowed: a 2 along at least one axis", "set one, or remove the level"), ()
            break
    if autoencoder.implementation == "monai" and not autoencoder.has_stock_strides:
        found = f"{', '.join(map(_text, strides))} with implementation: monai, whose strides are all 2"
        yield Problem(where, found, "", "set 2, or implementation: lean"), ("autoencoder.implementation",)
    if autoencoder.initialisation == "haar" and autoencoder.upsampling == "trilinear":
        found = "haar with variant: maisi, whose decoder mixes the neighbours that haar sets apart"
        remedy = "set random, or variant: monai"
        yield Problem("autoencoder.initialisation", found, "", remedy), ("autoencoder.variant",)


def _grids(settings: Settings) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    factors = settings.autoencoder.downsampling
    levels, multiple = len(settings.autoencoder.num_channels), _factor_text(factors)
    for name in ("voxel_size", "patch_size"):
        grid = getattr(settings.data, name)
        if grid is not None and not _is_divisible(grid, factors):
            yield (
                Problem(
                    f"data.{name}",
                    f"{_text(grid)} is not divisible by {multiple}, as the {levels} autoencoder levels require",
                    f"allowed: multiples of {multiple}",
                    f"the nearest is {_text(nearest_multiples(grid, factors))}",
                ),
                ("autoencoder.num_channels", "autoencoder.strides"),
            )
    training = settings.autoencoder.training
    largest = 4 * math.prod((training.batch_size, max(settings.autoencoder.num_channels), *settings.training_grid))
    if largest > LARGEST_ACTIVATION_BYTES:
        name = "voxel_size" if settings.data.patch_size is None else "patch_size"
        yield (
            Problem(
                f"data.{name}",
                f"{_text(settings.training_grid)} with batch_size {training.batch_size} needs activations of "
                f"{largest / 2**50:.3g} PiB",
                "allowed: at most 1 PiB",
                "use a smaller grid",
            ),
            ("autoencoder.training.batch_size", "autoencoder.num_channels"),
        )
    depth = training.discriminator.num_layers_d
    smallest = min(settings.training_grid)
    if training.uses_discriminator and smallest < 3 * 2**depth:
        most = max((n for n in range(1, depth + 1) if smallest >= 3 * 2**n), default=0)
        yield (
            Problem(
                "autoencoder.training.discriminator.num_layers_d",
                f"{depth} layers need at least {3 * 2**depth} voxels per axis, but the training grid has {smallest}",
                f"allowed: at most {most}" if most else "",
                f"set {most}" if most else "use a larger grid, or adversarial_weight: 0",
            ),
            ("data.voxel_size", "data.patch_size"),
        )


def _memory_knobs(settings: Settings) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    autoencoder, training = settings.autoencoder, settings.autoencoder.training
    where = "autoencoder.training"
    levels = len(autoencoder.num_channels)
    if training.checkpoint_levels != "all" and training.checkpoint_levels > levels:
        yield (
            Problem(
                f"{where}.checkpoint_levels",
                f"{training.checkpoint_levels} of {levels} levels",
                f"allowed: all, or 1 to {levels}",
                "set all",
            ),
            ("autoencoder.num_channels",),
        )
    if training.use_nested_checkpointing is True and not training.checkpoints_blocks:
        found = "true without use_gradient_checkpointing, so there are no checkpoints to nest"
        remedy = "set use_gradient_checkpointing: true"
        yield Problem(f"{where}.use_nested_checkpointing", found, "", remedy), (f"{where}.use_gradient_checkpointing",)
    if training.checkpoint_dtype != "same" and not training.checkpoints_blocks:
        found = (
            f"{training.checkpoint_dtype} without use_gradient_checkpointing, so there are no checkpoints to compress"
        )
        yield Problem(f"{where}.checkpoint_dtype", found, "", "set same"), (f"{where}.use_gradient_checkpointing",)
    if training.slab_rows == 1:
        found = "a slab of 1 row is too thin for its halo"
        yield Problem(f"{where}.slab_rows", found, "allowed: 0, or 2 or more", "set 8"), ()
    num_slabs = settings.training_grid[0] // max(training.slab_rows, 1)
    if training.slab_rows > 1 and num_slabs > MOST_SLABS:
        found = f"{training.slab_rows} rows cut the grid into {num_slabs:,} slabs"
        thicker = -(-settings.training_grid[0] // MOST_SLABS)
        yield (
            Problem(f"{where}.slab_rows", found, f"allowed: at most {MOST_SLABS:,} slabs", f"set {thicker} or more"),
            ("data.voxel_size", "data.patch_size"),
        )
    if autoencoder.implementation == "monai":
        yield from _only_lean(training)


def _only_lean(training) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    """Report knobs that MONAI's stock modules do not support."""
    asked = {
        "use_gradient_checkpointing_offload": training.use_gradient_checkpointing_offload,
        "use_nested_checkpointing": training.use_nested_checkpointing is True,
        "checkpoint_levels": training.checkpoint_levels != "all",
        "checkpoint_dtype": training.checkpoint_dtype != "same",
        "slab_rows": training.slab_rows > 0,
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        yield (
            Problem(
                f"autoencoder.training.{name}",
                f"{getattr(training, name)} with implementation: monai, which does not support it",
                "",
                "set autoencoder.implementation: lean",
            ),
            ("autoencoder.implementation",),
        )


def _heads(settings: Settings) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    unet = settings.ldm.unet
    if not len(unet.num_channels) == len(unet.attention_levels) == len(unet.head_channels):
        return
    attending = (*unet.attention_levels[:-1], True)  # the middle block uses the last level's heads
    for channels, attends, head in zip(unet.num_channels, attending, unet.head_channels, strict=True):
        if attends and (head == 0 or channels % head):
            fits = [n for n in range(1, channels + 1) if channels % n == 0]
            yield (
                Problem(
                    "ldm.unet.num_head_channels",
                    f"{head} does not divide the {channels} channels of a level with attention",
                    f"allowed: {', '.join(map(str, fits))}",
                    f"set {max(n for n in fits if n <= max(head, 1))}",
                ),
                ("ldm.unet.num_channels", "ldm.unet.attention_levels"),
            )


def _sampling(settings: Settings) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    ldm = settings.ldm
    fits = ("rflow", "heun", "dpmpp_2m") if ldm.scheduler.type == "rflow" else ("ddim", "ddpm", "dpmpp_2m")
    if ldm.sampling.sampler not in fits:
        yield (
            Problem(
                "ldm.sampling.sampler",
                f"{ldm.sampling.sampler} cannot sample from scheduler type {ldm.scheduler.type}",
                f"allowed: {', '.join(fits)}",
                f"set {fits[0]}",
            ),
            ("ldm.scheduler.type",),
        )
    if ldm.scheduler.time_shift != 1 and ldm.scheduler.type != "rflow":
        found = f"{ldm.scheduler.time_shift} with scheduler type ddpm"
        yield (
            Problem("ldm.scheduler.time_shift", found, "allowed: 1", "set 1, or type: rflow"),
            ("ldm.scheduler.type",),
        )
    yield from settings.ldm.conditioning.problems(settings)
    if ldm.sampling.num_inference_steps > ldm.scheduler.num_train_timesteps:
        most = ldm.scheduler.num_train_timesteps
        yield (
            Problem(
                "ldm.sampling.num_inference_steps",
                f"{ldm.sampling.num_inference_steps} is above num_train_timesteps ({most})",
                f"allowed: 1 to {most}",
                f"set {min(50, most)}",
            ),
            ("ldm.scheduler.num_train_timesteps",),
        )
