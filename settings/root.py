"""The whole configuration, and the rules that involve more than one key; each problem says how to fix it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import ValidationInfo, model_validator

from runtime.files import SHARED_NAMES, counted
from settings.autoencoder import AutoencoderSettings
from settings.data import DataSettings, intensity_problems
from settings.errors import ConfigError, Problem, Problems
from settings.ldm import LdmSettings
from settings.section import FREE, SAME, FolderName, Section, TrainingSettings, assign, key, overlap, section

# 1 PiB: more than any machine has, and well below the 63 bits in which torch counts bytes.
LARGEST_ACTIVATION_BYTES = 2**50
MOST_PHANTOMS = 100_000


class DeviceSettings(Section):
    """The `device` section."""

    type: Literal["auto", "cuda", "cpu"] = key("auto", "auto: CUDA if available, else the CPU.", FREE)
    mixed_precision: bool = key(False, "Run convolutions and attention in 16-bit precision.")
    amp_dtype: Literal["auto", "bfloat16", "float16"] = key(
        "auto",
        "auto: bfloat16 if the GPU supports it, else float16 with gradient scaling; on a CPU, where 16 bits are many "
        "times slower, float32.",
    )
    memory_format: Literal["auto", "contiguous", "channels_last"] = key(
        "auto", "Memory layout of volumes; auto: channels_last, but contiguous for MONAI's stock autoencoder.", SAME
    )
    allocator: str = key(
        "expandable_segments:True",
        "Value of PYTORCH_CUDA_ALLOC_CONF, set before CUDA starts; empty: do not set it.",
        SAME,
        pattern=r"^$|^\w+:[^,:]+(,\w+:[^,:]+)*$",
    )

    def is_half(self, on_cpu: bool) -> bool:
        """Return whether a device computes in 16 bits; a CPU does only if `amp_dtype` names the type."""
        return self.mixed_precision and not (on_cpu and self.amp_dtype == "auto")


class Settings(Section):
    """A validated configuration: one run, both stages."""

    name: FolderName = key("run", "Outputs go to the folder of this name in runs/.", FREE)
    seed: int = key(42, "Determines the initial weights, the batch order and the noise.", ge=0, lt=2**32)
    data: DataSettings = section(DataSettings, "The volumes to train on.")
    autoencoder: AutoencoderSettings = section(AutoencoderSettings, "Stage 1: the autoencoder.")
    ldm: LdmSettings = section(LdmSettings, "Stage 2: latent diffusion.")
    device: DeviceSettings = section(DeviceSettings, "Device and precision.")

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Settings:
        context = info.context or {}
        # A rule about a key that is already reported would only add noise.
        failed = context.get("failed", frozenset())
        problems = [
            problem
            for problem in (() if "without_rules" in context else _problems(self))
            if not any(overlap(key, bad) for bad in failed for key in (problem.where, *problem.others))
        ]
        if problems:
            raise ConfigError(problems)
        return self

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Return the shape of a whole volume's latent: channels, then axes."""
        return (self.autoencoder.latent_channels, *self.autoencoder.latent_grid(self.data.voxel_size))

    @property
    def mean_map_shape(self) -> tuple[int, ...] | None:
        """Return the shape of the mean latent that the U-Net gets as further inputs; None if it gets none."""
        return self.latent_shape if self.ldm.unet.use_mean_map else None

    def training_of(self, stage: str) -> TrainingSettings:
        """Return how a stage, `autoencoder` or `ldm`, is trained."""
        return self.autoencoder.training if stage == "autoencoder" else self.ldm.training

    @property
    def training_grid(self) -> tuple[int, ...]:
        """Return the grid of one stage-1 training step: a patch or a whole volume."""
        return self.data.training_grid

    @property
    def unet_grid(self) -> tuple[int, ...]:
        """Return the grid of the U-Net's highest level: that of a latent, padded."""
        return self.ldm.unet.level_grids(self.latent_shape[1:])[0]

    def with_overrides(self, changes: Mapping[str, Any]) -> Settings:
        """Return validated settings with dotted keys changed, such as {"data.num_workers": 4}."""
        values = self.model_dump()
        for dotted, value in changes.items():
            assign(values, dotted, value)
        return Settings.model_validate(values)


