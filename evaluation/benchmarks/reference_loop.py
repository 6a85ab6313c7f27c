"""A loop written like MONAI's 3d_ldm tutorial, for comparison: stock networks, fp32, plain Adam, no accumulation.

What it shares with the tutorial: L1, KL as a sum with a weight of 1e-7, MONAI's adversarial loss, the discriminator not
frozen in the generator's step, no clipping. The perceptual term, which needs weights from the network, is left out of
both sides of a comparison.
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

    def __init__(self, settings: Settings) -> None:
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
        self.adversarial = PatchAdversarialLoss(criterion="least_squares", no_activation_leastsq=False)

    def step(self, images: Tensor) -> None:
        """Make one update of both networks."""
        self.generator_optimizer.zero_grad(set_to_none=True)
        reconstruction, mean, sigma = self.autoencoder(images, None)
        reconstruction_loss = F.l1_loss(reconstruction, images)
        variance = sigma.square()
        kl = 0.5 * torch.sum(mean.square() + variance - torch.log(variance) - 1, dim=[1, 2, 3, 4])
        loss = reconstruction_loss + KL_WEIGHT * kl.sum() / kl.shape[0]
        logits = self.discriminator(reconstruction.contiguous().float())[-1]
        loss = loss + ADVERSARIAL_WEIGHT * self.adversarial(logits, target_is_real=True, for_discriminator=False)
        loss.backward()
        self.generator_optimizer.step()
        self.discriminator_optimizer.zero_grad(set_to_none=True)
        fake = self.discriminator(reconstruction.contiguous().detach())[-1]
        real = self.discriminator(images.contiguous().detach())[-1]
        loss = self.adversarial(fake, target_is_real=False, for_discriminator=True)
        loss = 0.5 * (loss + self.adversarial(real, target_is_real=True, for_discriminator=True))
        (ADVERSARIAL_WEIGHT * loss).backward()
        self.discriminator_optimizer.step()
