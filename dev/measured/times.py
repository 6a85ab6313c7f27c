"""Times of real CPU steps beside the times that their operators predict, for eight variants of one step.

CPU seconds of one thread, the least of several rounds. Each round takes the variants in turn, so that a busy machine
changes all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from memory.predict.prediction import fullest_step
from settings import Settings

TRAINING = "autoencoder.training"
ROUNDS = 3
_CHECKPOINTED = {f"{TRAINING}.use_gradient_checkpointing": True}
_KINDS: dict[str, dict[str, Any]] = {
    "stock": {"autoencoder.implementation": "monai"},
    "lean": {},
    "checkpointed": _CHECKPOINTED,
    "slabs": {**_CHECKPOINTED, f"{TRAINING}.slab_rows": 16},
}
_ATTENTION = {"": (False, False, False), ", attention": (False, False, True)}
_COMMON = {
    "device.type": "cpu",
    "device.mixed_precision": False,
    "data.voxel_size": (64, 64, 32),
    "autoencoder.num_channels": (16, 32, 64),
    "autoencoder.num_res_blocks": 1,
    f"{TRAINING}.gradient_accumulation_steps": 1,
    f"{TRAINING}.use_gradient_checkpointing": False,
}


def variants() -> dict[str, Settings]:
    """Return the settings of the eight variants by name."""
    return {
        kind + attention: Settings().with_overrides({**_COMMON, **changes, "autoencoder.attention_levels": levels})
        for attention, levels in _ATTENTION.items()
        for kind, changes in _KINDS.items()
    }


def compare(only: str = "") -> Iterator[dict[str, Any]]:
    """Yield the measured and the predicted seconds of each variant."""
    import torch

    from memory.predict.step import track_step

    torch.set_num_threads(1)
    chosen = {name: settings for name, settings in variants().items() if only in name}
    measured = _measure(chosen)
    for name, settings in chosen.items():
        predicted = track_step(settings, "autoencoder", cuda=False).calls.seconds(clock=time.process_time)
        yield {"name": name, "seconds": [round(measured[name], 4), round(predicted, 4)]}


def _measure(chosen: dict[str, Settings]) -> dict[str, float]:
    """Return the least CPU seconds of a full step of each variant; kernels are prepared in a first round."""
    from memory.predict.step import build_step

    steps = {name: build_step(settings, "autoencoder") for name, settings in chosen.items()}
    least = dict.fromkeys(chosen, float("inf"))
    for number in range(ROUNDS + 1):
        for name, step in steps.items():
            batch, full = step.example_batch(1), fullest_step(chosen[name], "autoencoder")
            start = time.process_time()
            step([batch], full + number)
            if number:
                least[name] = min(least[name], time.process_time() - start)
    return least
