"""Finished weights for use elsewhere: safetensors with the config that made them, never executable."""

from __future__ import annotations

import json
import logging
import os
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from settings import CheckpointError, Settings, TrainingError
from training.run_folder import RunFolder
from training.step import TrainingStep

log = logging.getLogger(__name__)


def save_weights(path: Path, state: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Write weights with JSON-encodable metadata, atomically; raise `TrainingError` when the disk does not take it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata={name: json.dumps(value) for name, value in metadata.items()})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            temporary.unlink()
        raise TrainingError(
            f"{path}: the weights could not be written ({error}); make room, then run the same command again"
        ) from error


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights and metadata; raise `CheckpointError` when the file is missing or not one that we wrote."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; train the stage that writes it, or give the path of one")
    try:
        with safe_open(path, framework="pt") as file:
            texts = file.metadata() or {}
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file ({error}); copy it again, or train the stage that writes it"
        ) from None
    try:
        return state, {name: json.loads(text) for name, text in texts.items()}
    except ValueError:
        raise CheckpointError(
            f"{path}: was not written by this program; bring weights from elsewhere in with "
            "scripts/import_checkpoint.py"
        ) from None


def load_pretrained(networks: dict[str, nn.Module], path: Path) -> None:
    """Start from finished weights: the file's own network, and those whose files lie beside it; says which."""
    for name, network in networks.items():
        file = path if name == "autoencoder" else path.with_name(f"{name}.safetensors")
        if file != path and not file.exists():
            log.info("%s: not there, so the %s starts from random weights", file, name)
            continue
        load_into(network, file)
        log.info("%s: the %s starts from these weights", file, name)


def load_into(network: nn.Module, path: Path) -> dict[str, Any]:
    """Load a file of weights into a network and return its metadata; raise `CheckpointError` when they do not fit."""
    state, metadata = load_weights(path)
    load_state(network, state, path)
    return metadata


def load_state(network: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Load weights into a network; raise `CheckpointError`, naming the file they are of, when they do not fit."""
    expected = network.state_dict()
    wrong = sorted(
        [f"{name} is missing" for name in expected.keys() - state.keys()]
        + [f"{name} is unknown" for name in state.keys() - expected.keys()]
        + [
            f"{name} is {tuple(state[name].shape)}, the config's is {tuple(expected[name].shape)}"
            for name in expected.keys() & state.keys()
            if expected[name].shape != state[name].shape
        ]
    )
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{path}: does not fit the network of this config ({'; '.join(wrong[:3])}{more}); "
            "use the config it was trained with, or scripts/import_checkpoint.py for weights from elsewhere"
        )
    network.load_state_dict(state)


def export(step: TrainingStep, run: RunFolder, settings: Settings, **metadata: Any) -> None:
    """Write the stage's network, averaged where there is an average, with its settings; say where it is."""
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
