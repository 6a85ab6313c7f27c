"""One update of stage 1: autoencoder and discriminator. Training and memory prediction both run this code."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from data.batches import Batch
from losses import build_perceptual_loss
from losses.terms import adversarial_loss, commitment_loss, edge_loss, kl_divergence, reconstruction_loss
from models import build_autoencoder, build_discriminator, start_as_haar_transform
from models.autoencoder import announce_offloaded
from models.bottleneck import COMMITMENT_WEIGHT, CodeStatistics
from models.volume_codec import VolumeCodec, block_bytes
from runtime.files import RunFolder
from runtime.observer import phase
from runtime.precision import move
from runtime.processes import Process, synchronised
from settings import Settings
from settings.autoencoder import OCCUPIED_THRESHOLD, AutoencoderTraining
from training.checkpoints import load_pretrained
from training.guard import FilesOf
from training.step import TrainingStep


class AutoencoderStep(TrainingStep):
    """The networks of stage 1, their optimizers, and the update.

    `load_weights=False` builds the perceptual network without its weights, which is enough for a memory prediction.
    """

    training: AutoencoderTraining
    stage, best_metric, higher_is_better = "autoencoder", "val_psnr", True
    terms = (
        *("reconstruction", "edges", "kl", "commitment", "perceptual"),
        *("adversarial", "discriminator_fake", "discriminator_real"),
    )

    def __init__(
        self, settings: Settings, process: Process, load_weights: bool = True, files_of: FilesOf = None
    ) -> None:
        training = settings.autoencoder.training
        super().__init__(settings, training, process, files_of)
        if training.offload_levels and load_weights:
            announce_offloaded(settings.autoencoder, training.batch_size, settings.training_grid, self.precision)
        self.autoencoder = build_autoencoder(settings.autoencoder)
        if settings.autoencoder.initialisation == "haar":
            s = settings.autoencoder
            start_as_haar_transform(self.autoencoder, s.in_channels, s.level_strides)
        if not training.trains_encoder:
            self.autoencoder.freeze_encoder()
        rate = training.rate_from(settings.autoencoder.pretrained)
        self._parallel_autoencoder = self.register("autoencoder", self.autoencoder, rate)
        # Whole volumes get the memory that training needs anyway; those larger than the patches run in slabs.
        training_bytes = training.batch_size * block_bytes(settings.autoencoder, self.precision, settings.training_grid)
        self.codec = VolumeCodec(self.autoencoder, settings.autoencoder, self.precision, training_bytes)
        self._code_statistics: CodeStatistics | None = None
        if self.autoencoder.quantiser is not None:
            # Fine-tuning the decoder leaves the codebook as it is.
            draw = self._draw if training.trains_encoder else None
            self._code_statistics = CodeStatistics(
                self.autoencoder.quantiser, self.samples_per_update, process.device, draw
            )
        self.discriminator: nn.Module | None = None
        if training.uses_discriminator:
            self.discriminator = build_discriminator(settings.autoencoder)
            self._parallel_discriminator = self.register(
                "discriminator", self.discriminator, training.discriminator_learning_rate
            )
        if settings.autoencoder.pretrained is not None and load_weights:
            load_pretrained(self.networks, Path(settings.autoencoder.pretrained))
            if self.average is not None:
                self.average.start()
        self.perceptual = build_perceptual_loss(training, settings.seed, load_weights)
        if self.perceptual is not None:
            move(self.perceptual, process.device)
        self.weights = {
            "reconstruction": 1.0,
            "edges": training.edge_weight,
            "kl": training.kl_weight,
            "commitment": COMMITMENT_WEIGHT,
            "perceptual": training.perceptual_weight,
            "adversarial": training.adversarial_weight,
        }

    def next_command(self, run: RunFolder) -> str:
        """Return the command that trains stage 2."""
        return f"python train_ldm.py --config {shlex.quote(str(run.config))}"

    @property
    def networks_on_device(self) -> dict[str, nn.Module]:
        """Return all networks of the step, trained and frozen, by name."""
        networks = {
            "autoencoder": self.autoencoder,
            "discriminator": self.discriminator,
            "perceptual": self.perceptual,
        }
        return {name: network for name, network in networks.items() if network is not None}

    def updated_networks(self, step: int) -> list[str]:
        """Return the names of the networks that a step updates."""
        return ["autoencoder", "discriminator"] if self.is_adversarial(step) else ["autoencoder"]

    def is_adversarial(self, step: int) -> bool:
        """Return whether the discriminator takes part in a step."""
        return self.discriminator is not None and step >= self.training.adversarial_start_step

    def backward(self, micro_batches: Sequence[Batch], step: int) -> dict[str, Tensor]:
        """Leave the update's gradients on the networks and return the loss terms."""
        is_adversarial = self.is_adversarial(step)

        def run(batch: Batch, share: float, is_last: bool) -> dict[str, Tensor]:
            images = batch.image.to(self.process.device, non_blocking=True)
            terms, reconstruction = self._generator_pass(images, batch.positions, step, share, is_adversarial, is_last)
            if is_adversarial:
                terms |= self._discriminator_pass(images, reconstruction, share, is_last)
            return terms

        return self.accumulate(micro_batches, step, run)

    def _generator_pass(
        self, images: Tensor, positions: Sequence[int], step: int, share: float, is_adversarial: bool, is_last: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Run forward and backward of the autoencoder; return the loss terms and the reconstruction, all detached."""
        s, t = self.settings.autoencoder, self.training
        noise: Tensor | None = None
        if s.bottleneck == "kl":
            noise = self.noise.normal("latent", positions, (s.latent_channels, *s.latent_grid(images.shape[2:])))
        with synchronised(self._parallel_autoencoder, is_last):
            with phase("generator forward"), self.precision.autocast():
                reconstruction, latent, other = self._parallel_autoencoder(images, noise)
                terms = {
                    "reconstruction": reconstruction_loss(
                        reconstruction, images, t.reconstruction_loss, t.occupied_weight, OCCUPIED_THRESHOLD
                    ),
                    **self._bottleneck_terms(latent, other, images, positions),
                }
                if t.edge_weight > 0:
                    terms["edges"] = edge_loss(reconstruction, images, t.reconstruction_loss)
                if self.perceptual is not None:
                    terms["perceptual"] = self.perceptual(reconstruction, images, step)
                if is_adversarial:
                    assert self.discriminator is not None, "an adversarial step needs a discriminator"
                    # Frozen, because the generator's loss must leave no gradients on the discriminator.
                    self.discriminator.requires_grad_(False)
                    terms["adversarial"] = adversarial_loss(self.discriminator(reconstruction)[-1], is_real=True)
                loss = torch.stack([self.weights[name] * term for name, term in terms.items()]).sum() * share
            with phase("generator backward"):
                self.precision.backward(loss)
        return {name: term.detach() for name, term in terms.items()}, reconstruction.detach()

    def _bottleneck_terms(
        self, latent: Tensor, other: Tensor, images: Tensor, positions: Sequence[int]
    ) -> dict[str, Tensor]:
        """Return the loss term of the bottleneck, if it has one; `other` is the latent's sigma, or its codes."""
        quantiser = self.autoencoder.quantiser
        if self._code_statistics is not None:
            self._code_statistics.add(latent, other, positions)
        if not self.training.trains_encoder:
            return {}
        if quantiser is None:
            return {"kl": kl_divergence(latent, other, num_voxels=images[0].numel())}
        return {"commitment": commitment_loss(latent, quantiser.embed(other))}

    def update(self, step: int) -> dict[str, Tensor]:
        """Update networks and codebook; return gradient norms and, with a quantiser, how codes were used."""
        norms = super().update(step)
        if self._code_statistics is None:
            return norms
        with phase("optimizer"):
            is_blocked = self.guard.blocks_update(norms["autoencoder_gradient_norm"])
            return norms | self._code_statistics.finish(self.process.sum_on_device, is_blocked)

    def _draw(self, positions: Sequence[int], number: int) -> Tensor:
        return self.noise.uniform("restart", positions, (number,))

    def _discriminator_pass(
        self, images: Tensor, reconstruction: Tensor, share: float, is_last: bool
    ) -> dict[str, Tensor]:
        """Train the discriminator on reconstructions, then on volumes; one backward each, to hold fewer activations."""
        assert self.discriminator is not None, "a discriminator pass needs a discriminator"
        self.discriminator.requires_grad_(True)
        terms = {}
        passes = (("discriminator_fake", reconstruction, False), ("discriminator_real", images, True))
        for name, volume, is_real in passes:
            with synchronised(self._parallel_discriminator, is_real and is_last):
                with phase("discriminator forward"), self.precision.autocast():
                    loss = adversarial_loss(self._parallel_discriminator(volume)[-1], is_real)
                with phase("discriminator backward"):
                    self.precision.backward(0.5 * share * loss)
            terms[name] = loss.detach()
            del loss
        return terms

    def example_batch(self, batch_size: int) -> Batch:
        """Return a micro-batch of zeros in the shape that training uses."""
        shape = (batch_size, self.settings.autoencoder.in_channels, *self.settings.training_grid)
        return Batch(torch.zeros(shape), tuple(range(batch_size)), ("",) * batch_size)
