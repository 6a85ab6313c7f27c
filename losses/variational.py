"""The two terms of a variational autoencoder: the reconstruction error and the latent's KL divergence from N(0, 1)."""

import torch
from torch import Tensor
from torch.nn import functional as F

# Far below the smallest sigma the encoder can produce (3e-7: its log-variance is clamped at -30), far above underflow.
SMALLEST_SIGMA = 2e-9


def reconstruction_loss(reconstruction: Tensor, target: Tensor, kind: str) -> Tensor:
    """Return the mean absolute (`l1`) or mean squared (`l2`) error over all voxels, in fp32."""
    assert kind in ("l1", "l2"), f"reconstruction loss is l1 or l2, not {kind!r}"
    assert reconstruction.shape == target.shape, f"shapes differ: {reconstruction.shape} and {target.shape}"
    with torch.autocast(reconstruction.device.type, enabled=False):
        if kind == "l1":
            return F.l1_loss(reconstruction.float(), target.float())
        return F.mse_loss(reconstruction.float(), target.float())


def kl_divergence(mu: Tensor, sigma: Tensor, num_voxels: int) -> Tensor:
    """Return the KL divergence of N(mu, sigma^2) from N(0, 1) in nats per image voxel, averaged over the batch.

    The sum over the latent elements of a volume is divided by `num_voxels`, the image voxels of that volume (channels
    times depth, height and width). The reconstruction loss is a mean over the same voxels, so their weighted sum is the
    textbook objective divided by a constant, and a weight means the same for every grid, patch and batch size. Computed
    in fp32, because squares overflow and the logarithm underflows in fp16.
    """
    assert num_voxels > 0, f"num_voxels must be positive, not {num_voxels}"
    with torch.autocast(mu.device.type, enabled=False):
        mu = mu.float()
        sigma = sigma.float().clamp_min(SMALLEST_SIGMA)
        per_element = 0.5 * (mu.square() + sigma.square() - 1.0) - sigma.log()
        # Over the axes rather than flattened, which would copy latents with channels last.
        axes = tuple(range(1, per_element.dim()))
        return per_element.sum(axes).mean() / num_voxels
