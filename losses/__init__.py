"""The objectives of stage 1: reconstruction, KL, adversarial and perceptual terms, all computed in fp32."""

from losses.perceptual import build_perceptual_loss, ensure_perceptual_weights
from losses.terms import (
    commitment_loss,
    discriminator_loss_fake,
    discriminator_loss_real,
    edge_loss,
    generator_adversarial_loss,
    kl_divergence,
    reconstruction_loss,
)

__all__ = [
    "build_perceptual_loss",
    "commitment_loss",
    "discriminator_loss_fake",
    "discriminator_loss_real",
    "edge_loss",
    "ensure_perceptual_weights",
    "generator_adversarial_loss",
    "kl_divergence",
    "reconstruction_loss",
]
