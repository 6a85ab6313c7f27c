"""Loads the trained autoencoder for stage 2 and the commands: checked against the config, and frozen."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models import StockAutoencoder, build_autoencoder
from models.stock import ENCODER_PARTS
from models.weight_files import load_state, load_weights
from runtime.files import RUNS, RunFolder
from settings import AutoencoderSettings, CheckpointError, Settings, restored

log = logging.getLogger(__name__)

# Settings that decide what a voxel means to the autoencoder. The grid may differ: convolutions accept any.
_READING_KEYS = {"spacing", "resize", "intensity"}


def autoencoder_path(settings: Settings, run: RunFolder | None = None) -> Path:
    """Return the path of the autoencoder's weights: `ldm.autoencoder` if set, else in the run folder."""
    if settings.ldm.autoencoder is not None:
        return Path(settings.ldm.autoencoder).expanduser()
    return (run or RunFolder(RUNS / settings.name)).weights("autoencoder")


def load_autoencoder(settings: Settings, path: Path) -> StockAutoencoder:
    """Build the config's autoencoder, load its weights and freeze it; raise `CheckpointError` if they do not fit."""
    ensure_autoencoder(path)
    return autoencoder_of(settings, *load_weights(path), path)


def ensure_autoencoder(path: Path) -> None:
    """Raise `CheckpointError` if there are no weights of the autoencoder."""
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no trained autoencoder; train stage 1 with train_autoencoder.py under the same name, or "
            "set ldm.autoencoder to the path of its weights"
        )


def autoencoder_of(
    settings: Settings, state: dict[str, Tensor], metadata: dict[str, Any], path: Path
) -> StockAutoencoder:
    """Build the config's autoencoder with weights read from `path`, and freeze it."""
    is_own = settings.ldm.autoencoder is None
    if metadata.get("stage") != "autoencoder" or not isinstance(metadata.get("settings"), dict):
        raise CheckpointError(
            f"{path}: not written by train_autoencoder.py: it does not hold the settings of its training; train "
            "stage 1 again, or import weights from elsewhere with scripts/import_checkpoint.py"
        )
    _check_settings(settings, metadata["settings"], path, is_own)
    autoencoder = build_autoencoder(settings.autoencoder)
    load_state(autoencoder, state, path)
    return freeze(autoencoder)


def freeze(autoencoder: StockAutoencoder) -> StockAutoencoder:
    """Put the autoencoder in eval mode, turn off gradients of its parameters, and return it."""
    autoencoder.requires_grad_(False)
    return autoencoder.eval()


def weights_digest(network: nn.Module, parts: str | tuple[str, ...] = "") -> str:
    """Return a hash of all weights and buffers of a network, or of those whose names start with `parts`."""
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        if not name.startswith(parts):
            continue
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def latents_digest(autoencoder: StockAutoencoder) -> str:
    """Return a hash of the weights that a latent depends on, so it stays the same when only the decoder is trained."""
    digest = weights_digest(autoencoder, ENCODER_PARTS)
    if autoencoder.value_range != "symmetric":
        digest = hashlib.sha256(f"{digest} {autoencoder.value_range}".encode()).hexdigest()
    return digest


def accepted_digests(autoencoder: StockAutoencoder) -> tuple[str, str]:
    """Return the hashes under which stage 2 may have recorded the autoencoder of its latents.

    With a pixel loss it records all weights, because the decoder matters as well.
    """
    return latents_digest(autoencoder), weights_digest(autoencoder)


def check_pretrained(settings: AutoencoderSettings, metadata: dict[str, Any], path: Path) -> None:
    """Raise `CheckpointError` if the config's network would compute something else with pretrained weights.

    Names and shapes of the weights do not show everything, such as strides and norm groups.
    """
    if isinstance(metadata.get("settings"), dict):
        before = restored(metadata["settings"], path).autoencoder
        _refuse(path, _differences("autoencoder", _architecture(before), _architecture(settings)))


def _check_settings(settings: Settings, trained: dict[str, Any], path: Path, is_own: bool) -> None:
    """Raise if the settings stored with the weights differ from the current ones in a way that matters."""
    before = restored(trained, path)
    changed = _differences("autoencoder", _architecture(before.autoencoder), _architecture(settings.autoencoder))
    reading = _differences("data", *(s.data.model_dump(mode="json", include=_READING_KEYS) for s in (before, settings)))
    if reading and not is_own:
        log.warning("%s was trained on volumes that were read differently: %s", path, "; ".join(reading))
    _refuse(path, changed + reading if is_own else changed)


def _refuse(path: Path, changed: Sequence[str]) -> None:
    if changed:
        raise CheckpointError(
            f"{path}: the autoencoder was trained with different settings:\n  "
            + "\n  ".join(changed)
            + "\nrestore these settings, or train stage 1 again under another name"
        )


def _architecture(s: AutoencoderSettings) -> dict[str, Any]:
    """Return the settings that decide the network's architecture, with every `auto` resolved."""
    return {
        "in_channels": s.in_channels,
        "variant": s.variant,
        "num_channels": list(s.num_channels),
        "strides": [list(strides) for strides in s.level_strides],
        "num_res_blocks": list(s.res_blocks),
        "latent_channels": s.latent_channels,
        "bottleneck": s.bottleneck,
        "codebook_size": s.num_codes,
        "norm_num_groups": s.num_groups,
        "attention_levels": list(s.attention_levels),
        "use_nonlocal_attention": s.has_middle_attention,
    }


def _differences(section: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{section}.{name}: {json.dumps(old)} -> {json.dumps(after[name])}"
        for name, old in before.items()
        if old != after[name]
    ]
