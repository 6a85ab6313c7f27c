"""Stage 2: the diffusion U-Net, its training on latents, and sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from settings.conditioning import ConditioningSettings
from settings.section import (
    FREE,
    SAME,
    Blocks,
    Channels,
    Count,
    Decay,
    NetworkSettings,
    PathText,
    PerLevel,
    Rate,
    Section,
    TrainingSettings,
    key,
    section,
    training_key,
)

Heads = Annotated[int, Field(ge=0, le=2**16)]


class UNetSettings(NetworkSettings):
    """The diffusion U-Net."""

    fewest_channels_per_group: ClassVar[int] = 4
    """Timestep and class enter as a constant added to each channel, which normalising single channels would remove."""

    num_channels: PerLevel[Channels] = key((64, 128, 256), "Channels of each level, highest resolution first.")
    num_res_blocks: Blocks | PerLevel[Blocks] = key(
        2, "Residual blocks per level: one number for all levels, or a list."
    )
    attention_levels: PerLevel[bool] = key((False, True, True), "Which levels have attention.")
    num_head_channels: Channels | PerLevel[Heads] = key(
        32, "Channels per attention head: one number for all levels, or a list."
    )
    use_mean_map: bool = key(
        True,
        "Give the network the mean of the training latents as further input channels, which tells it where in the "
        "volume it is; false for weights from elsewhere.",
    )
    resblock_updown: bool = key(False, "Resample inside residual blocks, as in MAISI's U-Net.")
    norm_num_groups: Count | Literal["auto"] = key(
        "auto",
        "GroupNorm groups; auto: the largest number up to 32 that divides every entry of num_channels, with at "
        "least 4 channels per group.",
    )

    @property
    def head_channels(self) -> tuple[int, ...]:
        """Return the channels per attention head of each level, 0 for a level without attention.

        The last level always has a value, because the middle block uses it.
        """
        if isinstance(self.num_head_channels, int):
            attending = (*self.attention_levels[:-1], True)
            return tuple(self.num_head_channels if attends else 0 for attends in attending)
        return self.num_head_channels

    @property
    def downsampling(self) -> int:
        """Return the factor by which each axis shrinks from the latent to the lowest level."""
        return 2 ** (len(self.num_channels) - 1)

    def level_grids(self, grid: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the grids of all levels for a latent of `grid` voxels, padded if they need that."""
        factors = [2**level for level in range(len(self.num_channels))]
        padded = [size + -size % self.downsampling for size in grid]
        return [tuple(size // factor for size in padded) for factor in factors]


class SchedulerSettings(Section):
    """The noise process that the U-Net learns to reverse."""

    type: Literal["ddpm", "rflow"] = key("ddpm", "Denoising diffusion, or rectified flow.")
    num_train_timesteps: int = key(1000, "Number of timesteps in the noise process.", ge=1, le=100_000)
    prediction: Literal["epsilon", "v"] = key("v", "ddpm only: predict the noise or the velocity.")
    schedule: Literal["cosine", "scaled_linear_beta"] = key(
        "cosine", "ddpm only: noise schedule; scaled_linear_beta, from 0.0015 to 0.0195, is that of MONAI and MAISI."
    )
    time_shift: float = key(
        1.0,
        "rflow only: values above 1 move the times of training and of equal sampling steps towards noise, as large "
        "latents need; MAISI's is the cube root of the latent's voxels / 32^3.",
        gt=0,
        le=1000,
    )


class LatentSettings(Section):
    """Caching of latents."""

    cache: Literal["disk", "memory", "none"] = key("disk", "Where the mean of each latent is kept.", SAME)


class PixelLossSettings(Section):
    """A loss on decoded predictions, with gradients through the frozen decoder."""

    weight: float = key(0.0, "Weight of the pixel loss; 0: off.", ge=0)
    chunk_size: Count = key(1, "Volumes to decode at once.", SAME)
    adaptive_chunk: bool = key(False, "Halve the chunk and retry if decoding runs out of memory.", SAME)


class LdmTraining(TrainingSettings):
    """The `ldm.training` section."""

    batch_size: Count = training_key("batch_size", 4)
    max_steps: Count = training_key("max_steps", 50000)
    learning_rate: Rate | Literal["auto"] = training_key("learning_rate", 4e-4)
    ema_decay: Decay | Literal["auto"] = training_key("ema_decay", "auto")
    validate_every: Count = training_key("validate_every", 1000)
    save_every: Count = training_key("save_every", 1000)
    pixel_loss: PixelLossSettings = section(PixelLossSettings, "The pixel loss.")


NUM_PREVIEWS = 4
"""Samples that are drawn at each validation."""


class SamplingSettings(Section):
    """Sampling."""

    sampler: Literal["ddpm", "ddim", "dpmpp_2m", "rflow", "heun"] = key(
        "dpmpp_2m", "ddpm, ddim or dpmpp_2m; for rectified flow rflow (Euler), heun or dpmpp_2m.", FREE
    )
    num_inference_steps: Count = key(25, "Number of steps from noise to latent.", FREE)
    guidance_scale: float = key(1.0, "Values above 1 make samples follow their conditions more closely.", FREE, ge=0)


class LdmSettings(Section):
    """The `ldm` section."""

    autoencoder: PathText | None = key(
        None,
        "Weights of the autoencoder; null: autoencoder.safetensors in the run folder. A trained stage 2 accepts others "
        "only if their encoder is the same.",
        FREE,
    )
    pretrained: PathText | None = key(
        None,
        "Weights of the U-Net to start from, ldm.safetensors of a run or from scripts/import_checkpoint.py; their "
        "normalisation of latents comes with them; null: random weights.",
    )
    unet: UNetSettings = section(UNetSettings, "The diffusion U-Net.")
    scheduler: SchedulerSettings = section(SchedulerSettings, "The noise process.")
    conditioning: ConditioningSettings = section(ConditioningSettings, "What samples are conditioned on.")
    latents: LatentSettings = section(LatentSettings, "Caching of latents.")
    training: LdmTraining = section(LdmTraining, "Training of stage 2.")
    sampling: SamplingSettings = section(SamplingSettings, "Sampling.")
