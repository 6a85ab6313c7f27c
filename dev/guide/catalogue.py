"""The techniques in the order of the guide."""

from __future__ import annotations

from dev.guide.techniques import (
    AMP,
    CHECKPOINTED,
    FEWER_CHANNELS,
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
        "Always on a GPU with bf16. Stock GroupNorm runs in fp32 under CUDA autocast and keeps fp32 for backward: "
        "that is why the half does not appear; the lean blocks keep the 16-bit input instead. fp16 gets a loss scaler; "
        "the KL term is always computed in fp32.",
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
        "Always; it is the default. Attention runs through `scaled_dot_product_attention`, whose memory is linear in "
        "the positions, so the map never exists. Norm and SiLU are one function that saves its input only. Weights "
        "move between both implementations untouched.",
    ),
    Technique(
        "Gradient checkpointing",
        f"`{TRAINING}.use_gradient_checkpointing`, `.checkpoint_levels`",
        "30 to 40 % less (elsewhere: 60 to 70 % of the activations), 15 to 30 % slower",
        (
            Point("lean, none", {**AMP, **LEAN}),
            Point("MONAI's own, stock blocks", {**AMP, **CHECKPOINTED}),
            Point("lean, highest level", {**AMP, **LEAN, **levels(1)}),
            Point("lean, two highest levels", {**AMP, **LEAN, **levels(2)}),
            Point("lean, all levels", {**AMP, **LEAN, **CHECKPOINTED}),
            Point("lean, all levels, nested", {**AMP, **LEAN, **CHECKPOINTED, **NESTED}),
        ),
        "First thing to turn on when the step does not fit. Checkpointing whole networks, as MONAI does, brings "
        "everything back at once in backward; block by block it does not. It acts only while training with gradients "
        "on, and gradients stay bit-identical. In code: `gradient_checkpointing_enable()` and "
        "`gradient_checkpointing_disable()`, which log what they cover.",
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
        "When the GPU is full and the host is not: block inputs wait in pinned host memory and come back while "
        "backward computes. It takes the place of nesting, which computes again what the host would keep.",
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
        "For grids at the limit. Unlike patches or a sliding window this changes nothing: statistics are of the whole "
        "volume, borders are shared, gradients agree with the undivided step to rounding. The same slabs decode whole "
        "volumes without seams, in less than a third of the memory of an undivided decode in fp32 (slabs of 8 rows).",
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
        "Before anything that recomputes: one volume at a time costs no extra compute. The update is the same, because "
        "the discriminator uses instance norm and every term is a mean.",
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
        "When the task allows less capacity. The first level's channels decide most of it; parameters hardly count.",
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
        "Late. Real and fake volumes pass through it one after the other here, so it rarely holds the peak.",
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
        "For speed, not for memory: the kernel keeps nothing large, but its compute grows with the square of the "
        "positions. All levels off means no attention at all, the middle included, unless "
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
        "Last, after the ladder. Memory follows the number of voxels, nothing else does as strictly.",
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
        "Only when latents alone do not give enough detail. The decoder is frozen, yet gradients pass through it, so "
        "it is always checkpointed here, block by block (the stock decoder as a whole); which levels, and slabs, "
        "follow `autoencoder.training`.",
        "chunks, checkpointing and slabs: same mathematics; the loss itself: different",
        stage="ldm",
    ),
)
