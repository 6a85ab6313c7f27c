"""The mean of a distance over many pieces of a volume, in the memory of one chunk of pieces.

The loss is a sum over pieces, so each chunk's gradient is final as soon as the chunk is computed. It is therefore taken
during the forward pass and added into one volume; nothing of the network is kept until backward. Compared with
checkpointing the chunks, the memory is the same and no chunk runs forward twice.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

# A place inside (batch, channel, depth, height, width): integers pick, slices keep.
Index = tuple[int | slice, ...]
# Maps pieces (n, ...) of reconstruction and target to n distances.
Distance = Callable[[Tensor, Tensor], Tensor]

# Networks see [-1, 1]. A diverging reconstruction is cut here, where squared features still fit fp32.
LARGEST_INTENSITY = 1e4


class FrozenTerm(nn.Module):
    """A perceptual term, called as `term(reconstruction, target, step)`: never trained, always in eval, never saved."""

    def freeze(self) -> None:
        """Stop gradients to whatever network the term holds; to be called once it is built."""
        self.requires_grad_(False)
        super().train(False)

    def train(self, mode: bool = True) -> "FrozenTerm":
        """Stay in eval: dropout and batch statistics have no place in a yardstick."""
        return super().train(False)


def mean_over_pieces(
    reconstruction: Tensor, target: Tensor, chunks: Sequence[Sequence[Index]], distance: Distance
) -> Tensor:
    """Mean distance between the pieces of two volumes; each chunk's pieces have one shape and are compared at once.

    Computed in fp32 also under autocast: near convergence features differ by less than bf16 resolves.
    """
    assert reconstruction.shape == target.shape, f"shapes differ: {reconstruction.shape} and {target.shape}"
    with torch.autocast(reconstruction.device.type, enabled=False):
        if torch.is_grad_enabled() and reconstruction.requires_grad:
            return _GradientInForward.apply(reconstruction, target, chunks, distance)
        total = torch.zeros((), device=reconstruction.device, dtype=_precision(reconstruction))
        for chunk in chunks:
            total += distance(_gather(reconstruction, chunk), _gather(target, chunk)).sum()
        return total / _count(chunks)


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
        gradient /= _count(chunks)
        ctx.save_for_backward(gradient)
        ctx.dtype = reconstruction.dtype
        return total / _count(chunks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output: Tensor):
        (gradient,) = ctx.saved_tensors
        # Scaled before it is cast: a GradScaler's factor must reach fp16 before the small values are lost.
        return (gradient * grad_output).to(ctx.dtype), None, None, None


def _gather(volume: Tensor, chunk: Sequence[Index]) -> Tensor:
    volume = volume.detach()
    pieces = torch.stack([volume[index] for index in chunk])
    return pieces.to(_precision(volume)).clamp(-LARGEST_INTENSITY, LARGEST_INTENSITY)


def _precision(volume: Tensor) -> torch.dtype:
    return torch.promote_types(volume.dtype, torch.float32)


def _count(chunks: Sequence[Sequence[Index]]) -> int:
    return sum(len(chunk) for chunk in chunks)
