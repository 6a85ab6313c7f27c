"""A loop written like MONAI's 3d_ldm tutorial, for comparison: stock networks, fp32, plain Adam, no accumulation.

What it shares with the tutorial: L1, KL as a sum with a weight of 1e-7, MONAI's adversarial loss, the discriminator not
frozen in the generator's step, no clipping. The tutorial's objective differs from ours in two places: an activation
between logits and squares, and the adversarial weight on the discriminator's loss as well. The loop can optimise
either. The perceptual term, which needs weights from the network, is left out of both sides of a comparison.
"""

from __future__ import annotations

import torch
from monai.losses.adversarial_loss import PatchAdversarialLoss
from torch import Tensor
from torch.nn import functional as F

from evaluation.benchmarks.variants import use_matrix_attention
from models import build_autoencoder, build_discriminator
from settings import Settings

ADVERSARIAL_WEIGHT, KL_WEIGHT, LEARNING_RATE = 0.01, 1e-7, 1e-4


class ReferenceLoop:
    """Two stock networks, two Adam optimizers, and the step that updates them."""

    def __init__(self, settings: Settings, has_our_objective: bool = False) -> None:
        torch.manual_seed(settings.seed)
        stock = {"autoencoder.implementation": "monai", "autoencoder.training.use_gradient_checkpointing": False}
        self.autoencoder = build_autoencoder(settings.with_overrides(stock).autoencoder)
        use_matrix_attention(self.autoencoder)
        self.discriminator = build_discriminator(settings.autoencoder)
        # Fused, because the other forms read the step counter, which has no value in a fake tensor.
        self.generator_optimizer, self.discriminator_optimizer = (
            torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, fused=True)
            for network in (self.autoencoder, self.discriminator)
        )
        self.adversarial = PatchAdversarialLoss(criterion="least_squares", no_activation_leastsq=has_our_objective)
        self.discriminator_weight = 1.0 if has_our_objective else ADVERSARIAL_WEIGHT

    def step(self, images: Tensor) -> None:
        """Make one update of both networks."""
        self.generator_optimizer.zero_grad(set_to_none=True)
        reconstruction = self.generator_pass(images, None)
        self.generator_optimizer.step()
        self.discriminator_optimizer.zero_grad(set_to_none=True)
        self.discriminator_pass(images, reconstruction)
        self.discriminator_optimizer.step()

    def generator_pass(self, images: Tensor, noise: Tensor | None) -> Tensor:
        """Run backward through the autoencoder and return the detached reconstruction; None: draw the latent noise."""
        reconstruction, mean, sigma = self.autoencoder(images, noise)
        reconstruction_loss = F.l1_loss(reconstruction, images)
        variance = sigma.square()
        kl = 0.5 * torch.sum(mean.square() + variance - torch.log(variance) - 1, dim=[1, 2, 3, 4])
        loss = reconstruction_loss + KL_WEIGHT * kl.sum() / kl.shape[0]
        logits = self.discriminator(reconstruction.contiguous().float())[-1]
        loss = loss + ADVERSARIAL_WEIGHT * self.adversarial(logits, target_is_real=True, for_discriminator=False)
        loss.backward()
        return reconstruction.detach()

    def discriminator_pass(self, images: Tensor, reconstruction: Tensor) -> None:
        """Run backward through the discriminator."""
        fake = self.discriminator(reconstruction.contiguous())[-1]
        real = self.discriminator(images.contiguous().detach())[-1]
        loss = self.adversarial(fake, target_is_real=False, for_discriminator=True)
        loss = 0.5 * (loss + self.adversarial(real, target_is_real=True, for_discriminator=True))
        (self.discriminator_weight * loss).backward()
