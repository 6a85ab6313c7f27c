"""The tables of docs/memory_guide.md; its words are written by hand."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from memory.predict.prediction import Prediction, Stage
from scripts.dev.documents.predictions import Predictions, gib, hours, markdown
from settings import Settings, load_settings

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
Changes = dict[str, Any]
Points = dict[str, Changes]
"""Configs by the name that a table gives them, each as its changes to the base."""


def training(**changes: Any) -> Changes:
    """Return changes to the training of the autoencoder."""
    return {f"autoencoder.training.{name}": value for name, value in changes.items()}


def perceptual(**changes: Any) -> Changes:
    """Return changes to the perceptual loss."""
    return training(**{f"perceptual.{name}": value for name, value in changes.items()})


def channels(*count: int) -> Changes:
    """Return the channels of the autoencoder's levels."""
    return {"autoencoder.num_channels": count}


AMP: Changes = {"device.mixed_precision": True}
LEAN: Changes = {"autoencoder.implementation": "lean"}
USUAL = AMP | LEAN
CHECKPOINTED = training(use_gradient_checkpointing=True)
SPARING = USUAL | CHECKPOINTED
NESTED = training(use_nested_checkpointing=True)
OFFLOAD = training(use_gradient_checkpointing_offload=True, use_nested_checkpointing=False)
INT8 = training(checkpoint_dtype="int8")
NO_PERCEPTUAL = training(use_perceptual_loss=False)
SMALL_DISCRIMINATOR = training(**{"discriminator.num_layers_d": 2, "discriminator.num_channels": 16})
NO_ATTENTION: Changes = {"autoencoder.attention_levels": (False, False, False)}
PIXEL: Changes = {"ldm.training.pixel_loss.weight": 0.1}
IN_SLABS = SPARING | training(slab_rows=8)


def base_settings() -> Settings:
    """Return 256x256x64 as people first try it: stock blocks, fp32, perceptual loss, a full discriminator."""
    return Settings.model_validate(
        {
            "name": "guide",
            "data": {"voxel_size": [256, 256, 64]},
            "autoencoder": {
                "implementation": "monai",
                "num_channels": [32, 64, 64],
                "attention_levels": [False, False, True],
                "training": {
                    "batch_size": 1,
                    "gradient_accumulation_steps": 1,
                    "use_gradient_checkpointing": False,
                    "use_perceptual_loss": True,
                    "perceptual": {"network": "lpips-squeeze"},
                    "discriminator": {"num_layers_d": 3, "num_channels": 32},
                },
            },
            "ldm": {"training": {"batch_size": 4}},
            "device": {"mixed_precision": False},
        }
    )


LADDERS: dict[str, Points] = {
    "ladder": {
        "stock MONAI with SDPA, fp32": {},
        "+ mixed precision (bf16)": AMP,
        "+ lean blocks": LEAN,
        "+ checkpointing, highest level": CHECKPOINTED | training(checkpoint_levels=1),
        "+ checkpointing, all levels": CHECKPOINTED | training(checkpoint_levels="all"),
        "+ nested checkpointing": NESTED,
        "+ slabs of 32 rows": training(slab_rows=32),
        "+ slabs of 16 rows": training(slab_rows=16),
        "+ slabs of 8 rows": training(slab_rows=8),
        "+ offload instead of nesting": OFFLOAD,
        "+ perceptual loss one slice at a time": perceptual(chunk_size=1),
        "+ no perceptual loss": NO_PERCEPTUAL,
        "+ smaller discriminator": SMALL_DISCRIMINATOR,
        "+ channels [16, 32, 64]": channels(16, 32, 64),
    },
    "rules of thumb": {
        "stock MONAI with SDPA, fp32, batch 2": training(batch_size=2, gradient_accumulation_steps=1),
        "+ mixed precision (bf16)": AMP,
        "+ batch 1, accumulated twice": training(batch_size=1, gradient_accumulation_steps=2),
        "+ no perceptual loss": NO_PERCEPTUAL,
        "+ channels [16, 32, 64]": channels(16, 32, 64),
        "+ MONAI's own checkpointing": CHECKPOINTED,
        "+ smaller discriminator": SMALL_DISCRIMINATOR,
        "+ no attention": NO_ATTENTION,
        "+ grid 128x128x64": {"data.voxel_size": (128, 128, 64)},
    },
}
"""Cumulative: each row keeps the changes above it."""

