"""One update of stage 2: the diffusion U-Net on latents. Training and memory prediction both run this code."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion.conditioning import ConditionBatch, empty_condition, error_weights, kinds_of, some_hidden
from diffusion.latents import LatentBatch, Latents, VolumeBatch
from diffusion.noise_process import NoiseProcess, predict
from diffusion.normalisation import Normalisation
from models import StockAutoencoder, build_unet
from models.controlnet import load_pretrained
from models.frozen_autoencoder import accepted_digests, latents_digest, weights_digest
from models.volume_codec import VolumeCodec, frozen_codec
from runtime.files import RunFolder
from runtime.observer import phase
from runtime.precision import Precision
from runtime.processes import Process, synchronised
from runtime.randomness import derive_seed
from settings import CheckpointError, Settings
from settings.ldm import PixelLossSettings
from training.guard import FilesOf
from training.step import TrainingStep

log = logging.getLogger(__name__)

# Consecutive multiples of the golden ratio, modulo 1, cover [0, 1) more evenly than random numbers.
_GOLDEN_RATIO = 0.6180339887498949


class PixelLoss:
    """Mean squared error of decoded latents, computed in chunks, each with its own backward to the latent.

    The decoder is frozen, but gradients pass through it to the U-Net, so it needs as much activation memory as in
    training. Chunks limit how many volumes are decoded at once, and checkpointing limits the cost of one volume; both
    are needed.
    """

    def __init__(self, s: PixelLossSettings, autoencoder: StockAutoencoder, precision: Precision) -> None:
        self.weight = s.weight
        self.chunk_size = s.chunk_size
        self.is_adaptive = s.adaptive_chunk
        self.autoencoder = autoencoder
        self.precision = precision

    def __call__(
        self, predicted: Tensor, clean: Tensor, sample_weights: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and the gradient of `factor` times the loss with respect to `predicted`.

        Both latents are as the decoder expects them. `sample_weights` (B) weights the volumes of the batch.
        The gradient is multiplied by the float16 loss scale, if any. With `adaptive_chunk`, running out of memory
        halves the chunk size for the rest of the run and logs a warning.
        """
        total = torch.zeros((), device=predicted.device)
        gradient = torch.empty_like(predicted)
        start = 0
        while start < len(predicted):
            part = slice(start, start + self.chunk_size)
            try:
                loss, gradient[part] = self._chunk(
                    predicted[part], clean[part], sample_weights[part], len(predicted), factor
                )
            except torch.OutOfMemoryError:
                if not self.is_adaptive or self.chunk_size == 1:
                    raise
                self.chunk_size //= 2
                log.warning(
                    "out of memory in the pixel loss: continuing with ldm.training.pixel_loss.chunk_size %d",
                    self.chunk_size,
                )
                torch.cuda.empty_cache()
                continue
            total = total + loss
            start = part.stop
        return total, gradient

    def _chunk(
        self, predicted: Tensor, clean: Tensor, sample_weights: Tensor, batch_size: int, factor: float
    ) -> tuple[Tensor, Tensor]:
        # Detached, so that the graph of this chunk ends here and is freed before the next chunk.
        latent = predicted.detach().requires_grad_()
        with self.precision.autocast():
            with torch.no_grad():
                target = self.autoencoder.decode(clean).float()
            error = self.autoencoder.decode(latent).float() - target
            loss = (error.square().flatten(1).mean(dim=1) * sample_weights).sum() / batch_size
        scaled = self.precision.scaler.scale(factor * loss)
        return loss.detach(), torch.autograd.grad(scaled, latent)[0]


