"""The mean of a distance over many pieces of a volume, in the memory of one chunk of pieces.

The loss is a sum over pieces, so each chunk's gradient is final as soon as the chunk is computed. It is therefore
computed during the forward pass and added into one volume, and no activations are kept for backward. This takes as
little memory as checkpointing the chunks, and no chunk runs forward twice.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from runtime.observer import memory_observer

# An index into (batch, channel, depth, height, width) of integers and slices.
Index = tuple[int | slice, ...]
# Maps pieces (n, ...) of reconstruction and target to n distances.
Distance = Callable[[Tensor, Tensor], Tensor]

# Networks expect [-1, 1]. A diverging reconstruction is clamped here, where squared features still fit fp32.
LARGEST_INTENSITY = 1e4


class FrozenTerm(nn.Module):
    """A perceptual term, called as `term(reconstruction, target, step)`: frozen, always in eval mode, never saved."""

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
        for chunk in memory_observer().chunks_to_run(chunks):
            total += distance(_gather(reconstruction, chunk), _gather(target, chunk)).sum()
        return total / sum(map(len, chunks))


def mean_over_volumes(reconstruction: Tensor, target: Tensor, distance: Distance) -> Tensor:
    """Return the mean distance over all volumes and channels, one channel of one volume at a time."""
    volumes, channels = reconstruction.shape[:2]
    chunks: list[list[Index]] = [[(volume, channel)] for volume in range(volumes) for channel in range(channels)]
    return mean_over_pieces(reconstruction, target, chunks, distance)


class _GradientInForward(torch.autograd.Function):
    """Computes the mean and its gradient in one pass; backward only scales the stored gradient."""

    @staticmethod
    def forward(ctx, reconstruction: Tensor, target: Tensor, chunks: Sequence[Sequence[Index]], distance: Distance):
        total = torch.zeros((), device=reconstruction.device, dtype=_precision(reconstruction))
        gradient = torch.zeros_like(reconstruction, dtype=_precision(reconstruction))
        for chunk in memory_observer().chunks_to_run(chunks):
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