def _problems(settings: Settings) -> Problems:
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
    yield from _autoencoder_training(settings.autoencoder)
    yield from _levels("ldm.unet", settings.ldm.unet)
    yield from _ldm(settings.ldm)
    yield from settings.ldm.conditioning.problems(settings)
    for stage in ("autoencoder", "ldm"):
        training, where = settings.training_of(stage), f"{stage}.training"
        if training.num_warmup_steps >= training.last_step:
            found = f"{training.warmup_steps} is not below max_steps ({training.max_steps})"
            yield Problem(f"{where}.warmup_steps", found, "", "shorten the warm-up", (f"{where}.max_steps",))


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
        found = f"{list(data.patch_size)} is larger than voxel_size {list(data.voxel_size)}"
        yield Problem("data.patch_size", found, "", "make it smaller", ("data.voxel_size",))


def _levels(where: str, network: Any) -> Problems:
    """Check the per-level keys of the autoencoder or the U-Net."""
    widths, others = network.num_channels, (f"{where}.num_channels",)
    for name in ("attention_levels", "num_res_blocks", "num_head_channels"):
        value = getattr(network, name, None)
        if isinstance(value, tuple) and len(value) != len(widths):
            found = f"{counted(len(value), 'entry')} for {counted(len(widths), 'level')}"
            yield Problem(f"{where}.{name}", found, "allowed: one for each entry of num_channels", "change one", others)
    groups = network.norm_num_groups
    if isinstance(groups, int) and any(c % groups for c in widths):
        found, allowed = f"{groups} does not divide num_channels {list(widths)}", _divisors(*widths)
        yield Problem(f"{where}.norm_num_groups", found, allowed, "set one of them, or auto", others)


def _strides(autoencoder: AutoencoderSettings) -> Problems:
    strides, needed, where = autoencoder.level_strides, len(autoencoder.num_channels) - 1, "autoencoder.strides"
    if len(strides) != needed:
        found = f"{counted(len(strides), 'entry')} for {counted(needed + 1, 'level')}"
        allowed = f"allowed: 2, or {needed}, one for each downsampling from one level to the next"
        yield Problem(where, found, allowed, "", ("autoencoder.num_channels",))
    if any(set(entry) == {1} for entry in strides):
        yield Problem(where, "[1, 1, 1] shrinks no axis", "allowed: a 2 along at least one", "set one")
    if autoencoder.implementation == "monai" and not autoencoder.has_stock_strides:
        yield _not_in_monai(where, list(map(list, strides)))
    if autoencoder.initialisation == "haar" and autoencoder.upsampling == "trilinear":
        found = "haar with variant: maisi, whose decoder mixes the neighbours that haar sets apart"
        remedy = "set random, or variant: monai"
        yield Problem("autoencoder.initialisation", found, "", remedy, ("autoencoder.variant",))


def _grids(settings: Settings) -> Problems:
    autoencoder, training = settings.autoencoder, settings.autoencoder.training
    factors = autoencoder.downsampling
    for name in ("voxel_size", "patch_size"):
        grid = getattr(settings.data, name)
        if grid is not None and any(axis % factor for axis, factor in zip(grid, factors, strict=True)):
            found = f"{list(grid)} is not divisible by {list(factors)}, as the autoencoder's levels require"
            remedy = f"the nearest is {list(nearest_multiples(grid, factors))}"
            yield Problem(f"data.{name}", found, "", remedy, ("autoencoder.num_channels", "autoencoder.strides"))
    grid, where = settings.training_grid, "data.voxel_size" if settings.data.patch_size is None else "data.patch_size"
    largest = 4 * math.prod((training.batch_size, max(autoencoder.num_channels), *grid))
    if largest > LARGEST_ACTIVATION_BYTES:
        found = f"{list(grid)} with batch_size {training.batch_size} needs activations of {largest / 2**50:.3g} PiB"
        sources = ("autoencoder.training.batch_size", "autoencoder.num_channels")
        yield Problem(where, found, "allowed: at most 1 PiB", "use a smaller grid", sources)
    depth, least = training.discriminator.num_layers_d, 3 * 2**training.discriminator.num_layers_d
    if training.uses_discriminator and min(grid) < least:
        found = f"{depth} layers need at least {least} voxels per axis, and the training grid is {list(grid)}"
        remedy = "set fewer, use a larger grid, or adversarial_weight: 0"
        sources = ("data.voxel_size", "data.patch_size")
        yield Problem("autoencoder.training.discriminator.num_layers_d", found, "", remedy, sources)


