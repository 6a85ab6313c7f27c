"""The variants: stock MONAI as people use it, and this project with its knobs added one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from settings import Settings


@dataclass(frozen=True)
class Variant:
    """One way to make the same step; `has_matrix` replaces SDPA by MONAI's default attention, the N x N matrix."""

    name: str
    is_ours: bool
    changes: dict[str, Any]
    has_matrix: bool = False


STOCK, STOCK_CHECKPOINTED = "stock MONAI, SDPA", "stock MONAI, SDPA, use_checkpoint"
_TRAINING = "autoencoder.training"
_STOCK = {"autoencoder.implementation": "monai", f"{_TRAINING}.use_gradient_checkpointing": False}
_LEAN = {**_STOCK, "autoencoder.implementation": "lean"}
_CHECKPOINTED = {f"{_TRAINING}.use_gradient_checkpointing": True}
_SLABS = {**_LEAN, **_CHECKPOINTED, f"{_TRAINING}.slab_rows": 8}
_OFFLOAD = {f"{_TRAINING}.use_gradient_checkpointing_offload": True, f"{_TRAINING}.use_nested_checkpointing": False}

VARIANTS = (
    Variant("stock MONAI, default attention", False, _STOCK, has_matrix=True),
    Variant(STOCK, False, _STOCK),
    Variant(STOCK_CHECKPOINTED, False, {**_STOCK, **_CHECKPOINTED}),
    Variant("ours, lean blocks", True, _LEAN),
    Variant("ours, checkpointing", True, {**_LEAN, **_CHECKPOINTED}),
    Variant("ours, nested, slabs of 8", True, _SLABS),
    Variant("ours, offload, slabs of 8", True, {**_SLABS, **_OFFLOAD}),
)


def base_settings(grid: tuple[int, ...]) -> Settings:
    """Return the step that all variants make: combination A of the memory guide, on a given grid."""
    training = {
        "batch_size": 1,
        "gradient_accumulation_steps": 1,
        "use_perceptual_loss": False,
        "adversarial_start_step": 0,
        "discriminator": {"num_layers_d": 2, "num_channels": 16},
    }
    autoencoder = {"num_channels": (16, 32, 64), "norm_num_groups": 8, "attention_levels": [False, False, True]}
    return Settings.model_validate(
        {
            "name": "benchmark",
            "data": {"voxel_size": grid},
            "autoencoder": {**autoencoder, "training": training},
            "device": {"mixed_precision": True},
        }
    )


def use_matrix_attention(network: Any) -> None:
    """Switch the attention blocks of a stock network to MONAI's default, which stores the N x N matrix."""
    blocks = [module for module in network.modules() if hasattr(module, "use_flash_attention")]
    assert blocks, "there is no attention to switch"
    for block in blocks:
        block.use_flash_attention = False
