"""Stage 1: the autoencoder, its discriminator and their training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from settings.section import (
    MOST_LEVELS,
    SAME,
    BlocksOrZero,
    Channels,
    Count,
    CountOrZero,
    NetworkSettings,
    PathText,
    PerAxis,
    PerLevel,
    Section,
    TrainingSettings,
    key,
    section,
    training_key,
)

OCCUPIED_THRESHOLD = 0.1
"""Share of the intensity range above which a voxel of a mostly empty volume is occupied."""
PerceptualNetwork = Literal["lpips-squeeze", "lpips-alex", "lpips-vgg", "medicalnet-resnet10", "structural"]
Strides = PerAxis[Annotated[int, Field(ge=1, le=2)]]
StridesPerLevel = Annotated[tuple[Strides, ...], Field(strict=False, max_length=MOST_LEVELS - 1)]


class PerceptualSettings(Section):
    """The network behind the perceptual loss, and how much it compares per step."""

    network: PerceptualNetwork = key("structural", "What compares the volumes; structural needs no weights file.")
    weights: PathText | None = key(None, "File with the network's weights; null: torch's cache, or a download.")
    slice_fraction: float = key(0.2, "Fraction of the slices along each axis that each step compares.", gt=0, le=1)
    chunk_size: Count = key(8, "Slices per forward pass of the network.", SAME)


class DiscriminatorSettings(Section):
    """The patch discriminator."""

    num_layers_d: int = key(3, "Convolution layers after the first.", ge=1, le=10)
    num_channels: Channels = key(32, "Channels of the first layer; each further layer doubles them.")


class AutoencoderTraining(TrainingSettings):
    """The `autoencoder.training` section."""

    batch_size: Count = training_key("batch_size", 4)
    use_nested_checkpointing: bool | Literal["auto"] = key(
        "auto",
        "Checkpoint the whole encoder as well as its blocks, and compute upsampled volumes again; auto: with slabs and "
        "without offload.",
        SAME,
    )
    checkpoint_levels: Count | Literal["all"] = key(
        "all", "How many levels to checkpoint, highest resolution first.", SAME
    )
    slab_rows: Literal[0] | Annotated[int, Field(ge=2, lt=2**31)] = key(  # one row is too thin for its halo
        0,
        "Run the highest-resolution blocks this many rows of the first axis at a time, with the same result; 0: whole.",
        SAME,
    )
    offload_levels: CountOrZero = key(
        0,
        "Keep volumes and gradients of this many levels, highest resolution first, in host memory; the device has "
        "slabs of slab_rows rows of them, or of 16.",
        SAME,
    )
    trainable: Literal["all", "decoder"] = key(
        "all",
        "decoder: the encoder keeps its pretrained weights, so that a trained stage 2 stays valid, and needs no memory "
        "for activations; the KL term, which then has no gradient, is left out.",
    )
    reconstruction_loss: Literal["l1", "l2"] = key("l1", "Mean absolute or mean squared error.")
    occupied_weight: float = key(
        1.0,
        "How many times the error of an occupied voxel counts, one that differs from the background of its channel by "
        "more than a tenth of the range; above 1 for mostly empty volumes, such as radar or occupancy grids, which are "
        "then also validated by IoU and Chamfer distance.",
        ge=1,
    )
    edge_weight: float = key(
        0.0, "Weight of the error, l1 or l2 too, of differences between neighbouring voxels; 0: no such term.", ge=0
    )
    kl_weight: float = key(
        1e-6,
        "Weight of the KL term, in nats per voxel; larger: latents that stage 2 learns more easily, blurrier volumes.",
        ge=0,
    )
    adversarial_weight: float = key(0.01, "Weight of the adversarial term; 0: no discriminator.", ge=0)
    adversarial_start_step: CountOrZero = key(1000, "Step at which the discriminator and the adversarial term start.")
    discriminator_learning_rate: float = key(1e-4, "Adam's step size for the discriminator.", gt=0)
    discriminator: DiscriminatorSettings = section(DiscriminatorSettings, "The patch discriminator.")
    use_perceptual_loss: bool = key(True, "Add a perceptual loss to the voxel loss.")
    perceptual_weight: float = key(0.3, "Weight of the perceptual term.", ge=0)
    perceptual: PerceptualSettings = section(PerceptualSettings, "The perceptual loss.")

    @property
    def nests_checkpoints(self) -> bool:
        """Return whether the whole encoder is checkpointed around its blocks."""
        if self.use_nested_checkpointing == "auto":
            return self.checkpoints_blocks and self.slab_rows > 0 and not self.use_gradient_checkpointing_offload
        return self.use_nested_checkpointing

    @property
    def uses_discriminator(self) -> bool:
        """Return whether the loss has an adversarial term."""
        return self.adversarial_weight > 0

    @property
    def occupancy_threshold(self) -> float | None:
        """Return the share of the range above which a voxel is occupied, if volumes are mostly empty, else None."""
        return OCCUPIED_THRESHOLD if self.occupied_weight > 1 else None

    @property
    def trains_encoder(self) -> bool:
        """Return whether the encoder is trained too."""
        return self.trainable == "all"


class AutoencoderSettings(NetworkSettings):
    """The `autoencoder` section."""

    fewest_channels_per_group: ClassVar[int] = 2

    implementation: Literal["lean", "monai"] = key("lean", "Memory-lean blocks, or MONAI's stock blocks.", SAME)
    pretrained: PathText | None = key(
        None, "Weights to start from, for example from scripts/import_checkpoint.py; null: random weights."
    )
    initialisation: Literal["random", "haar"] = key(
        "random",
        "First weights: all random, or such that the latent starts as means and differences of neighbouring voxels.",
    )
    in_channels: Channels = key(1, "Channels of a volume.")
    variant: Literal["monai", "monai_unit", "maisi"] = key(
        "monai",
        "monai: volumes in [-1, 1] and a decoder that repeats voxels; monai_unit: the same network for volumes in "
        "[0, 1], as some published weights expect; maisi: in [0, 1], and a decoder that interpolates, as in MAISI.",
    )
    num_channels: PerLevel[Channels] = key((32, 64, 64), "Channels of each level, highest resolution first.")
    strides: Literal[2] | StridesPerLevel = key(
        2,
        "Factors by which each downsampling shrinks the axes: 2 for all of them, or a list of triples of 1 and 2, "
        "such as [[2, 2, 1], [2, 2, 2]] for three levels and thick slices along the last axis.",
    )
    num_res_blocks: BlocksOrZero | PerLevel[BlocksOrZero] = key(
        2, "Residual blocks per level: one number for all levels, or a list."
    )
    latent_channels: Channels = key(3, "Channels of the latent.")
    bottleneck: Literal["kl", "vq"] = key(
        "kl",
        "kl: a Gaussian latent; vq: each position is the nearest of a set of learned vectors, and there is no KL term.",
    )
    codebook_size: int = key(2048, "bottleneck vq only: number of learned vectors.", ge=2, le=2**16)
    norm_num_groups: Count | Literal["auto"] = key(
        "auto",
        "GroupNorm groups; auto: the largest number up to 32 that divides every entry of num_channels, with at least 2 "
        "channels per group.",
    )
    attention_levels: PerLevel[bool] = key((False, False, True), "Which levels have attention.")
    use_nonlocal_attention: bool | Literal["auto"] = key(
        "auto", "Attention in the middle block; auto: only if a level has attention."
    )
    training: AutoencoderTraining = section(AutoencoderTraining, "Training of stage 1.")

    @property
    def value_range(self) -> Literal["symmetric", "unit"]:
        """Return the range of volumes inside the network: [-1, 1] or [0, 1]."""
        return "symmetric" if self.variant == "monai" else "unit"

    @property
    def upsampling(self) -> Literal["nearest", "trilinear"]:
        """Return how the decoder enlarges volumes."""
        return "trilinear" if self.variant == "maisi" else "nearest"

    @property
    def has_middle_attention(self) -> bool:
        """Return whether the middle blocks of encoder and decoder have attention."""
        return any(self.attention_levels) if self.use_nonlocal_attention == "auto" else self.use_nonlocal_attention

    @property
    def most_offload_levels(self) -> int:
        """Return how many levels may be in host memory: neither the last one nor those from the first attention on."""
        attending = [level for level, attends in enumerate(self.attention_levels) if attends]
        return min([len(self.num_channels) - 1, *attending])

    @property
    def num_codes(self) -> int | None:
        """Return how many values a position of the latent can take; None if it is not quantised."""
        return self.codebook_size if self.bottleneck == "vq" else None

    @property
    def level_strides(self) -> tuple[tuple[int, ...], ...]:
        """Return the strides of each downsampling, which leads from one level to the next, along the three axes."""
        return ((2, 2, 2),) * (len(self.num_channels) - 1) if self.strides == 2 else self.strides

    @property
    def has_stock_strides(self) -> bool:
        """Return whether every downsampling halves all three axes, as MONAI's does."""
        return all(stride == 2 for strides in self.level_strides for stride in strides)

    @property
    def downsampling(self) -> tuple[int, ...]:
        """Return the factors by which the three axes shrink from volume to latent."""
        return tuple(math.prod(strides[axis] for strides in self.level_strides) for axis in range(3))

    def level_grids(self, grid: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the grids of all levels for a volume of `grid` voxels; the last one is the latent's."""
        grids = [tuple(grid)]
        for strides in self.level_strides:
            grids.append(tuple(size // stride for size, stride in zip(grids[-1], strides, strict=True)))
        return grids

    def latent_grid(self, grid: Sequence[int]) -> tuple[int, ...]:
        """Return the grid of the latent of a volume of `grid` voxels."""
        return self.level_grids(grid)[-1]
