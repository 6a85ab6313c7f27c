"""What all perceptual terms share, and the one that needs no weights: structure and gradients at several scales.

Terms are means of a distance over pieces of a volume, in the memory of one chunk of pieces. The loss is a sum over
pieces, so each chunk's gradient is final as soon as the chunk is computed. It is therefore computed during the forward
pass and added into one volume, and no activations are kept for backward. This takes as little memory as checkpointing
the chunks, and no chunk runs forward twice.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# An index into (batch, channel, depth, height, width) of integers and slices.
Index = tuple[int | slice, ...]
# Maps pieces (n, ...) of reconstruction and target to n distances.
Distance = Callable[[Tensor, Tensor], Tensor]

# Networks expect [-1, 1]. A diverging reconstruction is clamped here, where squared features still fit fp32.
LARGEST_INTENSITY = 1e4

NUM_SCALES = 4
# An axis is halved only while at least this many voxels remain.
SHORTEST_AXIS = 4
# SSIM's constant for intensities that span 2: (0.03 * 2)^2.
CONTRAST_FLOOR = 3.6e-3
# A local mean that is off by 0.3, a seventh of the range, has a similarity of about a half.
LUMINANCE_FLOOR = 0.1


class FrozenTerm(nn.Module):
    """A perceptual term, called as `term(reconstruction, target, step)`: frozen, always in eval mode, never saved."""

    def forward(self, reconstruction: Tensor, target: Tensor, step: int) -> Tensor:
        """Return the mean distance over what the step compares."""
        return mean_over_pieces(reconstruction, target, self.chunks(reconstruction.shape, step), self.distance)

    def chunks(self, shape: Sequence[int], step: int) -> list[list[Index]]:
        """Return the pieces that a step compares, in chunks: at any step each channel of each volume by itself."""
        return [[(volume, channel)] for volume in range(shape[0]) for channel in range(shape[1])]

    def distance(self, pieces: Tensor, wanted: Tensor) -> Tensor:
        """Return the distance of each pair of pieces of one channel (n, ...); gradients flow to the first only."""
        raise NotImplementedError

    def freeze(self) -> None:
        """Freeze the term's network; call this once it is built."""
        self.requires_grad_(False)
        super().train(False)

    def train(self, mode: bool = True) -> "FrozenTerm":
        """Stay in eval mode, without dropout and batch statistics."""
        return super().train(False)


def mean_over_pieces(
    reconstruction: Tensor, target: Tensor, chunks: Sequence[Sequence[Index]], distance: Distance
) -> Tensor:
    """Return the mean distance between pieces of two volumes; the pieces of a chunk have one shape and run as a batch.

    Computed in fp32 even under autocast, because near convergence features differ by less than bf16 resolves.
    """
    assert reconstruction.shape == target.shape, f"shapes differ: {reconstruction.shape} and {target.shape}"
    with torch.autocast(reconstruction.device.type, enabled=False):
        if torch.is_grad_enabled() and reconstruction.requires_grad:
            return _GradientInForward.apply(reconstruction, target, chunks, distance)
        total = torch.zeros((), device=reconstruction.device, dtype=_precision(reconstruction))
        for chunk in chunks:
            total += distance(_gather(reconstruction, chunk), _gather(target, chunk)).sum()
        return total / sum(map(len, chunks))


class _GradientInForward(torch.autograd.Function):
    """Computes the mean and its gradient in one pass; backward only scales the stored gradient."""

    @staticmethod
    def forward(ctx, reconstruction: Tensor, target: Tensor, chunks: Sequence[Sequence[Index]], distance: Distance):
        total = torch.zeros((), device=reconstruction.device, dtype=_precision(reconstruction))
        gradient = torch.zeros_like(reconstruction, dtype=_precision(reconstruction))
        for chunk in chunks:
            wanted = _gather(target, chunk)
            with torch.enable_grad():
                pieces = _gather(reconstruction, chunk).requires_grad_()
                loss = distance(pieces, wanted).sum()
                (piece_gradients,) = torch.autograd.grad(loss, pieces)
            total += loss.detach()
            for index, piece_gradient in zip(chunk, piece_gradients, strict=True):
                gradient[index].add_(piece_gradient)
        count = sum(map(len, chunks))
        gradient /= count
        ctx.save_for_backward(gradient)
        ctx.dtype = reconstruction.dtype
        return total / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output: Tensor):
        (gradient,) = ctx.saved_tensors
        # Scale before casting: in fp16, small values would be lost before a GradScaler's factor reaches them.
        return (gradient * grad_output).to(ctx.dtype), None, None, None


