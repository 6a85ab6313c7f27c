"""Keeps the inputs of checkpoints in 8 bits until backward: half of their memory, and slightly other gradients.

Each value is stored as one of 256 levels between the smallest and the largest of 128 neighbouring voxels of its
channel. The forward pass is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.lean.checkpointing import MIN_OFFLOAD_BYTES, HostOffload
from models.lean.layout import CONTIGUOUS, layout_of
from models.lean.native import SavedTensorHooks, hooks_in_force

GROUP = 128
"""Voxels of one channel that share a scale."""
PIECE_VALUES = 1 << 24
"""Values that are converted at a time, so that the copies in full precision stay small."""
LEVELS = 255


@dataclass(eq=False)
class Compressed:
    """A volume in 8 bits: its codes and, for each group, what a code of zero means and the distance between codes."""

    codes: Any
    low: Any
    step: Any
    shape: torch.Size
    dtype: torch.dtype
    layout: torch.memory_format


def _voxels(x: Tensor, layout: torch.memory_format) -> tuple[Tensor, int]:
    """View a volume such that the voxels are along one axis; return that axis, too."""
    return (x.flatten(2), 2) if layout == CONTIGUOUS else (x.movedim(1, -1).flatten(1, 3), 1)


def _pieces(x: Tensor, axis: int) -> Iterator[tuple[int, int, int]]:
    """Yield the first voxel, the number of groups and the voxels per group of each piece; the last group is short."""
    voxels = x.shape[axis]
    whole = voxels // GROUP
    most = max(PIECE_VALUES * voxels // x.numel() // GROUP, 1)
    for group in range(0, whole, most):
        yield group * GROUP, min(most, whole - group), GROUP
    if voxels % GROUP:
        yield whole * GROUP, 1, voxels % GROUP


def compress(x: Tensor) -> Compressed:
    """Return a volume (batch, channels, rows, height, width) in 8 bits."""
    layout = layout_of(x)
    values, axis = _voxels(x, layout)
    full = torch.promote_types(x.dtype, torch.float32)
    # A smaller step would be rounded so much that the largest value of its group has no code.
    least = torch.finfo(full).smallest_normal
    codes = torch.empty_like(values, dtype=torch.uint8)
    scales = [*values.shape]
    scales[axis] = -(-values.shape[axis] // GROUP)
    low, step = (torch.zeros(scales, dtype=full, device=x.device) for _ in range(2))
    for start, number, size in _pieces(values, axis):
        group = start // GROUP
        part = values.narrow(axis, start, number * size).unflatten(axis, (number, size))
        to_low, to_step = (scale.narrow(axis, group, number).unsqueeze(axis + 1) for scale in (low, step))
        smallest, largest = (end.to(full) for end in torch.aminmax(part, dim=axis + 1, keepdim=True))
        to_low.copy_(smallest)
        to_step.copy_(((largest - smallest) / LEVELS).clamp_(min=least))
        # Half a step more, because conversion to whole numbers cuts off what is behind the point.
        smallest -= to_step / 2
        part = torch.sub(part, smallest).div_(to_step)
        codes.narrow(axis, start, number * size).copy_(part.flatten(axis, axis + 1))
    return Compressed(codes, low, step, x.shape, x.dtype, layout)


def expand(packed: Compressed) -> Tensor:
    """Return the volume that `compress` was given, as closely as 8 bits hold it."""
    out = torch.empty(packed.shape, dtype=packed.dtype, device=packed.codes.device, memory_format=packed.layout)
    values, axis = _voxels(out, packed.layout)
    for start, number, size in _pieces(values, axis):
        low, step = (
            scale.narrow(axis, start // GROUP, number).unsqueeze(axis + 1) for scale in (packed.low, packed.step)
        )
        codes = packed.codes.narrow(axis, start, number * size).unflatten(axis, (number, size))
        target = values.narrow(axis, start, number * size).unflatten(axis, (number, size))
        torch.add(codes * step, low, out=target)
    return out


class Compression(AbstractContextManager[None]):
    """Saved-tensor hooks that keep large activations in 8 bits, in host memory if an `offload` is given.

    Without one, the hooks around this context keep the 8 bits: a checkpoint around it, which computes them again, or
    none. Use one object per pass through a network.
    """

    def __init__(self, offload: HostOffload | None) -> None:
        self._kept_by: SavedTensorHooks | None = None if offload is None else (offload.pack, offload.unpack)
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []

    def __enter__(self) -> None:
        if self._kept_by is None:
            self._kept_by = hooks_in_force()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._hooks.append(hooks)

    def __exit__(self, *exc_info: Any) -> None:
        self._hooks.pop().__exit__(*exc_info)

    def _pack(self, tensor: Tensor) -> Any:
        assert self._kept_by is not None, "the context was not entered"
        keep, _ = self._kept_by
        small = tensor.numel() * tensor.element_size() < MIN_OFFLOAD_BYTES
        if small or isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad) or tensor.dim() != 5:
            return keep(tensor)
        packed = compress(tensor.detach())
        # The codes last: one copy leaves while the blocks run on, and the next fetch begins with what left last.
        packed.step, packed.low, packed.codes = map(keep, (packed.step, packed.low, packed.codes))
        return packed

    def _unpack(self, packed: Any) -> Tensor:
        assert self._kept_by is not None, "the context was not entered"
        _, kept = self._kept_by
        if not isinstance(packed, Compressed):
            return kept(packed)
        codes, low, step = map(kept, (packed.codes, packed.low, packed.step))
        return expand(Compressed(codes, low, step, packed.shape, packed.dtype, packed.layout))
