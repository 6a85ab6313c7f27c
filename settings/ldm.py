"""Stage 2: the diffusion U-Net on the autoencoder's latents, and sampling from it."""

from __future__ import annotations

from typing import Literal

from settings.section import (
    FREE,
    SAME,
    Blocks,
    BlocksPerLevel,
    Channels,
    ChannelsPerLevel,
    Count,
    Flags,
    HeadsPerLevel,
    PathText,
    Section,
    TrainingSettings,
    key,
    largest_common_divisor,
    section,
)


class UNetSettings(Section):
    """The diffusion U-Net."""

    num_channels: ChannelsPerLevel = key((64, 128, 256), "Channels of each level, highest resolution first.")
    num_res_blocks: Blocks | BlocksPerLevel = key(2, "Residual blocks a level: one number, or one per level.")
    attention_levels: Flags = key((False, True, True), "Which levels have attention.")
    num_head_channels: Channels | HeadsPerLevel = key(
        32, "Channels of one attention head: one number, or one per level."
    )
    resblock_updown: bool = key(False, "Resample inside residual blocks, as MAISI's U-Net does.")
    norm_num_groups: Count | Literal["auto"] = key(
        "auto", "Groups of each GroupNorm; auto: up to 32 that divide, of at least 4 channels."
    )

    @property
    def num_groups(self) -> int:
        """Return the groups of each GroupNorm.

        A norm of single channels takes away whatever was added to a channel as a whole, which is how timestep and class
        come in: groups of several channels let them pass.
        """
        if self.norm_num_groups == "auto":
            return largest_common_divisor(self.num_channels, max(1, min(32, min(self.num_channels) // 4)))
        return self.norm_num_groups

    @property
    def res_blocks(self) -> tuple[int, ...]:
        """Return the number of residual blocks of each level."""
        if isinstance(self.num_res_blocks, int):
            return (self.num_res_blocks,) * len(self.num_channels)
        return self.num_res_blocks

    @property
    def head_channels(self) -> tuple[int, ...]:
        """Return the channels of one attention head at each level; 0 where the level has no attention.

        The last level always has its own: the middle of the U-Net attends with them.
        """
        if isinstance(self.num_head_channels, int):
            attending = (*self.attention_levels[:-1], True)
            return tuple(self.num_head_channels if attends else 0 for attends in attending)
        return self.num_head_channels

    @property
    def downsampling(self) -> int:
        """Return by how much each axis shrinks from the latent to the lowest level."""
        return 2 ** (len(self.num_channels) - 1)


class SchedulerSettings(Section):
    """The noise process that the U-Net learns to undo."""

    type: Literal["ddpm", "rflow"] = key("ddpm", "Denoising diffusion, or rectified flow.")
    num_train_timesteps: int = key(1000, "Timesteps of the process.", ge=1, le=100_000)
    prediction: Literal["epsilon", "v"] = key("epsilon", "ddpm only: the noise, or the velocity, is predicted.")
    schedule: Literal["linear_beta", "scaled_linear_beta", "cosine"] = key(
        "scaled_linear_beta", "ddpm only: how the noise grows."
    )
    beta_start: float = key(0.0015, "ddpm only: noise variance of the first timestep.", gt=0, lt=1)
    beta_end: float = key(0.0195, "ddpm only: noise variance of the last timestep.", gt=0, lt=1)


class ConditioningSettings(Section):
    """What the samples can be asked to be."""

    type: Literal["none", "class"] = key("none", "none, or the volume's class.")
    num_classes: int = key(0, "Number of classes in the data; needed when the type is class.", ge=0, le=65_536)
    dropout: float = key(0.1, "Share of the labels hidden in training, which guidance needs.", ge=0, lt=1)


class LatentSettings(Section):
    """How volumes become latents."""

    cache: Literal["disk", "memory", "none"] = key("disk", "Where mean and sigma of each volume are kept.", SAME)
    pad: bool = key(False, "Pad latents that the U-Net's levels do not divide, and crop the result back.")


class PixelLossSettings(Section):
    """A loss on the decoded prediction, with gradients through the frozen decoder."""

    weight: float = key(0.0, "Weight of the pixel loss; 0: off.", ge=0)
    chunk_size: Count = key(1, "Volumes decoded at once.", SAME)
    adaptive_chunk: bool = key(False, "Halve the chunk and try again when decoding runs out of memory.", SAME)


class LdmTraining(TrainingSettings):
    """The `ldm.training` section."""

    batch_size: Count = key(4, "Latents in one micro-batch; the memory grows with it.", SAME)
    max_steps: Count = key(
        50000, "Updates after which training ends; fixed for a run whose learning rate decays.", FREE
    )
    ema_decay: float = key(0.999, "Decay of the averaged copy of the weights; 0: no copy.", ge=0, lt=1)
    use_gradient_checkpointing_offload: bool = key(
        False, "Keep the blocks' inputs in host memory until backward; implies checkpointing.", SAME
    )
    pixel_loss: PixelLossSettings = section(PixelLossSettings, "The pixel loss.")

    @property
    def checkpoints_blocks(self) -> bool:
        """Return whether blocks are checkpointed: offloading implies it."""
        return self.use_gradient_checkpointing or self.use_gradient_checkpointing_offload


class SamplingSettings(Section):
    """How volumes are drawn."""

    sampler: Literal["ddpm", "ddim", "rflow"] = key("ddim", "rflow with rectified flow, ddpm or ddim otherwise.", FREE)
    num_inference_steps: Count = key(50, "Steps from noise to latent.", FREE)
    guidance_scale: float = key(1.0, "Above 1: samples follow their class more closely.", FREE, ge=0)
    num_previews: int = key(4, "Samples drawn at each validation.", FREE, ge=0, le=1024)


class LdmSettings(Section):
    """The `ldm` section."""

    autoencoder: PathText | None = key(
        None, "Weights of the autoencoder; null: autoencoder.safetensors of the run folder."
    )
    unet: UNetSettings = section(UNetSettings, "The diffusion U-Net.")
    scheduler: SchedulerSettings = section(SchedulerSettings, "The noise process.")
    conditioning: ConditioningSettings = section(ConditioningSettings, "Class conditioning.")
    latents: LatentSettings = section(LatentSettings, "The latents.")
    training: LdmTraining = section(LdmTraining, "How stage 2 is trained.")
    sampling: SamplingSettings = section(SamplingSettings, "How volumes are drawn.")
