"""A finished run, opened for use: its settings, its networks, and what goes with them."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diffusion.frozen_autoencoder import autoencoder_path, load_autoencoder, weights_digest
from diffusion.volume_codec import VolumeCodec
from models import DiffusionUNet, StockAutoencoder, build_unet
from models.weight_files import load_state, load_weights
from runtime.precision import Precision
from runtime.processes import choose_device
from settings import CheckpointError, Settings, load_settings
from storage.run_folder import RunFolder
from training.resume import changed_settings

log = logging.getLogger(__name__)

Positive = Annotated[float, Field(gt=0)]


class SampleFrame(BaseModel):
    """What turns a drawn volume into a file: spacing and intensities of the training set (medians over its volumes)."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    latent_scale: Positive
    spacing_mm: tuple[Positive, Positive, Positive]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    class_names: tuple[str, ...]

    def affine(self, settings: Settings) -> np.ndarray:
        """Return an affine (RAS+, millimetres) centred on the origin, axes as in data.orientation."""
        signs = [1.0 if code in "RAS" else -1.0 for code in settings.data.orientation]
        steps = np.array(signs) * np.array(self.spacing_mm)
        affine = np.diag([*steps, 1.0])
        affine[:3, 3] = -steps * (np.array(settings.data.voxel_size) - 1) / 2
        return affine

    def intensities(self, volume: np.ndarray) -> np.ndarray:
        """Map a (C, D, H, W) volume from [0, 1] to the training set's intensities."""
        lower, upper = (np.array(ends, dtype=np.float32)[:, None, None, None] for ends in (self.lower, self.upper))
        return volume * (upper - lower) + lower


class TrainedRun:
    """The folder of a run whose stage 1, and for sampling stage 2, are finished."""

    def __init__(self, path: str | Path, budget_gb: float | None = None) -> None:
        self.folder = RunFolder(Path(path))
        if not self.folder.config.is_file():
            raise CheckpointError(
                f"{self.folder.path}: not the folder of a run, it has no config.yaml; give one such as runs/quickstart"
            )
        self.settings = load_settings(self.folder.config)
        self.precision = Precision(self.settings.device, choose_device(self.settings.device))
        self.budget_bytes = None if budget_gb is None else round(budget_gb * 2**30)

    @functools.cached_property
    def _autoencoder(self) -> StockAutoencoder:
        return load_autoencoder(self.settings, autoencoder_path(self.settings, self.folder)).to(self.precision.device)

    def codec(self) -> VolumeCodec:
        """Return the frozen autoencoder, on the device, as it encodes and decodes single volumes."""
        return VolumeCodec(self._autoencoder, self.settings.autoencoder, self.precision, self.budget_bytes)

    def unet(self) -> tuple[DiffusionUNet, SampleFrame]:
        """Return the trained U-Net, on the device, and what its samples need.

        Raises `CheckpointError` when it was trained with other settings, or on another autoencoder.
        """
        path = self.folder.weights("ldm")
        if not path.is_file():
            raise CheckpointError(f"{path}: there is no trained diffusion model; train stage 2 with train_ldm.py first")
        state, metadata = load_weights(path)
        frame = self._check(path, metadata)
        network = self.untrained_unet()
        load_state(network, state, path)
        return network, frame

    def untrained_unet(self) -> DiffusionUNet:
        """Return the U-Net as training begins with it."""
        network = build_unet(self.settings.ldm, self.settings.autoencoder.latent_channels)
        return network.to(self.precision.device).eval()

    def _check(self, path: Path, metadata: dict[str, Any]) -> SampleFrame:
        has_classes = self.settings.ldm.conditioning.type == "class"
        try:
            frame = SampleFrame.model_validate({**metadata, **({} if has_classes else {"class_names": ()})})
        except ValidationError:
            frame = None
        channels = self.settings.autoencoder.in_channels
        if frame is None or metadata.get("stage") != "ldm" or not isinstance(metadata.get("settings"), dict):
            raise CheckpointError(f"{path}: not the weights that train_ldm.py writes; train stage 2 again")
        changed, _ = changed_settings("ldm", metadata["settings"], self.settings)
        if changed:
            raise CheckpointError(
                f"{path}: was trained with other settings than {self.folder.config} has:\n  "
                + "\n  ".join(changed)
                + "\nset these back in that file"
            )
        if not len(frame.lower) == len(frame.upper) == channels:
            raise CheckpointError(
                f"{path}: was trained on volumes of {len(frame.lower)} channels, {self.folder.config} has {channels}; "
                "set autoencoder.in_channels back"
            )
        self._check_autoencoder(path, metadata.get("autoencoder"))
        return frame

    def _check_autoencoder(self, path: Path, digest: str | None) -> None:
        """Raise `CheckpointError` unless the autoencoder is the one whose latents the U-Net has learnt to draw."""
        weights = autoencoder_path(self.settings, self.folder)
        if digest is None:
            log.warning(
                "%s: does not say which autoencoder it was trained on (imported, or from before this was kept): "
                "whether it was %s cannot be checked",
                path,
                weights,
            )
        elif digest != weights_digest(self._autoencoder):
            raise CheckpointError(
                f"{path}: was trained on latents of an autoencoder with other weights than {weights} has; restore that "
                "autoencoder, or train stage 2 on this one under another name"
            )
