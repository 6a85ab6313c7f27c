"""A config whose two stages train in seconds, for tests; it does not follow changes of the recipe."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "name": "tiny",
    "seed": 7,
    "data": {"source": "phantoms:6", "voxel_size": [16, 16, 16], "num_workers": 0, "val_fraction": 0.2},
    "autoencoder": {
        "num_channels": [8, 16],
        "num_res_blocks": 1,
        "norm_num_groups": 4,
        "attention_levels": [False, True],
        "training": {
            "batch_size": 1,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "learning_rate": 1e-3,
            "warmup_steps": 0,
            "learning_rate_decay": "none",
            "use_perceptual_loss": False,
            "use_gradient_checkpointing": False,
            "adversarial_start_step": 1,
            "discriminator": {"num_layers_d": 2, "num_channels": 8},
            "log_every": 1,
            "validate_every": 4,
            "save_every": 2,
        },
    },
    "ldm": {
        "unet": {
            "num_channels": [16, 32],
            "num_res_blocks": 1,
            "attention_levels": [False, True],
            "num_head_channels": 8,
        },
        "scheduler": {"prediction": "epsilon", "schedule": "scaled_linear_beta"},
        "training": {
            "batch_size": 2,
            "max_steps": 4,
            "learning_rate": 1e-4,
            "warmup_steps": 0,
            "learning_rate_decay": "none",
            "ema_decay": 0.999,
            "log_every": 1,
            "validate_every": 4,
            "save_every": 2,
        },
        "sampling": {"sampler": "ddim", "num_inference_steps": 4},
    },
    "device": {"type": "cpu", "mixed_precision": False},
}
