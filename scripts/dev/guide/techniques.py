"""What the memory guide measures: every technique, the rule of thumb about it, and the configs that test the rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memory.predict.prediction import Stage
from settings import Settings

TRAINING = "autoencoder.training"
Changes = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One config: a name for the table, and its changes against the base of its table.

    has_matrix: with MONAI's default attention, which no config here can express.
    """

    name: str
    changes: Changes
    has_matrix: bool = False


@dataclass(frozen=True)
class Technique:
    """A knob: the rule of thumb, the configs before and after it, and when to turn it."""

    title: str
    keys: str
    rule: str
    points: tuple[Point, ...]
    when: str
    promise: str = "same mathematics"
    stage: Stage = "autoencoder"


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


AMP: Changes = {"device.mixed_precision": True}
LEAN: Changes = {"autoencoder.implementation": "lean"}
CHECKPOINTED: Changes = {f"{TRAINING}.use_gradient_checkpointing": True}
NESTED: Changes = {f"{TRAINING}.use_nested_checkpointing": True}
OFFLOAD: Changes = {
    f"{TRAINING}.use_gradient_checkpointing_offload": True,
    f"{TRAINING}.use_nested_checkpointing": False,
}
INT8: Changes = {f"{TRAINING}.checkpoint_dtype": "int8"}
NO_PERCEPTUAL: Changes = {f"{TRAINING}.use_perceptual_loss": False}
SMALL_DISCRIMINATOR: Changes = {
    f"{TRAINING}.discriminator.num_layers_d": 2,
    f"{TRAINING}.discriminator.num_channels": 16,
}
FEWER_CHANNELS: Changes = {"autoencoder.num_channels": (16, 32, 64)}
NO_ATTENTION: Changes = {"autoencoder.attention_levels": (False, False, False)}
PIXEL: Changes = {"ldm.training.pixel_loss.weight": 0.1}


def slabs(rows: int) -> Changes:
    """Return the change to slabs of so many rows."""
    return {f"{TRAINING}.slab_rows": rows}


def perceptual(**changes: Any) -> Changes:
    """Return changes to the perceptual loss."""
    return {f"{TRAINING}.perceptual.{name}": value for name, value in changes.items()}


def levels(count: int) -> Changes:
    """Return checkpointing of the highest-resolution levels only."""
    return {**CHECKPOINTED, f"{TRAINING}.checkpoint_levels": count}


SAME_FIRST = (
    Point("stock MONAI with SDPA, fp32", {}),
    Point("+ mixed precision (bf16)", AMP),
    Point("+ lean blocks", LEAN),
    Point("+ checkpointing, highest level", levels(1)),
    Point("+ checkpointing, all levels", {f"{TRAINING}.checkpoint_levels": "all"}),
    Point("+ nested checkpointing", NESTED),
    Point("+ slabs of 32 rows", slabs(32)),
    Point("+ slabs of 16 rows", slabs(16)),
    Point("+ slabs of 8 rows", slabs(8)),
    Point("+ offload instead of nesting", OFFLOAD),
    Point("+ perceptual loss one slice at a time", perceptual(chunk_size=1)),
    Point("+ no perceptual loss", NO_PERCEPTUAL),
    Point("+ smaller discriminator", SMALL_DISCRIMINATOR),
    Point("+ channels [16, 32, 64]", FEWER_CHANNELS),
)
"""Cumulative: each row keeps the changes above it. Precision comes early because every budget assumes it."""

RULES_ORDER = (
    Point("stock MONAI with SDPA, fp32, batch 2", {f"{TRAINING}.batch_size": 2}),
    Point("+ mixed precision (bf16)", AMP),
    Point("+ batch 1, accumulated twice", {f"{TRAINING}.batch_size": 1, f"{TRAINING}.gradient_accumulation_steps": 2}),
    Point("+ no perceptual loss", NO_PERCEPTUAL),
    Point("+ channels [16, 32, 64]", FEWER_CHANNELS),
    Point("+ MONAI's own checkpointing", CHECKPOINTED),
    Point("+ smaller discriminator", SMALL_DISCRIMINATOR),
    Point("+ no attention", NO_ATTENTION),
    Point("+ grid 128x128x64", {"data.voxel_size": (128, 128, 64)}),
)