def _gather(volume: Tensor, chunk: Sequence[Index]) -> Tensor:
    volume = volume.detach()
    pieces = torch.stack([volume[index] for index in chunk])
    return pieces.to(_precision(volume)).clamp(-LARGEST_INTENSITY, LARGEST_INTENSITY)


def _precision(volume: Tensor) -> torch.dtype:
    return torch.promote_types(volume.dtype, torch.float32)


class StructuralDistance(FrozenTerm):
    """One minus the mean similarity over scales, volumes and channels: 0 for equal volumes, at most 2.

    Each scale has two similarities, which are 1 for equal volumes:

    - the contrast-structure part of SSIM (Wang et al. 2003), (2 cov(x, y) + c) / (var x + var y + c), in windows of
      six voxels;
    - the same ratio for the intensity gradients, (2 <grad x, grad y> + c) / (|grad x|^2 + |grad y|^2 + c), averaged
      over blocks of two voxels before the division. It falls if an edge is lost (blur), invented (noise) or rotated.

    Local means are compared at the coarsest scale only, as in multi-scale SSIM, but by their difference: SSIM's ratio
    is 0.5 for an error of a tenth of the range in black background, which is most of a medical volume. Similarities
    are averaged, not multiplied with fractional exponents, whose gradient is NaN or infinite where one is not positive.
    """

    def distance(self, pieces: Tensor, wanted: Tensor) -> Tensor:
        """Return the distance of each pair of volumes of one channel, of any size."""
        x, y = pieces.unsqueeze(1), wanted.unsqueeze(1)
        similarities = []
        for scale in range(NUM_SCALES):
            factor = tuple(2 if size >= 2 * SHORTEST_AXIS else 1 for size in x.shape[2:])
            is_last = scale == NUM_SCALES - 1 or max(factor) == 1
            similarities.append(_gradient_similarity(x, y, factor))
            similarities.append(_contrast_similarity(x, y, factor))
            x, y = F.avg_pool3d(x, factor), F.avg_pool3d(y, factor)
            if is_last:
                similarities.append(_mean(LUMINANCE_FLOOR / ((x - y).square() + LUMINANCE_FLOOR)))
                break
        return 1 - torch.stack(similarities).mean(dim=0)


def _contrast_similarity(x: Tensor, y: Tensor, factor: Sequence[int]) -> Tensor:
    # Variances do not depend on a common offset, and without it the differences below lose less precision.
    offset = y.mean(dim=(1, 2, 3, 4), keepdim=True)
    x, y = x - offset, y - offset
    mean_x, mean_y = _window(x, factor), _window(y, factor)
    # Rounding can make a variance negative.
    var_x = (_window(x.square(), factor) - mean_x.square()).clamp_min(0)
    var_y = (_window(y.square(), factor) - mean_y.square()).clamp_min(0)
    covariance = _window(x * y, factor) - mean_x * mean_y
    return _mean((2 * covariance + CONTRAST_FLOOR) / (var_x + var_y + CONTRAST_FLOOR))


def _gradient_similarity(x: Tensor, y: Tensor, factor: Sequence[int]) -> Tensor:
    product = torch.zeros_like(y)
    energy = torch.zeros_like(y)
    for axis in (2, 3, 4):
        # The last voxel has no neighbour, so its difference is 0 in both volumes.
        slope_x = torch.diff(x, dim=axis, append=x.narrow(axis, x.shape[axis] - 1, 1))
        slope_y = torch.diff(y, dim=axis, append=y.narrow(axis, y.shape[axis] - 1, 1))
        product = product + slope_x * slope_y
        energy = energy + slope_x.square() + slope_y.square()
    product, energy = F.avg_pool3d(product, tuple(factor)), F.avg_pool3d(energy, tuple(factor))
    return _mean((2 * product + CONTRAST_FLOOR) / (energy + CONTRAST_FLOOR))


def _window(x: Tensor, factor: Sequence[int]) -> Tensor:
    """Return means over windows of six voxels, two apart; averaging blocks of two first saves most of the work."""
    blocks = F.avg_pool3d(x, tuple(factor))
    return F.avg_pool3d(blocks, tuple(min(3, size) for size in blocks.shape[2:]), stride=1)


def _mean(similarity: Tensor) -> Tensor:
    return similarity.mean(dim=(1, 2, 3, 4))
