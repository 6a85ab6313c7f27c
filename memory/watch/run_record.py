"""Write a run's memory prediction and its position on the ladder to the run folder, for the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memory.ladder.rungs import build_rungs
from memory.predict.prediction import Prediction, Stage
from runtime.files import write_text
from settings import Settings


def write_memory_record(folder: Path, settings: Settings, stage: Stage, prediction: Prediction | None) -> Path:
    """Write memory_<stage>.json to a run folder and return its path."""
    path = folder / f"memory_{stage}.json"
    values = {
        "prediction": prediction.to_json() if prediction is not None else None,
        "ladder": ladder_position(settings, stage),
    }
    write_text(path, json.dumps(values, indent=1) + "\n")
    return path


def ladder_position(settings: Settings, stage: Stage) -> list[dict[str, Any]]:
    """Return the memory knobs that are on, the config itself, and the rungs below it in the default order."""
    taken = [{"name": name, "state": "taken", "same_mathematics": True} for name in _knobs_on(settings, stage)]
    here = {"name": "as configured", "state": "here", "same_mathematics": True}
    left = [
        {"name": rung.name, "state": "left", "same_mathematics": rung.same_mathematics}
        for rung in build_rungs(settings, stage, "lossless-first")[1:]
    ]
    return [*taken, here, *left]


def _knobs_on(settings: Settings, stage: Stage) -> list[str]:
    if stage == "ldm":
        ldm = settings.ldm.training
        knobs = {
            "latents from the cache": settings.ldm.latents.cache != "none",
            "micro-batch 1": ldm.batch_size == 1,
            "checkpointing of the U-Net": ldm.checkpoints_blocks,
            "U-Net block inputs on the host": ldm.use_gradient_checkpointing_offload,
            "mixed precision": settings.device.mixed_precision,
        }
    else:
        training = settings.autoencoder.training
        knobs = {
            "SDPA and lean blocks": settings.autoencoder.implementation == "lean",
            "micro-batch 1": training.batch_size == 1,
            "checkpointing": training.checkpoints_blocks,
            "nested checkpointing": training.nests_checkpoints,
            f"slabs of {training.slab_rows} rows": training.slab_rows > 0,
            "offload": training.use_gradient_checkpointing_offload,
            "levels in host memory": training.offload_levels > 0,
            "mixed precision": settings.device.mixed_precision,
        }
    return [name for name, is_on in knobs.items() if is_on]