def _autoencoder_training(autoencoder: AutoencoderSettings) -> Problems:
    """Check the memory knobs, what MONAI's stock modules do not have, and what is trained."""
    training, where, levels = autoencoder.training, "autoencoder.training", len(autoencoder.num_channels)
    if training.checkpoint_levels != "all" and training.checkpoint_levels > levels:
        found, allowed = f"{training.checkpoint_levels} of {levels} levels", f"allowed: all, or 1 to {levels}"
        yield Problem(f"{where}.checkpoint_levels", found, allowed, "set all", ("autoencoder.num_channels",))
    if training.use_nested_checkpointing is True and not training.checkpoints_blocks:
        found, needed = "true without checkpoints to nest", f"{where}.use_gradient_checkpointing"
        yield Problem(f"{where}.use_nested_checkpointing", found, "", f"set {needed}: true", (needed,))
    most = autoencoder.most_offload_levels
    if training.offload_levels > most:
        found = f"{training.offload_levels} of {levels} levels; the last one and those with attention run on the device"
        sources = ("autoencoder.num_channels", "autoencoder.attention_levels")
        yield Problem(f"{where}.offload_levels", found, f"allowed: at most {most}", f"set {most}", sources)
    asked = {
        f"{where}.use_gradient_checkpointing_offload": training.use_gradient_checkpointing_offload,
        f"{where}.use_nested_checkpointing": training.use_nested_checkpointing is True,
        f"{where}.checkpoint_levels": training.checkpoint_levels != "all" and training.checkpoint_levels,
        f"{where}.slab_rows": training.slab_rows,
        f"{where}.offload_levels": training.offload_levels,
        "autoencoder.bottleneck": autoencoder.bottleneck != "kl" and autoencoder.bottleneck,
    }
    if autoencoder.implementation == "monai":
        yield from (_not_in_monai(name, value) for name, value in asked.items() if value)
    if not training.trains_encoder and autoencoder.pretrained is None:
        found = "decoder without autoencoder.pretrained, so the encoder would keep its random weights"
        remedy = "set autoencoder.pretrained to the weights to fine-tune, or trainable: all"
        yield Problem(f"{where}.trainable", found, "", remedy, ("autoencoder.pretrained",))


def _not_in_monai(where: str, value: Any) -> Problem:
    found, implementation = (
        f"{value} with implementation: monai, which does not support it",
        "autoencoder.implementation",
    )
    return Problem(where, found, "", f"leave it out, or set {implementation}: lean", (implementation,))


def _ldm(ldm: LdmSettings) -> Problems:
    unet, scheduler, sampling = ldm.unet, ldm.scheduler, ldm.sampling
    attending = (*unet.attention_levels[:-1], True)  # the middle block uses the last level's heads
    # Lists of different lengths are reported as such.
    for channels, attends, head in zip(unet.num_channels, attending, unet.head_channels, strict=False):
        if attends and (head == 0 or channels % head):
            found = f"{head} does not divide the {channels} channels of a level with attention"
            others = ("ldm.unet.num_channels", "ldm.unet.attention_levels")
            yield Problem("ldm.unet.num_head_channels", found, _divisors(channels), "set one of them", others)
    fits = ("rflow", "heun", "dpmpp_2m") if scheduler.type == "rflow" else ("ddim", "ddpm", "dpmpp_2m")
    if sampling.sampler not in fits:
        found = f"{sampling.sampler} cannot sample from scheduler type {scheduler.type}"
        allowed = f"allowed: {', '.join(fits)}"
        yield Problem("ldm.sampling.sampler", found, allowed, f"set {fits[0]}", ("ldm.scheduler.type",))
    if scheduler.time_shift != 1 and scheduler.type != "rflow":
        found = f"{scheduler.time_shift} with scheduler type ddpm"
        yield Problem("ldm.scheduler.time_shift", found, "allowed: 1", "set 1, or type: rflow", ("ldm.scheduler.type",))
    most, asked = scheduler.num_train_timesteps, sampling.num_inference_steps
    if asked > most:
        found, sources = f"{asked} is above num_train_timesteps ({most})", ("ldm.scheduler.num_train_timesteps",)
        yield Problem("ldm.sampling.num_inference_steps", found, f"allowed: 1 to {most}", "set fewer", sources)


def _divisors(*numbers: int) -> str:
    common = math.gcd(*numbers)
    return "allowed: " + ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)


def nearest_multiples(grid: Sequence[float], factors: Sequence[int]) -> tuple[int, ...]:
    """Return the grid nearest to `grid` whose axes are multiples of their `factors`."""
    return tuple(max(factor, factor * round(axis / factor)) for axis, factor in zip(grid, factors, strict=True))
