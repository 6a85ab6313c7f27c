"""Memory layouts that a volume can arrive in; each function returns the same values, laid out in its way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)


def every_other_voxel(x: Tensor) -> Tensor:
    """A view of a wider tensor, whose other values are not numbers: reading one would show."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def some_channels(x: Tensor) -> Tensor:
    """A view of a tensor with more channels, as the gradient of a part of a concatenation is."""
    wide = torch.full((x.shape[0], x.shape[1] + 3, *x.shape[2:]), torch.nan, dtype=x.dtype)
    wide[:, 2:-1] = x
    return wide[:, 2:-1]


def batch_last(x: Tensor) -> Tensor:
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "channels last": channels_last,
    "every other voxel": every_other_voxel,
    "some channels": some_channels,
    "batch last": batch_last,
}