TECHNIQUES: dict[str, Points] = {
    "mixed precision": {
        "stock blocks, fp32": {},
        "stock blocks, bf16": AMP,
        "lean blocks, fp32": LEAN,
        "lean blocks, bf16": USUAL,
    },
    "lean blocks": {"stock blocks with SDPA": AMP, "lean blocks": USUAL},
    "batch size": {
        "batch 4": USUAL | training(batch_size=4, gradient_accumulation_steps=1),
        "batch 2, accumulated 2": USUAL | training(batch_size=2, gradient_accumulation_steps=2),
        "batch 1, accumulated 4": USUAL | training(batch_size=1, gradient_accumulation_steps=4),
    },
    "checkpointing": {
        "lean, none": USUAL,
        "MONAI's own, stock blocks": AMP | CHECKPOINTED,
        "lean, highest level": USUAL | CHECKPOINTED | training(checkpoint_levels=1),
        "lean, two highest levels": USUAL | CHECKPOINTED | training(checkpoint_levels=2),
        "lean, all levels": SPARING,
        "lean, all levels, nested": SPARING | NESTED,
    },
    "slabs": {
        "checkpointing, nested": SPARING | NESTED,
        "slabs of 32 rows": SPARING | training(slab_rows=32),
        "slabs of 16 rows": SPARING | training(slab_rows=16),
        "slabs of 8 rows": IN_SLABS,
        "slabs of 8 rows, offload": IN_SLABS | OFFLOAD,
        "slabs of 8 rows, no checkpointing": USUAL | training(slab_rows=8),
    },
    "offload": {
        "checkpointing": SPARING,
        "checkpointing, nested": SPARING | NESTED,
        "checkpointing, offload": SPARING | OFFLOAD,
    },
    "8 bits": {
        "checkpointing": SPARING,
        "checkpointing, int8": SPARING | INT8,
        "checkpointing, offload": SPARING | OFFLOAD,
        "checkpointing, offload, int8": SPARING | OFFLOAD | INT8,
    },
    "perceptual loss": {
        "off, in slabs of 8 rows like the rows below": IN_SLABS | NO_PERCEPTUAL,
        "lpips-squeeze, 8 slices at once": IN_SLABS,
        "lpips-squeeze, one slice at a time": IN_SLABS | perceptual(chunk_size=1),
        "lpips-vgg, 8 slices at once": IN_SLABS | perceptual(network="lpips-vgg"),
        "lpips-vgg, one slice at a time": IN_SLABS | perceptual(network="lpips-vgg", chunk_size=1),
        "medicalnet-resnet10": IN_SLABS | perceptual(network="medicalnet-resnet10"),
        "structural": IN_SLABS | perceptual(network="structural"),
    },
    "channels": {
        "[32, 64, 64]": USUAL,
        "[16, 32, 64]": USUAL | channels(16, 32, 64),
        "[32, 64, 128]": USUAL | channels(32, 64, 128),
        "[16, 32, 32]": USUAL | channels(16, 32, 32),
        "[16, 32, 32], no residual blocks": USUAL | channels(16, 32, 32) | {"autoencoder.num_res_blocks": 0},
    },
    "discriminator": {
        "3 layers, 32 channels": SPARING,
        "2 layers, 16 channels": SPARING | SMALL_DISCRIMINATOR,
    },
    "attention": {
        "lowest level": SPARING,
        "two levels": SPARING | {"autoencoder.attention_levels": (False, True, True)},
        "none": SPARING | NO_ATTENTION,
    },
    "grid": {
        "256x256x64": SPARING,
        "128x128x64": SPARING | {"data.voxel_size": (128, 128, 64)},
        "patches of 64x64x64": SPARING | {"data.patch_size": (64, 64, 64)},
    },
    "pixel loss": {
        "no pixel loss": USUAL,
        "4 volumes at once, stock decoder": AMP | PIXEL | {"ldm.training.pixel_loss.chunk_size": 4},
        "one volume at a time, stock decoder": AMP | PIXEL,
        "4 volumes at once": USUAL | PIXEL | {"ldm.training.pixel_loss.chunk_size": 4},
        "one volume at a time": USUAL | PIXEL,
        "+ only the two highest levels": USUAL | PIXEL | CHECKPOINTED | training(checkpoint_levels=2),
        "+ slabs of 8 rows": IN_SLABS | PIXEL,
    },
}
OF_STAGE_2 = ("pixel loss",)

