"""A run opened for use: its settings, its networks, finished or not, and the metadata of its samples."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, PositiveFloat
from torch import Tensor

from data.geometry import to_intensities
from diffusion.conditioning import kinds_of
from diffusion.normalisation import Normalisation
from models import DiffusionUNet, StockAutoencoder, build_unet
from models.frozen_autoencoder import accepted_digests, autoencoder_of, autoencoder_path, load_autoencoder
from models.volume_codec import VolumeCodec
from models.weight_files import load_state, load_weights
from runtime.files import RunFolder
from runtime.precision import Precision
from runtime.processes import choose_device
from settings import CheckpointError, Settings, UserError, load_settings, restored
from training.checkpoints import Checkpoints, changed_settings

log = logging.getLogger(__name__)


class SampleFrame(BaseModel):
    """How samples are decoded and written: the normalisation of latents, and medians over the training volumes."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)

    normalisation: Normalisation
    spacing_mm: tuple[PositiveFloat, PositiveFloat, PositiveFloat]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    class_names: tuple[str, ...]
    conditions: dict[str, Any] = {}
    """What each kind of condition has learned, by its name."""

    def affine(self, settings: Settings) -> np.ndarray:
        """Return an affine (RAS+, millimetres) centred on the origin."""
        steps = np.array(self.spacing_mm)
        affine = np.diag([*steps, 1.0])
        affine[:3, 3] = -steps * (np.array(settings.data.voxel_size) - 1) / 2
        return affine

    def intensities(self, volume: np.ndarray) -> np.ndarray:
        """Map a (C, D, H, W) volume from [0, 1] to the training set's intensities."""
        return to_intensities(volume, self.lower, self.upper)


def check_finite(volume: Tensor, what: str) -> Tensor:
    """Return a volume that the networks made; raise `CheckpointError` if it has values that are not finite."""
    if bool(volume.isfinite().all()):
        return volume
    raise CheckpointError(
        f"{what}: the networks gave values that are not finite (NaN or infinity), so there is no result; use earlier "
        "weights, set device.mixed_precision: false in the run's config, or train again"
    )


