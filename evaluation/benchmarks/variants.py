"""The variants: stock MONAI as people use it, and this project with its knobs added one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from settings import Settings


@dataclass(frozen=True)
class Variant:
    """One way to make the same step; `has_matrix` replaces SDPA by MONAI's default attention, the N x N matrix."""

    name: str
    is_ours: bool
    changes: dict[str, Any] = field(default_factory=dict)
    has_matrix: bool = False


_TRAINING = "autoencoder.training"
_STOCK = {"autoencoder.implementation": "monai", f"{_TRAINING}.use_gradient_checkpointing": False}
_LEAN = {**_STOCK, "autoencoder.implementation": "lean"}
_CHECKPOINTED = {**_LEAN, f"{_TRAINING}.use_gradient_checkpointing": True}
STOCK, STOCK_CHECKPOINTED = "stock MONAI, SDPA", "stock MONAI, SDPA, use_checkpoint"
SLAB_ROWS = 8
OUR_OBJECTIVE = (
    "L1 + KL + 0.01 times the least-squares adversarial loss of the raw logits for the autoencoder, the mean of the "
    "two least-squares losses for the discriminator"
)
TUTORIAL_OBJECTIVE = (
    "the same terms with MONAI's LeakyReLU between logits and squares, and the discriminator's loss times 0.01"
)


def variants() -> list[Variant]:
    """Return all variants; a name stands for the same setting in the memory and the time tables."""
    slabs = {f"{_TRAINING}.slab_rows": SLAB_ROWS}
    offload = {f"{_TRAINING}.use_gradient_checkpointing_offload": True, f"{_TRAINING}.use_nested_checkpointing": False}
    return [
        Variant("stock MONAI, default attention", False, _STOCK, has_matrix=True),
        Variant(STOCK, False, _STOCK),
        Variant(STOCK_CHECKPOINTED, False, {**_STOCK, f"{_TRAINING}.use_gradient_checkpointing": True}),
        Variant("ours, lean blocks", True, _LEAN),
        Variant("ours, checkpointing", True, _CHECKPOINTED),
        Variant(f"ours, nested, slabs of {SLAB_ROWS}", True, {**_CHECKPOINTED, **slabs}),
        Variant(f"ours, offload, slabs of {SLAB_ROWS}", True, {**_CHECKPOINTED, **slabs, **offload}),
    ]


def base_settings(grid: tuple[int, ...], mixed_precision: bool, channels: tuple[int, ...] = (16, 32, 64)) -> Settings:
    """Return the step that all variants make: combination A of the memory guide, on a given grid."""
    return Settings.model_validate(
        {
            "name": "benchmark",
            "data": {"voxel_size": grid},
            "autoencoder": {
                "num_channels": channels,
                "norm_num_groups": 8,
                "attention_levels": [False] * (len(channels) - 1) + [True],
                "training": {
                    "batch_size": 1,
                    "gradient_accumulation_steps": 1,
                    "use_perceptual_loss": False,
                    "adversarial_start_step": 0,
                    "discriminator": {"num_layers_d": 2, "num_channels": 16},
                },
            },
            "device": {"mixed_precision": mixed_precision},
        }
    )


def use_default_attention(network: Any) -> int:
    """Switch the attention blocks of a stock network to MONAI's default, which stores the N x N matrix; count them."""
    blocks = [module for module in network.modules() if hasattr(module, "use_flash_attention")]
    for block in blocks:
        block.use_flash_attention = False
    return len(blocks)


def use_matrix_attention(step: Any) -> Any:
    """Switch the autoencoder of a step to MONAI's default attention, and return the step."""
    num_blocks = use_default_attention(step.autoencoder)
    assert num_blocks > 0, "there is no attention to switch"
    return step
