"""The techniques in the order of the guide."""

from __future__ import annotations

from scripts.dev.guide.techniques import (
    AMP,
    CHECKPOINTED,
    FEWER_CHANNELS,
    INT8,
    LEAN,
    NESTED,
    NO_ATTENTION,
    NO_PERCEPTUAL,
    OFFLOAD,
    PIXEL,
    SMALL_DISCRIMINATOR,
    TRAINING,
    Point,
    Technique,
    levels,
    perceptual,
    slabs,
)

IN_SLABS = {**AMP, **LEAN, **CHECKPOINTED, **slabs(8)}

CATALOGUE = (
    Technique(
        "Mixed precision",
        "`device.mixed_precision`, `device.amp_dtype`",
        "halves memory: 5 to 8 GB less",
        (
            Point("stock blocks, fp32", {}),
            Point("stock blocks, bf16", AMP),
            Point("lean blocks, fp32", LEAN),
            Point("lean blocks, bf16", {**LEAN, **AMP}),
        ),
        "Always use it on a GPU with bf16. Under CUDA autocast, stock GroupNorm runs in fp32 and keeps fp32 tensors "
        "for backward, so memory is not halved; the lean blocks keep the 16-bit input instead. With fp16 a loss scaler "
        "is used. The KL term is always computed in fp32.",
        "different mathematics",
    ),
    Technique(
        "Attention through one kernel, lean blocks",
        "`autoencoder.implementation: lean`",
        "a map of 8,192^2 positions is the cost of attention",
        (
            Point("stock blocks, MONAI's default attention", AMP, has_matrix=True),
            Point("stock blocks with SDPA", AMP),
            Point("lean blocks", {**AMP, **LEAN}),
        ),
        "Always; this is the default. Attention runs through `scaled_dot_product_attention`, whose memory grows "
        "linearly with the number of positions, because the attention matrix is never stored. Norm and SiLU are one "
        "function that saves only its input. Both implementations load the same weights.",
    ),
    Technique(
        "Batch size with gradient accumulation",
        f"`{TRAINING}.batch_size`, `.gradient_accumulation_steps`",
        "memory falls in proportion to the batch; accumulation is free",
        (
            Point("batch 4", {**AMP, **LEAN, f"{TRAINING}.batch_size": 4}),
            Point(
                "batch 2, accumulated 2",
                {**AMP, **LEAN, f"{TRAINING}.batch_size": 2, f"{TRAINING}.gradient_accumulation_steps": 2},
            ),
            Point("batch 1, accumulated 4", {**AMP, **LEAN, f"{TRAINING}.gradient_accumulation_steps": 4}),
        ),
        "First: one volume at a time costs no extra compute. Keep batch_size x gradient_accumulation_steps, and the "
        "update is the same, because the discriminator uses instance norm and every loss term is a mean.",
    ),
    Technique(
        "Gradient checkpointing",
        f"`{TRAINING}.use_gradient_checkpointing`, `.checkpoint_levels`, `.use_nested_checkpointing`",
        "30 to 40 % less (elsewhere: 60 to 70 % of the activations), 15 to 30 % slower",
        (
            Point("lean, none", {**AMP, **LEAN}),
            Point("MONAI's own, stock blocks", {**AMP, **CHECKPOINTED}),
            Point("lean, highest level", {**AMP, **LEAN, **levels(1)}),
            Point("lean, two highest levels", {**AMP, **LEAN, **levels(2)}),
            Point("lean, all levels", {**AMP, **LEAN, **CHECKPOINTED}),
            Point("lean, all levels, nested", {**AMP, **LEAN, **CHECKPOINTED, **NESTED}),
        ),
        "When a batch of 1 does not fit. MONAI checkpoints whole networks, so backward recomputes "
        "everything at once; here each block is recomputed on its own. Nested: the whole encoder is a checkpoint too, "
        "and upsampled volumes are computed again; by default on with slabs, unless offloaded. Checkpointing is "
        "active only during training with gradients enabled, and gradients stay bit-identical. In code: "
        "`gradient_checkpointing_enable()` and `gradient_checkpointing_disable()`, which log what they cover.",
    ),
    Technique(
        "Slabs",
        f"`{TRAINING}.slab_rows`",
        "cut a volume into pieces when nothing else helps",
        (
            Point("checkpointing, nested", {**AMP, **LEAN, **CHECKPOINTED, **NESTED}),
            Point("slabs of 32 rows", {**AMP, **LEAN, **CHECKPOINTED, **slabs(32)}),
            Point("slabs of 16 rows", {**AMP, **LEAN, **CHECKPOINTED, **slabs(16)}),
            Point("slabs of 8 rows", {**AMP, **LEAN, **CHECKPOINTED, **slabs(8)}),
            Point("slabs of 8 rows, offload", {**AMP, **LEAN, **CHECKPOINTED, **slabs(8), **OFFLOAD}),
        ),
        "When checkpointing is not enough: blocks at the highest resolution run so many rows of the first axis at a "
        "time. Unlike patches or a sliding window, slabs do not change the result: statistics cover "
        "the whole volume, neighbouring slabs share their borders, and gradients agree with the undivided step up to "
        "rounding. The same slabs decode whole volumes without seams, in less than a third of the memory of an "
        "undivided decode in fp32 (slabs of 8 rows).",
    ),
    Technique(
        "Offload of checkpoint inputs",
        f"`{TRAINING}.use_gradient_checkpointing_offload`",
        "lowers memory further and slows training; only for models with huge activations",
        (
            Point("checkpointing", {**AMP, **LEAN, **CHECKPOINTED}),
            Point("checkpointing, nested", {**AMP, **LEAN, **CHECKPOINTED, **NESTED}),
            Point("checkpointing, offload", {**AMP, **LEAN, **CHECKPOINTED, **OFFLOAD}),
        ),
        "When slabs are not enough and the host has memory to spare: block inputs are kept in pinned host memory and "
        "copied back while backward computes. It replaces nesting, which would recompute what the host already keeps. "
        "Only upsampled volumes, the largest, are computed again instead of copied.",
    ),
    Technique(
        "Checkpoint inputs in 8 bits",
        f"`{TRAINING}.checkpoint_dtype`",
        "halves what checkpoints hold, on the device or the host",
        (
            Point("checkpointing", {**AMP, **LEAN, **CHECKPOINTED}),
            Point("checkpointing, int8", {**AMP, **LEAN, **CHECKPOINTED, **INT8}),
            Point("checkpointing, offload", {**AMP, **LEAN, **CHECKPOINTED, **OFFLOAD}),
            Point("checkpointing, offload, int8", {**AMP, **LEAN, **CHECKPOINTED, **OFFLOAD, **INT8}),
        ),
        "When the same mathematics is not enough, before smaller networks. On small networks in fp32, int8 moved "
        "the gradient by 0.1 to 0.5 %, compared with double precision; bf16 alone moves it by 0.4 to 1.4 % (batches of "
        "1 to 4; a test holds int8 below bf16). The conversions move more bytes than they keep.",
        promise="different mathematics",
    ),
    Technique(
        "Perceptual loss off, or in chunks",
        f"`{TRAINING}.use_perceptual_loss`, `.perceptual.network`, `.perceptual.chunk_size`",
        "300 to 500 MB less without it",
        (
            Point("off, in slabs of 8 rows like the rows below", {**IN_SLABS, **NO_PERCEPTUAL}),
            Point("lpips-squeeze, 8 slices at once", IN_SLABS),
            Point("lpips-squeeze, one slice at a time", {**IN_SLABS, **perceptual(chunk_size=1)}),
            Point("lpips-vgg, 8 slices at once", {**IN_SLABS, **perceptual(network="lpips-vgg")}),
            Point("lpips-vgg, one slice at a time", {**IN_SLABS, **perceptual(network="lpips-vgg", chunk_size=1)}),
            Point("medicalnet-resnet10", {**IN_SLABS, **perceptual(network="medicalnet-resnet10")}),
            Point("structural", {**IN_SLABS, **perceptual(network="structural")}),
        ),
        "Smaller chunks when a large network compares slices: the gradient of a chunk is taken as soon as the chunk is "
        "computed, and nothing of it is kept, so memory follows the chunk and not the number of slices. Checkpointing "
        "the chunks would save no more. `medicalnet-resnet10` and `structural` compare one channel of one volume at a "
        "time whatever the chunk. `structural` needs no weights file. Switching the loss off changes what is learned.",
        "chunks: same mathematics; network and off: different",
    ),
    Technique(
        "Fewer channels",
        "`autoencoder.num_channels`, `autoencoder.num_res_blocks`",
        "30 to 50 % less from [32, 64, 64] to [16, 32, 64]; 90 % fewer parameters from [32, 64, 128] to [16, 32, 32]",
        (
            Point("[32, 64, 64]", {**AMP, **LEAN}),
            Point("[16, 32, 64]", {**AMP, **LEAN, **FEWER_CHANNELS}),
            Point("[32, 64, 128]", {**AMP, **LEAN, "autoencoder.num_channels": (32, 64, 128)}),
            Point("[16, 32, 32]", {**AMP, **LEAN, "autoencoder.num_channels": (16, 32, 32)}),
            Point(
                "[16, 32, 32], no residual blocks",
                {**AMP, **LEAN, "autoencoder.num_channels": (16, 32, 32), "autoencoder.num_res_blocks": 0},
            ),
        ),
        "When the task needs less capacity. Most of the memory depends on the channels of the first level; the "
        "parameters themselves hardly matter.",
        "different mathematics",
    ),
    Technique(
        "Smaller discriminator",
        f"`{TRAINING}.discriminator`",
        "200 to 400 MB less",
        (
            Point("3 layers, 32 channels", {**AMP, **LEAN, **CHECKPOINTED}),
            Point("2 layers, 16 channels", {**AMP, **LEAN, **CHECKPOINTED, **SMALL_DISCRIMINATOR}),
        ),
        "Late. Real and fake volumes pass through the discriminator one after the other, so it rarely causes the peak.",
        "different mathematics",
    ),
    Technique(
        "Less attention",
        "`autoencoder.attention_levels`",
        "500 MB and more",
        (
            Point("lowest level", {**AMP, **LEAN, **CHECKPOINTED}),
            Point("two levels", {**AMP, **LEAN, **CHECKPOINTED, "autoencoder.attention_levels": (False, True, True)}),
            Point("none", {**AMP, **LEAN, **CHECKPOINTED, **NO_ATTENTION}),
        ),
        "For speed rather than memory: the kernel stores nothing large, but its compute grows with the square of the "
        "number of positions. If all levels are off there is no attention at all, not even in the middle, unless "
        "`autoencoder.use_nonlocal_attention` is true.",
        "different mathematics",
    ),
    Technique(
        "Smaller grid, or patches",
        "`data.voxel_size`, `data.patch_size`",
        "the last resort: 256 to 128, or blocks of the volume",
        (
            Point("256x256x64", {**AMP, **LEAN, **CHECKPOINTED}),
            Point("128x128x64", {**AMP, **LEAN, **CHECKPOINTED, "data.voxel_size": (128, 128, 64)}),
            Point("patches of 64x64x64", {**AMP, **LEAN, **CHECKPOINTED, "data.patch_size": (64, 64, 64)}),
        ),
        "The last resort, after the ladder. Memory is proportional to the number of voxels.",
        "different mathematics",
    ),
    Technique(
        "A loss on decoded volumes in stage 2",
        "`ldm.training.pixel_loss`",
        "chunks bound the number of volumes, not the decoder's activations; checkpointing the two highest levels saves "
        "50 to 70 % at 20 to 30 % of the time",
        (
            Point("no pixel loss", {**AMP, **LEAN}),
            Point("4 volumes at once, stock decoder", {**AMP, **PIXEL, "ldm.training.pixel_loss.chunk_size": 4}),
            Point("one volume at a time, stock decoder", {**AMP, **PIXEL}),
            Point("4 volumes at once", {**AMP, **LEAN, **PIXEL, "ldm.training.pixel_loss.chunk_size": 4}),
            Point("one volume at a time", {**AMP, **LEAN, **PIXEL}),
            Point("+ only the two highest levels", {**AMP, **LEAN, **PIXEL, **levels(2)}),
            Point("+ slabs of 8 rows", {**AMP, **LEAN, **PIXEL, **CHECKPOINTED, **slabs(8)}),
        ),
        "Only when latents alone do not give enough detail. The decoder is frozen, but gradients pass through it, so "
        "it is always checkpointed here, block by block (the stock decoder as a whole). The levels and slabs are those "
        "of `autoencoder.training`.",
        "chunks, checkpointing and slabs: same mathematics; the loss itself: different",
        stage="ldm",
    ),
)
