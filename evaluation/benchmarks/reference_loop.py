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

from evaluation.benchmarks.variants import use_default_attention
from models import StockAutoencoder, build_autoencoder, build_discriminator
from settings import Settings

ADVERSARIAL_WEIGHT = 0.01


class ReferenceLoop:
    """Two stock networks, two Adam optimizers, and the step that updates them."""

    def __init__(
        self,
        settings: Settings,
        learning_rate: float,
        kl_weight: float,
        has_our_objective: bool = False,
        fused: bool | None = None,
    ) -> None:
        torch.manual_seed(settings.seed)
        stock = settings.with_overrides(
            {"autoencoder.implementation": "monai", "autoencoder.training.use_gradient_checkpointing": False}
        )
        self.autoencoder: StockAutoencoder = build_autoencoder(stock.autoencoder)
        use_default_attention(self.autoencoder)
        self.discriminator = build_discriminator(settings.autoencoder)
        self.kl_weight = kl_weight
        self.generator_optimizer = torch.optim.Adam(self.autoencoder.parameters(), lr=learning_rate, fused=fused)
        self.discriminator_optimizer = torch.optim.Adam(self.discriminator.parameters(), lr=learning_rate, fused=fused)
        self.adversarial = PatchAdversarialLoss(criterion="least_squares", no_activation_leastsq=has_our_objective)
        self.discriminator_weight = 1.0 if has_our_objective else ADVERSARIAL_WEIGHT

    def step(self, images: Tensor, is_adversarial: bool, noise: Tensor | None = None) -> Tensor:
        """Make one update and return the reconstruction loss; `noise` is the latent noise, drawn here if None."""
        self.generator_optimizer.zero_grad(set_to_none=True)
        reconstruction, reconstruction_loss = self.generator_pass(images, is_adversarial, noise)
        self.generator_optimizer.step()
        if is_adversarial:
            self.discriminator_optimizer.zero_grad(set_to_none=True)
            self.discriminator_pass(images, reconstruction)
            self.discriminator_optimizer.step()
        return reconstruction_loss

    def generator_pass(self, images: Tensor, is_adversarial: bool, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run backward through the autoencoder; return the reconstruction and its loss, detached."""
        reconstruction, mean, sigma = self.autoencoder(images, noise)
        reconstruction_loss = F.l1_loss(reconstruction, images)
        variance = sigma.square()
        kl = 0.5 * torch.sum(mean.square() + variance - torch.log(variance) - 1, dim=[1, 2, 3, 4])
        loss = reconstruction_loss + self.kl_weight * kl.sum() / kl.shape[0]
        if is_adversarial:
            logits = self.discriminator(reconstruction.contiguous().float())[-1]
            fooled = self.adversarial(logits, target_is_real=True, for_discriminator=False)
            loss = loss + ADVERSARIAL_WEIGHT * fooled
        loss.backward()
        return reconstruction.detach(), reconstruction_loss.detach()

    def discriminator_pass(self, images: Tensor, reconstruction: Tensor) -> None:
        """Run backward through the discriminator."""
        fake = self.discriminator(reconstruction.contiguous())[-1]
        real = self.discriminator(images.contiguous().detach())[-1]
        told = self.adversarial(fake, target_is_real=False, for_discriminator=True)
        told = 0.5 * (told + self.adversarial(real, target_is_real=True, for_discriminator=True))
        (self.discriminator_weight * told).backward()
