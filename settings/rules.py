"""Rules that involve more than one key; each problem says how to fix it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runtime.files import SHARED_NAMES, counted
from settings.data import intensity_problems
from settings.errors import Problem, Problems

if TYPE_CHECKING:
    from settings.autoencoder import AutoencoderSettings
    from settings.root import Settings

# 1 PiB: more than any machine has, and well below the 63 bits in which torch counts bytes.
LARGEST_ACTIVATION_BYTES = 2**50

MOST_PHANTOMS = 100_000


def find_problems(settings: Settings) -> Problems:
    """Yield each problem between keys."""
    if settings.name.lower() in SHARED_NAMES:
        found = f"runs/{settings.name} is a folder that all runs share"
        yield Problem("name", found, f"allowed: any name but {', '.join(SHARED_NAMES)}", "choose another")
    yield from _data(settings)
    yield from _levels("autoencoder", settings.autoencoder)
    strides = list(_strides(settings.autoencoder))
    yield from strides
    if not strides:
        yield from _grids(settings)
    yield from _memory_knobs(settings)
    yield from _bottleneck(settings.autoencoder)
    yield from _levels("ldm.unet", settings.ldm.unet)
    yield from _heads(settings)
    yield from _sampling(settings)
    yield from settings.ldm.conditioning.problems(settings)
    for section in ("autoencoder", "ldm"):
        training = getattr(settings, section).training
        if training.num_warmup_steps >= training.last_step:
            where = f"{section}.training"
            found = f"{training.warmup_steps} is not below max_steps ({training.max_steps})"
            allowed = f"allowed: 0 to {training.max_steps - 1}"
            yield Problem(f"{where}.warmup_steps", found, allowed, "shorten the warm-up", (f"{where}.max_steps",))


def _data(settings: Settings) -> Problems:
    data = settings.data
    yield from intensity_problems("data.intensity", data.intensity, settings.autoencoder.in_channels)
    if data.num_phantoms is not None and not 3 <= data.num_phantoms <= MOST_PHANTOMS:
        allowed = f"allowed: phantoms:3 to phantoms:{MOST_PHANTOMS}"
        yield Problem("data.source", data.source, allowed, "for example phantoms:48")
    if data.persistent_workers and data.num_workers == 0:
        remedy = "set num_workers to 1 or more, or persistent_workers to false"
        yield Problem("data.persistent_workers", "true with num_workers 0", "", remedy, ("data.num_workers",))
    if data.cache_rate > 0 and data.prepared != "memory":
        found = f"{data.cache_rate:g} with prepared: {data.prepared}"
        yield Problem("data.cache_rate", found, "allowed: 0", "set 0, or prepared: memory", ("data.prepared",))
    if data.patch_size is not None and any(p > v for p, v in zip(data.patch_size, data.voxel_size, strict=True)):
        found = f"{_text(data.patch_size)} is larger than voxel_size {_text(data.voxel_size)}"
        remedy = f"set {_text(tuple(map(min, data.patch_size, data.voxel_size)))}"
        yield Problem("data.patch_size", found, "allowed: at most voxel_size", remedy, ("data.voxel_size",))


def _levels(where: str, network: Any) -> Problems:
    """Check the per-level keys of the autoencoder or the U-Net."""
    levels, channels = len(network.num_channels), f"{where}.num_channels"
    for name in ("attention_levels", "num_res_blocks", "num_head_channels"):
        value = getattr(network, name, None)
        if isinstance(value, tuple) and len(value) != levels:
            found = f"{counted(len(value), 'entry')} for {counted(levels, 'level')}"
            allowed = f"allowed: {levels}, one for each entry of num_channels {_text(network.num_channels)}"
            remedy = f"give {counted(levels, 'entry')}" + ("" if name == "attention_levels" else " or one number")
            yield Problem(f"{where}.{name}", found, allowed, remedy, (channels,))
    groups = network.norm_num_groups
    if isinstance(groups, int) and any(c % groups for c in network.num_channels):
        fits = [n for n in range(1, min(network.num_channels) + 1) if all(c % n == 0 for c in network.num_channels)]
        bad = ", ".join(str(c) for c in dict.fromkeys(network.num_channels) if c % groups)
        found, allowed = f"{groups} does not divide {bad} of num_channels", f"allowed: {', '.join(map(str, fits))}"
        remedy = f"set {max(n for n in fits if n <= max(groups, 1))} or auto"
        yield Problem(f"{where}.norm_num_groups", found, allowed, remedy, (channels,))


def _strides(autoencoder: AutoencoderSettings) -> Problems:
    strides, needed = autoencoder.level_strides, len(autoencoder.num_channels) - 1
    where, channels = "autoencoder.strides", "autoencoder.num_channels"
    if len(strides) != needed:
        found = f"{counted(len(strides), 'entry')} for {counted(needed + 1, 'level')}"
        allowed = f"allowed: 2, or {needed}, one for each downsampling from one level to the next"
        yield Problem(where, found, allowed, f"give {counted(needed, 'entry')} or 2", (channels,))
    flat = next((entry for entry in strides if set(entry) == {1}), None)
    if flat is not None:
        allowed = "allowed: a 2 along at least one axis"
        yield Problem(where, f"{_text(flat)} shrinks no axis", allowed, "set one, or remove the level")
    if autoencoder.implementation == "monai" and not autoencoder.has_stock_strides:
        found = f"{', '.join(map(_text, strides))} with implementation: monai, whose strides are all 2"
        yield Problem(where, found, "", "set 2, or implementation: lean", ("autoencoder.implementation",))
    if autoencoder.initialisation == "haar" and autoencoder.upsampling == "trilinear":
        found = "haar with variant: maisi, whose decoder mixes the neighbours that haar sets apart"
        remedy = "set random, or variant: monai"
        yield Problem("autoencoder.initialisation", found, "", remedy, ("autoencoder.variant",))


def _grids(settings: Settings) -> Problems:
    autoencoder, training = settings.autoencoder, settings.autoencoder.training
    factors, levels = autoencoder.downsampling, len(autoencoder.num_channels)
    # One number for factors that are the same along each axis, else all three.
    multiple = str(factors[0]) if len(set(factors)) == 1 else _text(factors)
    for name in ("voxel_size", "patch_size"):
        grid = getattr(settings.data, name)
        if grid is not None and any(axis % factor for axis, factor in zip(grid, factors, strict=True)):
            found = f"{_text(grid)} is not divisible by {multiple}, as the {levels} autoencoder levels require"
            remedy = f"the nearest is {_text(nearest_multiples(grid, factors))}"
            sources = ("autoencoder.num_channels", "autoencoder.strides")
            yield Problem(f"data.{name}", found, f"allowed: multiples of {multiple}", remedy, sources)
    grid = settings.training_grid
    largest = 4 * math.prod((training.batch_size, max(autoencoder.num_channels), *grid))
    if largest > LARGEST_ACTIVATION_BYTES:
        where = "data.voxel_size" if settings.data.patch_size is None else "data.patch_size"
        found = f"{_text(grid)} with batch_size {training.batch_size} needs activations of {largest / 2**50:.3g} PiB"
        sources = ("autoencoder.training.batch_size", "autoencoder.num_channels")
        yield Problem(where, found, "allowed: at most 1 PiB", "use a smaller grid", sources)
    depth, smallest = training.discriminator.num_layers_d, min(grid)
    if training.uses_discriminator and smallest < 3 * 2**depth:
        most = max((n for n in range(1, depth + 1) if smallest >= 3 * 2**n), default=0)
        where = "autoencoder.training.discriminator.num_layers_d"
        found = f"{depth} layers need at least {3 * 2**depth} voxels per axis, but the training grid has {smallest}"
        remedy = f"set {most}" if most else "use a larger grid, or adversarial_weight: 0"
        allowed = f"allowed: at most {most}" if most else ""
        yield Problem(where, found, allowed, remedy, ("data.voxel_size", "data.patch_size"))


def _memory_knobs(settings: Settings) -> Problems:
    autoencoder, training = settings.autoencoder, settings.autoencoder.training
    where, levels = "autoencoder.training", len(autoencoder.num_channels)
    checkpointing = (f"{where}.use_gradient_checkpointing",)
    if training.checkpoint_levels != "all" and training.checkpoint_levels > levels:
        found, allowed = f"{training.checkpoint_levels} of {levels} levels", f"allowed: all, or 1 to {levels}"
        yield Problem(f"{where}.checkpoint_levels", found, allowed, "set all", ("autoencoder.num_channels",))
    if training.use_nested_checkpointing is True and not training.checkpoints_blocks:
        found = "true without use_gradient_checkpointing, so there are no checkpoints to nest"
        remedy = "set use_gradient_checkpointing: true"
        yield Problem(f"{where}.use_nested_checkpointing", found, "", remedy, checkpointing)
    if training.slab_rows == 1:
        found = "a slab of 1 row is too thin for its halo"
        yield Problem(f"{where}.slab_rows", found, "allowed: 0, or 2 or more", "set 8")
    most = autoencoder.most_offload_levels
    if training.offload_levels > most:
        found = f"{training.offload_levels} of {levels} levels; the last one and those with attention run on the device"
        sources = ("autoencoder.num_channels", "autoencoder.attention_levels")
        yield Problem(f"{where}.offload_levels", found, f"allowed: at most {most}", f"set {most}", sources)
    # What MONAI's stock modules do not support.
    asked = {
        "use_gradient_checkpointing_offload": training.use_gradient_checkpointing_offload,
        "use_nested_checkpointing": training.use_nested_checkpointing is True,
        "checkpoint_levels": training.checkpoint_levels != "all",
        "slab_rows": training.slab_rows > 0,
        "offload_levels": training.offload_levels > 0,
    }
    for name in (name for name, is_asked in asked.items() if is_asked and autoencoder.implementation == "monai"):
        found = f"{getattr(training, name)} with implementation: monai, which does not support it"
        remedy = "set autoencoder.implementation: lean"
        yield Problem(f"{where}.{name}", found, "", remedy, ("autoencoder.implementation",))


def _bottleneck(autoencoder: AutoencoderSettings) -> Problems:
    """Check the bottleneck and what is trained around it."""
    if not autoencoder.training.trains_encoder and autoencoder.pretrained is None:
        found = "decoder without autoencoder.pretrained, so the encoder would keep its random weights"
        remedy = "set autoencoder.pretrained to the weights to fine-tune, or trainable: all"
        yield Problem("autoencoder.training.trainable", found, "", remedy, ("autoencoder.pretrained",))
    if autoencoder.bottleneck != "kl" and autoencoder.implementation == "monai":
        found = f"{autoencoder.bottleneck} with implementation: monai, whose autoencoder has a Gaussian latent only"
        remedy = "set kl, or autoencoder.implementation: lean"
        yield Problem("autoencoder.bottleneck", found, "allowed: kl", remedy, ("autoencoder.implementation",))


def _heads(settings: Settings) -> Problems:
    unet = settings.ldm.unet
    if not len(unet.num_channels) == len(unet.attention_levels) == len(unet.head_channels):
        return
    attending = (*unet.attention_levels[:-1], True)  # the middle block uses the last level's heads
    for channels, attends, head in zip(unet.num_channels, attending, unet.head_channels, strict=True):
        if attends and (head == 0 or channels % head):
            fits = [n for n in range(1, channels + 1) if channels % n == 0]
            found = f"{head} does not divide the {channels} channels of a level with attention"
            allowed = f"allowed: {', '.join(map(str, fits))}"
            remedy = f"set {max(n for n in fits if n <= max(head, 1))}"
            sources = ("ldm.unet.num_channels", "ldm.unet.attention_levels")
            yield Problem("ldm.unet.num_head_channels", found, allowed, remedy, sources)


def _sampling(settings: Settings) -> Problems:
    sampling, scheduler = settings.ldm.sampling, settings.ldm.scheduler
    fits = ("rflow", "heun", "dpmpp_2m") if scheduler.type == "rflow" else ("ddim", "ddpm", "dpmpp_2m")
    if sampling.sampler not in fits:
        found = f"{sampling.sampler} cannot sample from scheduler type {scheduler.type}"
        allowed = f"allowed: {', '.join(fits)}"
        yield Problem("ldm.sampling.sampler", found, allowed, f"set {fits[0]}", ("ldm.scheduler.type",))
    if scheduler.time_shift != 1 and scheduler.type != "rflow":
        where, found = "ldm.scheduler.time_shift", f"{scheduler.time_shift} with scheduler type ddpm"
        yield Problem(where, found, "allowed: 1", "set 1, or type: rflow", ("ldm.scheduler.type",))
    most = scheduler.num_train_timesteps
    if sampling.num_inference_steps > most:
        where = "ldm.sampling.num_inference_steps"
        found = f"{sampling.num_inference_steps} is above num_train_timesteps ({most})"
        allowed, sources = f"allowed: 1 to {most}", ("ldm.scheduler.num_train_timesteps",)
        yield Problem(where, found, allowed, f"set {min(50, most)}", sources)


def nearest_multiples(grid: Sequence[float], factors: Sequence[int]) -> tuple[int, ...]:
    """Return the grid nearest to `grid` whose axes are multiples of their `factors`."""
    return tuple(max(factor, factor * round(axis / factor)) for axis, factor in zip(grid, factors, strict=True))


def _text(values: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, values)) + "]"