class LatentDiffusionStep(TrainingStep):
    """The U-Net, its optimizer, the frozen autoencoder, and the update.

    `codec` is the frozen autoencoder, loaded here when it is not given; `load_weights=False` builds it without its
    weights, which is enough for a memory prediction. `latents` are those to train on; without them nothing is
    normalised. `load_state_dict` overrides the normalisation.
    """

    stage, best_metric, higher_is_better = "ldm", "val_diffusion", False
    terms = ("diffusion", "pixel")

    def __init__(
        self,
        settings: Settings,
        process: Process,
        load_weights: bool = True,
        codec: VolumeCodec | None = None,
        latents: Latents | None = None,
        files_of: FilesOf = None,
    ) -> None:
        training = settings.ldm.training
        super().__init__(settings, training, process, files_of)
        self.unet = build_unet(settings.ldm, settings.autoencoder.latent_channels, settings.mean_map_shape)
        if settings.ldm.pretrained is not None and load_weights:
            # Before the network is registered, because averages start from the weights that it has then.
            load_pretrained(self.unet, Path(settings.ldm.pretrained).expanduser())
        elif self.unet.mean_map is not None and latents is not None:
            self.unet.mean_map.copy_(latents.mean_map)
        self._parallel_unet = self.register("ldm", self.unet, training.rate_from(settings.ldm.pretrained))
        self.codec = codec or frozen_codec(settings, process, load_weights)
        self.autoencoder = self.codec.autoencoder
        self.noise_process = NoiseProcess(settings.ldm.scheduler, process.device)
        plain = Normalisation.uniform(settings.autoencoder.latent_channels)
        self.normalisation = (plain if latents is None else latents.normalisation).to(process.device)
        effects = None if latents is None else latents.voxel_effects
        self._voxel_effects = None if effects is None else effects.to(process.device)
        self._facts = {} if latents is None else latents.metadata
        self._partners = None if latents is None else latents.conditions.digest
        self.pixel_loss: PixelLoss | None = None
        if training.pixel_loss.weight:
            self.pixel_loss = PixelLoss(training.pixel_loss, self.autoencoder, self.precision)
            # Gradient checkpointing works in training mode only. The network has no dropout and no running statistics,
            # so both modes give the same result.
            self.autoencoder.train()
            if not settings.autoencoder.training.checkpoints_blocks:
                self.autoencoder.gradient_checkpointing_enable()

    @property
    def networks_on_device(self) -> dict[str, nn.Module]:
        """Return all networks of the step, trained and frozen, by name."""
        return {"unet": self.unet, "autoencoder": self.autoencoder}

    @property
    def tensors_on_device(self) -> Sequence[Tensor]:
        """Return what normalises latents."""
        return self.normalisation.scale, self.normalisation.mean

    @property
    def metadata(self) -> dict[str, Any]:
        """Return what sampling needs besides the weights and the settings."""
        return {**self.normalisation.content(), **self._facts}

    def next_command(self, run: RunFolder) -> str:
        """Return the command that draws samples, with an option for each condition that takes files."""
        kinds = kinds_of(self.settings.ldm.conditioning)
        options = [f"{option} FILE_OR_FOLDER" for kind in kinds for option in kind.options]
        return " ".join(["python scripts/sample.py --run", shlex.quote(str(run.path)), *options])

    def backward(self, micro_batches: Sequence[LatentBatch | VolumeBatch], step: int) -> dict[str, Tensor]:
        """Leave the update's gradients on the U-Net and return the loss terms and the pixel loss's gradient norm."""
        pixel_norms: list[Tensor] = []

        def run(batch: LatentBatch | VolumeBatch, share: float, is_last: bool) -> dict[str, Tensor]:
            with synchronised(self._parallel_unet, is_last):
                terms, norm = self._pass(batch, share)
            pixel_norms.extend([] if norm is None else [norm])
            return terms

        terms = self.accumulate(micro_batches, step, run)
        # The guard does not check this norm: with float16 it may overflow, and then the step is skipped.
        return terms | ({"pixel_gradient_norm": torch.stack(pixel_norms).mean()} if pixel_norms else {})

    def _pass(self, batch: LatentBatch | VolumeBatch, share: float) -> tuple[dict[str, Tensor], Tensor | None]:
        """Add noise, predict, run backward; return the detached loss terms and the pixel loss's gradient norm."""
        with phase("latents"), torch.no_grad():
            clean = self.clean_latents(batch)
            noise = self.noise.normal("diffusion", batch.positions, clean.shape[1:])
            times = self.noise_process.training_times(self._spread(batch.positions))
            noisy = self.noise_process.add_noise(clean, noise, times)
            target = self.noise_process.target(clean, noise, times)
            condition = self._condition(batch)
        with phase("forward"), self.precision.autocast():
            multiple = self.settings.ldm.unet.downsampling
            prediction = predict(self._parallel_unet, noisy, times, condition, multiple).float()
            if self._voxel_effects is None:
                terms = {"diffusion": F.mse_loss(prediction, target)}
            else:
                weights = error_weights(condition, self._voxel_effects)
                terms = {"diffusion": (weights * (prediction - target).square()).mean()}
        outputs = [self.precision.scaler.scale(share * terms["diffusion"])]
        gradients: list[Tensor | None] = [None]
        norm = None
        if self.pixel_loss is not None:
            with phase("pixel loss"):
                predicted, _ = self.noise_process.clean_and_noise(prediction, noisy, times)
                terms["pixel"], gradient, norm = self._pixel_pass(predicted, clean, times, share)
            outputs.append(predicted)
            gradients.append(gradient)
        with phase("backward"):
            # One backward pass through the U-Net serves both terms.
            torch.autograd.backward(outputs, gradients)
        return {name: term.detach() for name, term in terms.items()}, norm

    def clean_latents(self, batch: LatentBatch | VolumeBatch) -> Tensor:
        """Return the normalised means of the batch's latents.

        Noise drawn with the encoder's sigma would be learned as if it were signal.
        """
        if isinstance(batch, VolumeBatch):
            mean = torch.stack([self.codec.encode(image) for image in batch.image])
        else:
            mean = batch.mean.to(self.process.device, non_blocking=True)
        return self.normalisation.apply(mean)

    def _pixel_pass(
        self, predicted: Tensor, clean: Tensor, times: Tensor, share: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pixel loss, its scaled gradient on the predicted latent, and its norm at the U-Net's output.

        Each volume is weighted by its share of signal, because nothing can be predicted from pure noise.
        """
        assert self.pixel_loss is not None, "a pixel pass needs the pixel loss"
        signal, _ = self.noise_process.coefficients(times)
        loss, gradient = self.pixel_loss(
            self.normalisation.undo(predicted.detach()),
            self.normalisation.undo(clean),
            signal.flatten().square(),
            share * self.pixel_loss.weight,
        )
        gradient = gradient / self.normalisation.scale
        one = self.precision.scaler.scale(torch.ones((), device=gradient.device))
        norm = (gradient * self.noise_process.clean_slope(times)).norm() / (one * share)
        return loss, gradient, norm

    def _spread(self, positions: Sequence[int]) -> Tensor:
        """Return a number in [0, 1) for each position, such that consecutive positions cover the interval evenly."""
        start = derive_seed(self.settings.seed, "timestep", 0) / 2**63
        numbers = torch.empty(len(positions), device=self.process.device)
        # Filled on the device: a copy from the host would wait for the device.
        for number, position in zip(numbers, positions, strict=True):
            number.fill_((start + position * _GOLDEN_RATIO) % 1.0)
        return numbers

    def _condition(self, batch: LatentBatch | VolumeBatch) -> ConditionBatch:
        """Return the conditions on the device, some hidden for classifier-free guidance."""
        draw = partial(self.noise.uniform, positions=batch.positions)
        return some_hidden(batch.condition.to(self.process.device), self.settings.ldm.conditioning, draw)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs."""
        # The pixel loss depends on the decoder too.
        digest = latents_digest if self.pixel_loss is None else weights_digest
        own = {**self.normalisation.content(), "autoencoder": digest(self.autoencoder)}
        partners = {} if self._partners is None else {"partners": self._partners}
        return super().state_dict() | own | partners

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; raise `CheckpointError` if the autoencoder or the partners changed."""
        if state["autoencoder"] not in accepted_digests(self.autoencoder):
            raise CheckpointError(
                f"the checkpoint of runs/{self.settings.name} was trained on latents of an autoencoder with other "
                "weights; restore that autoencoder, or choose another name to start stage 2 again"
            )
        if state.get("partners") != self._partners:
            raise CheckpointError(
                f"the checkpoint of runs/{self.settings.name} was made with other conditions: the volumes' partners "
                "changed; put them back to resume, or choose another name for a new run"
            )
        super().load_state_dict(state)
        number = self.settings.autoencoder.latent_channels
        self.normalisation = Normalisation.stored(state, number).to(self.process.device)

    def example_batch(self, batch_size: int) -> LatentBatch | VolumeBatch:
        """Return a micro-batch of zeros in the shape that training uses."""
        condition = empty_condition(self.settings, batch_size)
        positions = tuple(range(batch_size))
        if self.settings.ldm.latents.cache == "none":
            shape = (batch_size, self.settings.autoencoder.in_channels, *self.settings.data.voxel_size)
            return VolumeBatch(torch.zeros(shape), positions, ("",) * batch_size, condition)
        return LatentBatch(torch.zeros(batch_size, *self.settings.latent_shape), positions, condition)
