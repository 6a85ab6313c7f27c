"""The tiny config of both stages that the campaigns train."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

NUM_STEPS = 24

_TRAINING = {"max_steps": NUM_STEPS, "log_every": 1, "validate_every": 8, "save_every": 3, "ema_decay": 0.9}
CONFIG: dict[str, Any] = {
    "name": "campaign",
    "seed": 3,
    "data": {"voxel_size": [16, 16, 16], "num_phantoms": 6, "val_fraction": 0.2, "num_workers": 0},
    "autoencoder": {
        "num_channels": [8, 16],
        "num_res_blocks": 1,
        "norm_num_groups": 4,
        "attention_levels": [False, False],
        "training": {
            **_TRAINING,
            "batch_size": 1,
            "gradient_accumulation_steps": 2,
            "use_gradient_checkpointing": False,
            "adversarial_start_step": 4,
            "discriminator": {"num_layers_d": 1, "num_channels": 8},
        },
    },
    "ldm": {
        "unet": {
            "num_channels": [16, 32],
            "num_res_blocks": 1,
            "attention_levels": [False, True],
            "num_head_channels": 8,
        },
        "training": {**_TRAINING, "batch_size": 2},
        "sampling": {"num_inference_steps": 2, "num_previews": 1},
    },
    "device": {"type": "cpu", "mixed_precision": False},
}


def write_config(folder: Path, num_steps: int = NUM_STEPS) -> None:
    """Write the config as campaign.yaml."""
    import yaml

    values = copy.deepcopy(CONFIG)
    for stage in ("autoencoder", "ldm"):
        values[stage]["training"]["max_steps"] = num_steps
    (folder / "campaign.yaml").write_text(yaml.safe_dump(values))
