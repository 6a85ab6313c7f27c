"""The space that the U-Net works in: latents with mean 0 and standard deviation 1 in each channel.

A pretrained U-Net knows another one, which it keeps.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import StockAutoencoder
from models.frozen_autoencoder import accepted_digests, autoencoder_path, ensure_autoencoder
from models.unet import unet_arguments
from models.weight_files import load_weights
from runtime.processes import Process
from settings import CheckpointError, Settings, restored
from settings.conditioning import LABEL_MAP

log = logging.getLogger(__name__)

# Latents that vary less than this beside their mean square are constant: the rest is rounding.
_SMALLEST_SHARE = 1e-12

_FIXED_POINT = 2**24


@dataclass(frozen=True)
class Normalisation:
    """Latents as (latent - mean) * scale, both tensors (C, 1, 1, 1)."""

    scale: Tensor
    mean: Tensor

    @classmethod
    def uniform(cls, num_channels: int, scale: float = 1.0) -> Normalisation:
        """Return one that multiplies all channels by the same number, as MAISI and MONAI do."""
        shape = (num_channels, 1, 1, 1)
        return cls(torch.full(shape, scale), torch.zeros(shape))

    def apply(self, latents: Tensor) -> Tensor:
        """Return latents as the U-Net sees them."""
        return (latents - self.mean) * self.scale

    def undo(self, latents: Tensor) -> Tensor:
        """Return latents as the decoder expects them."""
        return latents / self.scale + self.mean

    def to(self, device: torch.device) -> Normalisation:
        """Return the same normalisation with its tensors on a device."""
        return Normalisation(self.scale.to(device), self.mean.to(device))

    def content(self, what: str = "latent") -> dict[str, Tensor]:
        """Return what is stored with the weights."""
        return {f"{what}_scale": self.scale.cpu(), f"{what}_mean": self.mean.cpu()}

    @classmethod
    def stored(cls, content: dict[str, Any], num_channels: int, what: str = "latent") -> Normalisation:
        """Return the normalisation of so many channels that `content` describes; raise ValueError if it has none."""
        shape = (num_channels, 1, 1, 1)
        names = (f"{what}_scale", f"{what}_mean")
        for name in names:
            found = content.get(name)
            if not isinstance(found, Tensor) or found.shape != shape or not found.isfinite().all():
                raise ValueError(f"{name} is not a tensor of {shape} finite values")
        scale, mean = (content[name] for name in names)
        if not (scale > 0).all():
            raise ValueError(f"{what}_scale is not above 0")
        return cls(scale, mean)


class Statistics:
    """Mean and mean square of each channel, for each of `count` latents of a training set, and their mean latent."""

    def __init__(self, count: int, shape: Sequence[int]) -> None:
        self._rows = torch.zeros(count, 2, shape[0], dtype=torch.float64)
        # Sums of whole numbers do not depend on their order, nor on the number of processes.
        self._sum = torch.zeros(*shape, dtype=torch.int64)

    def add(self, index: int, latent: Tensor) -> None:
        """Add one latent (C, D, H, W) by its index; ignore held-out ones."""
        if index < len(self._rows):
            values = latent.double().flatten(1)
            self._rows[index] = torch.stack([values.mean(dim=1), values.square().mean(dim=1)])
            self._sum += (latent.double() * _FIXED_POINT).round().long()

    def normalisation(self, process: Process, may_be_constant: bool = False) -> Normalisation:
        """Return the normalisation of the latents of all processes.

        A constant channel raises `CheckpointError`, or keeps its scale if that `may_be_constant`.
        """
        # One process fills each row and the others leave zeros, so the sum is the same for any number of processes.
        mean, mean_square = process.sum(self._rows).mean(dim=0)
        variance = mean_square - mean.square()
        varies = variance.isfinite() & (variance > _SMALLEST_SHARE * mean_square)
        if not varies.all() and not may_be_constant:
            channel = int(varies.int().argmin())
            raise CheckpointError(
                f"the variance of the autoencoder's latents is {variance[channel]:g} in channel {channel}, counted "
                "from 0; it must be finite and above zero; train stage 1 again"
            )
        scale = variance.where(varies, 1.0).rsqrt()
        return Normalisation(*(part.float().view(-1, 1, 1, 1) for part in (scale, mean)))

    def mean_latent(self, process: Process) -> Tensor:
        """Return the mean over the latents of all processes."""
        return (process.sum(self._sum).double() / (len(self._rows) * _FIXED_POINT)).float()


@dataclass(frozen=True)
class PretrainedUNet:
    """The weight file that `ldm.pretrained` names, and what its U-Net knows of latents."""

    path: Path
    normalisation: Normalisation
    autoencoder: str | None
    metadata: Mapping[str, Any]

    def check_autoencoder(self, autoencoder: StockAutoencoder) -> None:
        """Raise `CheckpointError` if the U-Net is known to have learned the latents of another autoencoder."""
        if self.autoencoder is None:
            log.warning(
                "%s: does not say which autoencoder its latents came from; its own must be the one in use", self.path
            )
        elif self.autoencoder not in accepted_digests(autoencoder):
            raise CheckpointError(
                f"{self.path}: was trained on latents of an autoencoder with other weights; set ldm.autoencoder to the "
                "one that it was trained with"
            )


def ensure_weights(settings: Settings, is_dry_run: bool) -> None:
    """Raise `CheckpointError` if the weights that stage 2 needs cannot be used; a dry run needs no autoencoder."""
    if not is_dry_run:
        ensure_autoencoder(autoencoder_path(settings))
    pretrained_unet(settings)


def pretrained_unet(settings: Settings) -> PretrainedUNet | None:
    """Return what stage 2 starts from, or None if it starts from random weights.

    Raise `CheckpointError` if the config's U-Net is another one.
    """
    if settings.ldm.pretrained is None:
        return None
    path = Path(settings.ldm.pretrained).expanduser()
    _, metadata = load_weights(path)
    if metadata.get("stage") != "ldm" or not isinstance(metadata.get("settings"), dict):
        raise CheckpointError(
            f"{path}: not the weights of a U-Net from this program; give the ldm.safetensors of a run, or bring "
            "others in with scripts/import_checkpoint.py"
        )
    trained = restored(metadata["settings"], path)
    before, wanted = _decisive(trained), _decisive(settings)
    # A ControlNet may be new, and one that is in the file is trained further.
    if trained.ldm.conditioning.label_map.controlnet:
        for values, of in ((before, trained), (wanted, settings)):
            values[f"{LABEL_MAP}.controlnet"] = of.ldm.conditioning.label_map.controlnet
    lines = [
        f"\n  {name}: {json.dumps(old)} -> {json.dumps(wanted[name])}"
        for name, old in before.items()
        if old != wanted[name]
    ]
    if lines:
        raise CheckpointError(f"{path}: the pretrained U-Net has different settings:{''.join(lines)}\nset these back")
    try:
        normalisation = Normalisation.stored(metadata, settings.autoencoder.latent_channels)
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged metadata: {error}; copy the file again") from None
    return PretrainedUNet(path, normalisation, metadata.get("autoencoder"), metadata)


def _decisive(settings: Settings) -> dict[str, Any]:
    """Return the settings without which the weights would mean something else."""
    ldm = settings.ldm
    unused = {"time_shift"} | ({"prediction", "schedule"} if ldm.scheduler.type == "rflow" else set())
    scheduler = {name: None if name in unused else value for name, value in ldm.scheduler.model_dump().items()}
    unet = unet_arguments(ldm, settings.autoencoder.latent_channels, settings.mean_map_shape)
    return {
        **{f"U-Net's {name}": value for name, value in unet.items()},
        **{f"ldm.scheduler.{name}": value for name, value in scheduler.items()},
        "ldm.conditioning.scan": ldm.conditioning.scan.inputs,
        "numbers of ldm.conditioning": tuple(ldm.conditioning.embedded_numbers),
    }