class TrainedRun:
    """The folder of a run with a trained stage 1 and, for sampling, a trained stage 2.

    A stage that is not finished gives the weights of its newest checkpoint, with a warning, and so does a stage 2 that
    goes on after it was. `best` names a stage that gives those of its best validation instead.
    """

    def __init__(self, path: str | Path, budget_gb: float | None = None, best: str | None = None) -> None:
        self.folder = RunFolder(Path(path))
        if not self.folder.config.is_file():
            raise CheckpointError(
                f"{self.folder.path}: not a run folder, because it has no config.yaml; give one such as runs/quickstart"
            )
        self.best = best
        self.settings = load_settings(self.folder.config)
        self.precision = Precision(self.settings.device, choose_device(self.settings.device))
        self.budget_bytes = None if budget_gb is None else round(budget_gb * 2**30)

    @functools.cached_property
    def _autoencoder(self) -> StockAutoencoder:
        path = autoencoder_path(self.settings, self.folder)
        if self.settings.ldm.autoencoder is not None and self.best == "autoencoder":
            raise CheckpointError(
                f"--best: {self.folder.config} names the autoencoder's weights, {path}, so there is no choice; leave "
                "out --best, or set ldm.autoencoder to null"
            )
        if self.settings.ldm.autoencoder is not None or not self.has_weights("autoencoder"):
            return load_autoencoder(self.settings, path).to(self.precision.device)
        return autoencoder_of(self.settings, *self._weights("autoencoder")).to(self.precision.device)

    def has_weights(self, stage: str) -> bool:
        """Return whether a stage has finished weights or a checkpoint or, if they are asked for, its best weights."""
        asked = [self.folder.weights(stage), *([self.folder.best_weights(stage)] if self.best == stage else [])]
        return any(path.is_file() for path in asked) or any(self.folder.checkpoints.glob(f"{stage}_step_*.pt"))

    def _weights(self, stage: str) -> tuple[dict[str, Tensor], dict[str, Any], Path]:
        """Return a stage's weights, averaged if there is an average, with their metadata and their path."""
        path = self.folder.best_weights(stage) if self.best == stage else self.folder.weights(stage)
        if self.best == stage and not path.is_file():
            raise CheckpointError(f"{path}: not found, because no validation is finished yet; leave out --best")
        checkpoints = Checkpoints(self.folder.checkpoints, stage, keep=2)
        if path.is_file():
            weights, metadata = load_weights(path)
            now, last = checkpoints.newest_step(), metadata.get("step")
            # Imported files do not say after which step they were written. A run that has fewer steps than
            # that has been started again.
            is_current = self.best == stage or last is None or now in (0, last)
            if not is_current and stage == "autoencoder":  # on whose finished weights stage 2 was trained
                message = "%s: stage 1 is still training (step %d); using its finished weights of step %d"
                log.warning(message, path, now, last)
            if is_current or stage == "autoencoder":
                return weights, metadata, path
        newest = checkpoints.newest()
        assert newest is not None, f"stage {stage} has no checkpoint"
        state = checkpoints.read(newest)
        if not {"networks", "average", "settings", "metadata"} <= state.keys() or stage not in state["networks"]:
            raise CheckpointError(f"{newest}: not a checkpoint of this version; finish the run, then use its weights")
        which, words = "averaged" if state["average"] else "newest", "using its %s weights after step %d"
        log.warning(f"%s: stage %s is not finished; {words}", newest, stage, which, state["step"])
        metadata = {"stage": stage, "settings": state["settings"], **state["metadata"]}
        return state["networks"][stage] | state["average"], metadata, newest

    def sampling_settings(self, steps: int | None, guidance_scale: float | None) -> Settings:
        """Return the settings with other steps and guidance in sampling, if given."""
        most = self.settings.ldm.scheduler.num_train_timesteps
        if steps is not None and steps > most:
            raise UserError(
                f"--steps: {steps:,} is more than the run was trained with; allowed: 1 to {most:,}; give fewer"
            )
        asked = {"num_inference_steps": steps, "guidance_scale": guidance_scale}
        return self.settings.with_overrides({f"ldm.sampling.{k}": v for k, v in asked.items() if v is not None})

    def codec(self) -> VolumeCodec:
        """Return the frozen autoencoder on the device, ready to encode and decode single volumes."""
        return VolumeCodec(self._autoencoder, self.settings.autoencoder, self.precision, self.budget_bytes)

    def unet(self) -> tuple[DiffusionUNet, SampleFrame]:
        """Return the trained U-Net on the device, and the frame of its samples.

        Raise `CheckpointError` if it was trained with other settings or on another autoencoder.
        """
        if not self.has_weights("ldm"):
            path = self.folder.weights("ldm")
            raise CheckpointError(f"{path}: not found, so there is no trained diffusion model; run train_ldm.py first")
        state, metadata, path = self._weights("ldm")
        frame = self._check(path, metadata)
        network = build_unet(self.settings.ldm, self.settings.autoencoder.latent_channels, self.settings.mean_map_shape)
        load_state(network.to(self.precision.device).eval(), state, path)
        return network, frame

    def _check(self, path: Path, metadata: dict[str, Any]) -> SampleFrame:
        foreign = CheckpointError(f"{path}: not weights written by train_ldm.py; train stage 2 again")
        if metadata.get("stage") != "ldm" or not isinstance(metadata.get("settings"), dict):
            raise foreign
        changes = changed_settings("ldm", restored(metadata["settings"], path), self.settings)
        if changed := [str(change) for change in changes if change.changes_result]:
            head = f"{path}: was trained with settings that differ from {self.folder.config}:"
            raise CheckpointError("\n".join([head, *(f"  {line}" for line in changed), "set these back in that file"]))
        has_classes = self.settings.ldm.conditioning.type == "class"
        known = metadata if has_classes else {**metadata, "class_names": ()}
        try:
            normalisation = Normalisation.stored(metadata, self.settings.autoencoder.latent_channels)
            kinds = kinds_of(self.settings.ldm.conditioning)
            learned = {kind.name: kind.learned(metadata, self.settings) for kind in kinds}
            frame = SampleFrame.model_validate({**known, "normalisation": normalisation, "conditions": learned})
        except ValueError:  # also of pydantic
            raise foreign from None
        channels = self.settings.autoencoder.in_channels
        if not len(frame.lower) == len(frame.upper) == channels:
            raise CheckpointError(
                f"{path}: was trained on volumes with {len(frame.lower)} channels, but {self.folder.config} has "
                f"{channels}; set autoencoder.in_channels back"
            )
        weights = autoencoder_path(self.settings, self.folder)
        if (digest := metadata.get("autoencoder")) is None:
            message = "%s: does not record which autoencoder it was trained on, so it cannot be checked against %s"
            log.warning(message, path, weights)
        elif digest not in accepted_digests(self._autoencoder):
            raise CheckpointError(
                f"{path}: was trained on latents of an autoencoder whose weights differ from {weights}; restore that "
                "autoencoder, or train stage 2 on this one under another name"
            )
        return frame
