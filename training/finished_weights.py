"""Finished weights: safetensors files with the settings that they were trained with."""

from __future__ import annotations

import logging
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from models.weight_files import load_into, load_weights, save_weights
from settings import AutoencoderSettings, Settings
from storage.run_folder import RunFolder
from training.step import TrainingStep

log = logging.getLogger(__name__)


def ensure_pretrained(autoencoder: AutoencoderSettings) -> None:
    """Raise `CheckpointError` if the weights to start from cannot be read, before anything slow happens."""
    if autoencoder.pretrained is not None:
        load_weights(Path(autoencoder.pretrained))


def load_pretrained(networks: dict[str, nn.Module], path: Path) -> None:
    """Load the autoencoder from `path`, and the other networks from files beside it if those exist; log which."""
    for name, network in networks.items():
        file = path if name == "autoencoder" else path.with_name(f"{name}.safetensors")
        if file != path and not file.exists():
            log.info("%s: not found, so the %s starts from random weights", file, name)
            continue
        load_into(network, file)
        log.info("%s: the %s starts from these weights", file, name)


def export(step: TrainingStep, run: RunFolder, settings: Settings, **metadata: Any) -> None:
    """Write the stage's main network, with averaged weights if there are any, and its settings.

    Log the path and the next command.
    """
    if not step.process.is_first:
        return
    with step.average.swapped_in() if step.average is not None else nullcontext():
        path = run.weights(step.stage)
        save_weights(
            path,
            step.network.state_dict(),
            {"stage": step.stage, "settings": settings.model_dump(mode="json"), **metadata},
        )
    log.info("%s: finished weights of stage %s", path, step.stage)
    following = {
        "autoencoder": f"python train_ldm.py --config {shlex.quote(str(run.config))}",
        "ldm": f"python scripts/sample.py --run {shlex.quote(str(run.path))}",
    }
    log.info("next: %s", following[step.stage])
