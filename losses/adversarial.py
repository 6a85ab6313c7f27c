"""Least-squares adversarial terms on raw patch logits (LSGAN, Mao et al. 2017, with targets 1 for real and 0 for fake).

No activation in front: MONAI's `PatchAdversarialLoss` puts a LeakyReLU there, which weakens the pull of negative ones.
"""

import torch
from torch import Tensor


def generator_adversarial_loss(logits: Tensor) -> Tensor:
    """What the generator minimises: the logits of its reconstructions should be 1."""
    return _mean_squared_distance(logits, 1.0)


def discriminator_loss_real(logits: Tensor) -> Tensor:
    """The real half of the discriminator's objective: logits of real volumes should be 1.

    The halves are separate so that each can run backward before the other is computed; the objective is their average.
    """
    return _mean_squared_distance(logits, 1.0)


def discriminator_loss_fake(logits: Tensor) -> Tensor:
    """The fake half of the discriminator's objective: logits of reconstructions should be 0."""
    return _mean_squared_distance(logits, 0.0)


def _mean_squared_distance(logits: Tensor, value: float) -> Tensor:
    with torch.autocast(logits.device.type, enabled=False):
        return (logits.float() - value).square().mean()
