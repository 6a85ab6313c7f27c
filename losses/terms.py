"""The terms of stage 1 besides the perceptual one: errors of voxels and edges, KL, commitment, adversarial terms.

The last are least squares on raw patch logits (LSGAN, Mao et al. 2017, with targets 1 for real and 0 for fake). MONAI's
`PatchAdversarialLoss` applies a LeakyReLU first, which shrinks the gradient of negative logits.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

# Far below the smallest sigma the encoder can produce (3e-7: its log-variance is clamped at -30), far above underflow.
SMALLEST_SIGMA = 2e-9

LOWER_END = -1.0
SAME = 1e-3
"""Values that differ by less are equal: background that was resampled is rounded."""
MOST_SAMPLES = 1 << 16


def reconstruction_loss(
    reconstruction: Tensor, target: Tensor, kind: str, occupied_weight: float = 1.0, threshold: float = 0.0
) -> Tensor:
    """Return the mean absolute (`l1`) or mean squared (`l2`) error over all voxels, in fp32.

    The error of an occupied voxel, whose target differs from its channel's background by more than `threshold`, counts
    `occupied_weight` times. The mean is still over the number of voxels, so that accumulated micro-batches equal one
    large batch.
    """
    assert kind in ("l1", "l2"), f"reconstruction loss is l1 or l2, not {kind!r}"
    assert reconstruction.shape == target.shape, f"shapes differ: {reconstruction.shape} and {target.shape}"
    measure = F.l1_loss if kind == "l1" else F.mse_loss
    with torch.autocast(reconstruction.device.type, enabled=False):
        if occupied_weight == 1:
            return measure(reconstruction.float(), target.float())
        errors = measure(reconstruction.float(), target.float(), reduction="none")
        return torch.where(occupied(target, target, threshold), occupied_weight * errors, errors).mean()


def edge_loss(reconstruction: Tensor, target: Tensor, kind: str) -> Tensor:
    """Return the error of the differences between neighbouring voxels, absolute (`l1`) or squared (`l2`), in fp32.

    It is the mean over all pairs of neighbours along an axis, summed over the axes. Medical volumes have most of their
    energy in coarse structure, which the error of the voxels learns first; differences weigh fine detail more.
    """
    assert kind in ("l1", "l2"), f"edge loss is l1 or l2, not {kind!r}"
    with torch.autocast(reconstruction.device.type, enabled=False):
        error = reconstruction.float() - target.float()
        total = torch.zeros((), device=error.device)
        for axis in (2, 3, 4):
            if error.shape[axis] > 1:
                difference = error.diff(dim=axis)
                total = total + (difference.abs() if kind == "l1" else difference.square()).mean()
        return total


def commitment_loss(latent: Tensor, quantised: Tensor) -> Tensor:
    """Return the mean squared distance of a latent from its quantised values, in fp32; the latent is drawn to them."""
    with torch.autocast(latent.device.type, enabled=False):
        return F.mse_loss(latent.float(), quantised.detach().float())


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


def occupied(volumes: Tensor, true: Tensor, threshold: float) -> Tensor:
    """Return which voxels of (B, C, D, H, W) in [-1, 1] differ from the background of `true` by more than `threshold`.

    The threshold is a share of the intensity range.
    """
    return (volumes - background(true)).abs() > 2 * threshold


def background(volumes: Tensor) -> Tensor:
    """Return the background of each channel (B, C, 1, 1, 1): what at least half of its voxels equal.

    A channel without such a value, as in a patch full of tissue, has the lower end of the range as its background. A
    signed channel has it inside its range: a velocity is 0 where nothing was seen.
    """
    voxels = volumes.detach().flatten(2)
    # Some voxels tell it. An odd stride does not fall on the same columns of a grid again and again.
    some = voxels[..., :: (voxels.shape[-1] // MOST_SAMPLES) | 1]
    middle = some.sort(dim=-1).values[..., some.shape[-1] // 2 :][..., :1]
    is_common = ((some - middle).abs() < SAME).float().mean(dim=-1, keepdim=True) >= 0.5
    return torch.where(is_common, middle, LOWER_END)[..., None, None]


def adversarial_loss(logits: Tensor, is_real: bool) -> Tensor:
    """Return the mean squared distance of logits from 1 if they are to be those of real volumes, else from 0, in fp32.

    The generator wants its reconstructions to be taken for real. The discriminator's loss is the average of that of
    real volumes and that of reconstructions, which are separate so that each can run backward on its own.
    """
    with torch.autocast(logits.device.type, enabled=False):
        return (logits.float() - float(is_real)).square().mean()