COMBINATIONS = {
    "high_res": ("A", "10 to 14 GB, for 24 GB"),
    "balanced": ("B", "18 to 22 GB, for 32 GB"),
    "quality": ("C, with checkpointing", "for 40 GB and more"),
    "default": ("64^3 preset", "about 8 GB, 5 with mixed precision"),
    "ultra_light": ("ultra light", "6 to 9 GB"),
    "maisi": ("MAISI's networks", "none"),
}
PLAIN = training(use_gradient_checkpointing=False) | perceptual(chunk_size=8)
"""What turns `quality` into combination C as the rules of thumb have it."""


def guide_tables(ask: Predictions) -> dict[str, str]:
    """Return the tables of the guide by the names of their markers."""
    base = base_settings()
    asked: dict[str, dict[str, Future[Prediction]]] = {}
    for name, points in LADDERS.items():
        changes: Changes = {}
        asked[name] = {row: ask(base.with_overrides(changes := changes | change)) for row, change in points.items()}
    for name, points in TECHNIQUES.items():
        stage: Stage = "ldm" if name in OF_STAGE_2 else "autoencoder"
        asked[name] = {row: ask(base.with_overrides(change), stage) for row, change in points.items()}
    combinations = _combinations(ask)
    return {"combinations": combinations, **{name: _table(rows, name in LADDERS) for name, rows in asked.items()}}


def _table(rows: dict[str, Future[Prediction]], is_ladder: bool) -> str:
    """Return a table of peaks, each beside the row above on a ladder and beside the first row elsewhere."""
    lines = []
    base = above = next(iter(rows.values())).result()
    for name, answer in rows.items():
        found = answer.result()
        peak = found.peak_allocated_bytes
        change = "" if found is base else f"{peak / above.peak_allocated_bytes - 1:+.0%}"
        compute = f"{found.flops['total'] / base.flops['total']:.2f}x"
        reserved = (found.peak_reserved_default_bytes, found.peak_reserved_expandable_bytes)
        both = [" / ".join(gib(nbytes, 2) for nbytes in reserved)] if is_ladder else []
        phase = [found.phase] if is_ladder else []
        lines.append([name, gib(peak, 2), change, *both, gib(found.host_bytes, 2), compute, *phase])
        above = found if is_ladder else base
    if is_ladder:
        first, last = ["knob", "peak GiB:", "change:", "reserved GiB, default / expandable:"], ["peak in"]
    else:
        first, last = ["config", "peak GiB:", "against the first row:"], []
    return markdown([*first, "host GiB:", "compute:", *last], lines)


def _combinations(ask: Predictions) -> str:
    asked = []
    for name, (title, rule) in COMBINATIONS.items():
        preset = load_settings(CONFIGS / f"{name}.yaml")
        grid = "x".join(map(str, preset.training_grid))
        where = f"{grid} patches" if preset.data.patch_size else grid
        asked.append((f"`configs/{name}.yaml`", title, rule, where, ask(preset), ask(preset, "ldm")))
        if name == "quality":
            plain = preset.with_overrides(PLAIN)
            title = "C, without checkpointing, chunk_size 8"
            asked.append(("as the rules of thumb have it", title, rule, where, ask(plain), ask(plain, "ldm")))
    lines = []
    for name, title, rule, where, first, second in asked:
        one, two = first.result(), second.result()
        sizes = [gib(nbytes, 2) for nbytes in (one.peak_allocated_bytes, one.required_bytes, two.required_bytes)]
        lines.append([name, title, rule, where, *sizes, f"{hours(one)} + {hours(two)}"])
    columns = ["config", "combination", "rule of thumb", "grid or patch", "peak GiB, stage 1:", "needed GiB, stage 1:"]
    return markdown([*columns, "needed GiB, stage 2:", "hours, stage 1 + stage 2:"], lines)
