"""Inference past the memory of the device: blocks whose volumes lie in host memory and pass through it in slabs.

A norm needs statistics of all rows before the first one can be normalised. So each block visits its rows twice: once to
compute what the second norm sees, once to produce the output. The rows between the two visits, and the output, stay in
host memory; nothing but an upsampling in front of the block is computed twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import TypeIs

from models.lean.host_volumes import HostSpace, HostVolume, Remembered, with_halos
from models.lean.norm.affine import Norm
from models.lean.slab_blocks import statistics_of
from models.lean.slabs import (
    ConvolvedRows,
    NormedRows,
    RowSource,
    Statistics,
    Volume,
    convolve,
    empty,
    read,
    slabs,
    volume_bytes,
)

Layers = tuple[tuple[nn.GroupNorm, nn.GroupNorm], tuple[nn.Conv3d, nn.Conv3d], nn.Conv3d | None]
"""The norms, the convolutions and the shortcut of a residual block."""


class Residual(NamedTuple):
    """The parameters of a residual block, those of its convolutions in the dtype that they compute in."""

    scale1: Tensor
    shift1: Tensor
    weight1: Tensor
    bias1: Tensor
    scale2: Tensor
    shift2: Tensor
    weight2: Tensor
    bias2: Tensor
    shortcut: Tensor | None
    shortcut_bias: Tensor | None
    groups: int
    eps: float

    @classmethod
    def of(cls, layers: Layers, dtype: torch.dtype) -> Residual:
        """Return the parameters of a block with these layers."""
        norms, convs, shortcut = layers
        parts: list[Any] = []
        for norm, conv in zip(norms, convs, strict=True):
            parts += [norm.weight, norm.bias, *(part.to(dtype) for part in conv.parameters())]
        parts += [None, None] if shortcut is None else [part.to(dtype) for part in shortcut.parameters()]
        parts += [norms[0].num_groups, norms[0].eps]
        return cls(*parts)


def stored(x: RowSource, rows: int, host: HostSpace | None) -> Volume:
    """Compute all rows of a volume; put them into host memory if they are to lie there, else on the device."""
    if host is not None and volume_bytes(x) > host.above:
        volume = host.volume(x)
        for start, end in slabs(x, rows, x.shape[1], x.dtype):
            volume.write(start, x.rows(start, end))
        return volume
    out = empty(x)
    for start, end in slabs(x, rows, x.shape[1], x.dtype):
        x.fill(out[:, :, start:end], start, end)
    return out


def residual_on_host(
    x: Volume, block: Residual, rows: int, host: HostSpace, keeps_input: bool = False
) -> tuple[HostVolume, tuple[Norm, Norm]]:
    """Apply a residual block in slabs of `rows` rows; return its output, in host memory, and its norms.

    The less of that is free, the more is computed twice: first the shortcut of an input that is computed on demand is
    kept in place of the input, then neither, and the output overwrites the input, if it fits there, in place of what
    the second norm sees. With `keeps_input`, for backward, nothing is kept but the output: to compute what the second
    norm sees again takes less time than to copy it to the host and back.
    """
    dtype = block.weight1.dtype
    with torch.autocast(x.device.type, enabled=False):
        all_slabs = slabs(x, rows, min(block.weight1.shape[:2]), dtype)
        length = all_slabs[0][1]
        size = x.shape.numel() // x.shape[1] * block.weight1.shape[0] * dtype.itemsize
        spare = 0 if keeps_input else host.free
        if _is_computed(x) and block.shortcut is not None and spare >= volume_bytes(x) + size:
            x, spare = stored(x, rows, host), host.free
        overwrites = isinstance(x, HostVolume) and x.dtype == dtype and block.shortcut is None and spare < size
        recomputes, overwrites = overwrites or keeps_input, overwrites and not keeps_input
        norm1 = Norm(*statistics_of(x, block.groups, block.eps, rows), block.scale1, block.shift1, silu=True)
        source = with_halos(x, length)
        convolved = ConvolvedRows(NormedRows(source, norm1, dtype), block.weight1, block.bias1)
        out = x if isinstance(x, HostVolume) and overwrites else host.volume(convolved)
        has_room = not keeps_input and host.free >= size
        beside = host.volume(convolved) if block.shortcut is not None and _is_computed(x) and has_room else None
        inner = Statistics(convolved, all_slabs, block.groups, block.eps)
        for start, end in all_slabs:
            part = convolved.rows(start, end)
            inner.add(part)
            if not recomputes:
                out.write(start, part)
            if beside is not None:
                beside.write(start, _shortcut(source, block, start, end))
        norm2 = Norm(*inner.result(), block.scale2, block.shift2, silu=True)
        h = Remembered(convolved) if recomputes else with_halos(out, length)
        second = NormedRows(h, norm2, dtype)
        outer = Statistics(convolved, all_slabs, block.groups, block.eps)
        for start, end in all_slabs:
            part = convolve(second.rows(start - 1, end + 1), block.weight2, block.bias2)
            # The rows that the next slab needs of what is overwritten here are remembered.
            part += _shortcut(source, block, start, end) if beside is None else beside.rows(start, end)
            outer.add(part)
            out.write(start, part)
        out.statistics = {(block.groups, block.eps): outer.result()}
    return out, (norm1, norm2)


def _is_computed(x: Volume) -> TypeIs[RowSource]:
    """Return whether the rows of a volume are computed whenever they are read."""
    return isinstance(x, RowSource) and not isinstance(x, HostVolume)


def _shortcut(x: Volume, block: Residual, start: int, end: int) -> Tensor:
    rows = read(x, start, end).to(block.weight1.dtype)
    return rows if block.shortcut is None else F.conv3d(rows, block.shortcut, block.shortcut_bias)
