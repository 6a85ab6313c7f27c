"""Stage 1: the autoencoder, its discriminator and how they are trained."""

from __future__ import annotations

from typing import Literal

from settings.section import (
    SAME,
    BlocksOrZero,
    BlocksPerLevelOrZero,
    Channels,
    ChannelsPerLevel,
    Count,
    CountOrZero,
    Flags,
    PathText,
    Section,
    TrainingSettings,
    key,
    largest_common_divisor,
    section,
)

PerceptualNetwork = Literal["lpips-squeeze", "lpips-alex", "lpips-vgg", "medicalnet-resnet10", "structural"]


class PerceptualSettings(Section):
    """What the perceptual loss compares, and in pieces of which size."""

    network: PerceptualNetwork = key("lpips-squeeze", "structural needs no weights; the others compare features.")
    weights: PathText | None = key(None, "File with the network's weights; null: the torch cache, else a download.")
    slice_fraction: float = key(0.2, "Share of the slices along each axis that one step compares.", gt=0, le=1)
    chunk_size: Count = key(8, "Slices that go through the network at once.", SAME)


class DiscriminatorSettings(Section):
    """The size of the patch discriminator."""

    num_layers_d: int = key(2, "Convolution layers after the first.", ge=1, le=10)
    num_channels: Channels = key(16, "Channels of the first layer; doubled by each further one.")


class AutoencoderTraining(TrainingSettings):
    """The `autoencoder.training` section."""

    gradient_accumulation_steps: Count = key(4, "Micro-batches whose gradients are summed before one update.", SAME)
    use_gradient_checkpointing: bool = key(True, "Recompute each block's activations in backward.", SAME)
    use_gradient_checkpointing_offload: bool = key(
        False, "Keep the blocks' inputs in host memory until backward; implies checkpointing.", SAME
    )
    use_nested_checkpointing: bool | Literal["auto"] = key(
        "auto", "One checkpoint around the encoder's own; auto: with slabs, unless offloaded.", SAME
    )
    checkpoint_levels: Count | Literal["all"] = key(
        "all", "all, or how many of the highest-resolution levels are checkpointed.", SAME
    )
    slab_rows: CountOrZero = key(0, "0: whole; n: the highest-resolution blocks run in slabs of n rows, exactly.", SAME)
    reconstruction_loss: Literal["l1", "l2"] = key("l1", "Mean absolute or mean squared error.")
    kl_weight: float = key(1e-6, "Weight of the KL term, in nats per voxel.", ge=0)
    adversarial_weight: float = key(0.01, "Weight of the adversarial term; 0: no discriminator at all.", ge=0)
    adversarial_start_step: CountOrZero = key(1000, "Step from which the discriminator trains and counts.")
    discriminator_learning_rate: float = key(1e-4, "Adam's step size for the discriminator.", gt=0)
    discriminator: DiscriminatorSettings = section(DiscriminatorSettings, "The patch discriminator.")
    use_perceptual_loss: bool = key(False, "Compare features as well as voxels.")
    perceptual_weight: float = key(0.3, "Weight of the perceptual term.", ge=0)
    perceptual: PerceptualSettings = section(PerceptualSettings, "The perceptual loss.")

    @property
    def checkpoints_blocks(self) -> bool:
        """Return whether blocks are checkpointed: offloading implies it."""
        return self.use_gradient_checkpointing or self.use_gradient_checkpointing_offload

    @property
    def nests_checkpoints(self) -> bool:
        """Return whether the encoder is one more checkpoint around its blocks."""
        if self.use_nested_checkpointing == "auto":
            return self.checkpoints_blocks and self.slab_rows > 0 and not self.use_gradient_checkpointing_offload
        return self.use_nested_checkpointing

    @property
    def uses_discriminator(self) -> bool:
        """Return whether there is an adversarial term."""
        return self.adversarial_weight > 0


class AutoencoderSettings(Section):
    """The `autoencoder` section."""

    implementation: Literal["lean", "monai"] = key("lean", "Our memory-lean blocks, or MONAI's stock ones.", SAME)
    pretrained: PathText | None = key(
        None, "Weights to start from, such as those of scripts/import_checkpoint.py; null: random weights."
    )
    in_channels: Channels = key(1, "Channels of a volume.")
    num_channels: ChannelsPerLevel = key((16, 32, 64), "Channels of each level, highest resolution first.")
    num_res_blocks: BlocksOrZero | BlocksPerLevelOrZero = key(
        2, "Residual blocks a level: one number, or one per level."
    )
    latent_channels: Channels = key(3, "Channels of the latent.")
    norm_num_groups: Count | Literal["auto"] = key("auto", "Groups of each GroupNorm; auto: up to 8 that divide.")
    attention_levels: Flags = key((False, False, True), "Which levels have attention.")
    use_nonlocal_attention: bool | Literal["auto"] = key(
        "auto", "Attention in the middle; auto: only when some level has attention."
    )
    training: AutoencoderTraining = section(AutoencoderTraining, "How stage 1 is trained.")

    @property
    def num_groups(self) -> int:
        """Return the groups of each GroupNorm."""
        return largest_common_divisor(self.num_channels, 8) if self.norm_num_groups == "auto" else self.norm_num_groups

    @property
    def res_blocks(self) -> tuple[int, ...]:
        """Return the number of residual blocks of each level."""
        if isinstance(self.num_res_blocks, int):
            return (self.num_res_blocks,) * len(self.num_channels)
        return self.num_res_blocks

    @property
    def has_middle_attention(self) -> bool:
        """Return whether the encoder and the decoder have attention in their middle."""
        return any(self.attention_levels) if self.use_nonlocal_attention == "auto" else self.use_nonlocal_attention

    @property
    def downsampling(self) -> int:
        """Return by how much each axis shrinks from volume to latent."""
        return 2 ** (len(self.num_channels) - 1)
