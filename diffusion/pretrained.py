"""A U-Net to start stage 2 from: its weights, and the normalisation of the latents that it knows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from diffusion.normalisation import Normalisation
from models import StockAutoencoder
from models.frozen_autoencoder import accepted_digests
from models.unet import unet_arguments
from models.weight_files import load_weights
from settings import CheckpointError, Settings, restored

log = logging.getLogger(__name__)


class PretrainedUNet:
    """The weight file that `ldm.pretrained` names; `CheckpointError` if the config's U-Net is another one."""

    def __init__(self, settings: Settings, path: Path) -> None:
        self.path = path
        _, metadata = load_weights(path)
        if metadata.get("stage") != "ldm" or not isinstance(metadata.get("settings"), dict):
            raise CheckpointError(
                f"{path}: not the weights of a U-Net from this program; give the ldm.safetensors of a run, or bring "
                "others in with scripts/import_checkpoint.py"
            )
        before = restored(metadata["settings"], path)
        found, wanted = _decisive(before), _decisive(settings)
        changed = [
            f"{name}: {json.dumps(old)} -> {json.dumps(wanted[name])}"
            for name, old in found.items()
            if old != wanted[name]
        ]
        if changed:
            lines = "\n  ".join(changed)
            raise CheckpointError(f"{path}: the pretrained U-Net has different settings:\n  {lines}\nset these back")
        try:
            self.normalisation = Normalisation.stored(metadata, settings.autoencoder.latent_channels)
        except ValueError as error:
            raise CheckpointError(f"{path}: damaged metadata: {error}; copy the file again") from None
        self._autoencoder = metadata.get("autoencoder")

    def check_autoencoder(self, autoencoder: StockAutoencoder) -> None:
        """Raise `CheckpointError` if the U-Net is known to have learned the latents of another autoencoder."""
        if self._autoencoder is None:
            log.warning(
                "%s: does not say which autoencoder its latents came from; its own must be the one in use", self.path
            )
        elif self._autoencoder not in accepted_digests(autoencoder):
            raise CheckpointError(
                f"{self.path}: was trained on latents of an autoencoder with other weights; set ldm.autoencoder to the "
                "one that it was trained with"
            )


def pretrained_unet(settings: Settings) -> PretrainedUNet | None:
    """Return what stage 2 starts from, or None if it starts from random weights."""
    name = settings.ldm.pretrained
    return None if name is None else PretrainedUNet(settings, Path(name).expanduser())


def _decisive(settings: Settings) -> dict[str, Any]:
    """Return the settings without which the weights would mean something else."""
    ldm = settings.ldm
    unused = {"time_shift"}
    if ldm.scheduler.type == "rflow":
        unused |= {"prediction", "schedule"}
    scheduler = {name: None if name in unused else value for name, value in ldm.scheduler.model_dump().items()}
    return {
        **{
            f"U-Net's {name}": v
            for name, v in unet_arguments(ldm, settings.autoencoder.latent_channels, settings.mean_map_shape).items()
        },
        **{f"ldm.scheduler.{name}": value for name, value in scheduler.items()},
        "ldm.conditioning.scan": ldm.conditioning.scan.inputs,
        "numbers of ldm.conditioning": tuple(ldm.conditioning.embedded_numbers),
    }
