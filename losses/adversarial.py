"""Least-squares adversarial terms on raw patch logits (LSGAN, Mao et al. 2017, with targets 1 for real and 0 for fake).

The logits are used without an activation. MONAI's `PatchAdversarialLoss` applies a LeakyReLU first, which shrinks the
gradient of negative logits.
"""

import torch
from torch import Tensor


def generator_adversarial_loss(logits: Tensor) -> Tensor:
    """Return the generator's loss, which pulls the logits of reconstructions to 1."""
    return _mean_squared_distance(logits, 1.0)


def discriminator_loss_real(logits: Tensor) -> Tensor:
    """Return the real half of the discriminator's loss, which pulls the logits of real volumes to 1.

    The discriminator's loss is the average of both halves. They are separate so that each can run backward before the
    other is computed.
    """
    return _mean_squared_distance(logits, 1.0)


def discriminator_loss_fake(logits: Tensor) -> Tensor:
    """Return the fake half of the discriminator's loss, which pulls the logits of reconstructions to 0."""
    return _mean_squared_distance(logits, 0.0)


def _mean_squared_distance(logits: Tensor, value: float) -> Tensor:
    with torch.autocast(logits.device.type, enabled=False):
        return (logits.float() - value).square().mean()
