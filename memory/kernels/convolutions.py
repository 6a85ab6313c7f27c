"""What a convolution allocates on a GPU besides its results: copies, cuDNN's workspace, or an unfolded input.

cuDNN computes 16-bit convolutions in channels-last order. For contiguous tensors it copies the input and the output
into that order, in a workspace of their size; figures that others read from GPUs agree with that to the percent. For
channels-last tensors and for fp32 no workspace is known. Where torch does not use cuDNN, it unfolds the input: a copy
of channels x kernel x output voxels, one sample at a time.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SHIPPED_CUDNN = 92000
"""The cuDNN that comes with the pinned torch; assumed where torch was built without cuDNN."""

LARGEST_SAMPLE = 2**31 - 1
"""Beyond this many elements a sample needs 64-bit indices, which cuDNN has from version 9.3 on."""

_LOW_PRECISION = (torch.float16, torch.bfloat16)
aten = torch.ops.aten


@dataclass(frozen=True)
class ConvolutionMemory:
    """Bytes that the passes of one call hold, one pass after the other, and what they are.

    copies: those of arguments in another layout, which torch makes first and holds until the passes are over.
    pass_copies: those that it makes for one pass.
    unfolded: the size of the unfolded input if this call is, or with an older cuDNN would be, computed without cuDNN.
    """

    passes: tuple[int, ...]
    copies: tuple[int, ...] = ()
    pass_copies: tuple[int, ...] = ()
    is_unfolded: bool = False
    unfolded: int = 0


@functools.cache
def cudnn_version() -> int:
    """Return the version of the cuDNN that torch would use."""
    if torch.cuda.is_available() and not torch.cuda.device_count():
        return SHIPPED_CUDNN  # torch compares the version with the GPUs it sees, and cannot do so without any
    return torch.backends.cudnn.version() or SHIPPED_CUDNN


def convolution_memory(func: Any, args: tuple[Any, ...], out: Any, cudnn: int) -> ConvolutionMemory | None:
    """Return what one call of a convolution or of its backward allocates; None for other operators."""
    packet = func._overloadpacket
    if packet is aten.convolution:
        x, weight, _, _, _, _, is_transposed, _, groups = args
        return _memory([(x, out)], x, weight, None, out, is_transposed, groups, cudnn)
    if packet is aten.convolution_backward:
        grad, x, weight, *_, is_transposed, _, groups, needs = args
        wanted = [part for part, is_needed in zip(((grad, x), (x, grad)), needs[:2], strict=True) if is_needed]
        return _memory(wanted, x, weight, grad, grad, is_transposed, groups, cudnn)
    return None


def convolution_layout(func: Any, args: tuple[Any, ...]) -> torch.memory_format | None:
    """Return the layout in which cuDNN returns what has the axes of its input; None for other operators."""
    packet = func._overloadpacket
    if packet not in (aten.convolution, aten.convolution_backward):
        return None
    x, weight = args[:2] if packet is aten.convolution else args[1:3]
    if x.dim() not in (4, 5) or not (is_channels_last(x) or is_channels_last(weight)):
        return torch.contiguous_format
    return torch.channels_last_3d if x.dim() == 5 else torch.channels_last


def trial_key(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return by what torch remembers which algorithm cuDNN's trials chose: sizes and layout, but no strides.

    So slices of a gradient share the trials of a gradient that is whole.
    """
    first = int(func._overloadpacket is aten.convolution_backward)  # whose first argument is a gradient
    x, weight = args[first : first + 2]
    geometry = (tuple(part) if isinstance(part, list) else part for part in args[first + 3 : first + 9])
    return (func, x.dtype, x.shape, weight.shape, convolution_layout(func, args), *geometry)


def _memory(
    wanted: list[tuple[Tensor, Tensor]],
    x: Tensor,
    weight: Tensor,
    grad: Tensor | None,
    y: Tensor,
    is_transposed: bool,
    groups: int,
    cudnn: int,
) -> ConvolutionMemory:
    last = is_channels_last(x) or is_channels_last(weight)
    is_large = max(x.numel() // x.shape[0], y.numel() // y.shape[0]) > LARGEST_SAMPLE
    is_low = x.dtype in _LOW_PRECISION
    if _cudnn_refuses(weight, last, is_low, is_large, cudnn):
        nbytes = _unfolded_bytes(x, weight, y, is_transposed, groups)
        return ConvolutionMemory((nbytes,) * len(wanted), is_unfolded=True, unfolded=nbytes)
    return ConvolutionMemory(
        tuple(nbytes_of(source) + nbytes_of(result) if is_low and not last else 0 for source, result in wanted),
        *_copies([source is x for source, _ in wanted], x, weight, grad, last, is_transposed),
        unfolded=_unfolded_bytes(x, weight, y, is_transposed, groups) if is_large else 0,
    )


def _copies(
    read_x: list[bool], x: Tensor, weight: Tensor, grad: Tensor | None, last: bool, is_transposed: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the copies that a call makes first, and those of each of its passes; `read_x`: which passes read `x`.

    A gradient that is not dense is copied for each pass, but once for a transposed convolution, or if its strides name
    the other layout. Those of a gradient with one channel may do that, although it is dense in both.
    """
    of_x, of_weight = (0 if _is_dense(part, last) else nbytes_of(part) for part in (x, weight))
    if grad is None:
        return (of_x,), (of_weight,)
    of_grad, once = 0 if _is_dense(grad, last) else nbytes_of(grad), 0
    if is_transposed:
        of_grad, once = 0, of_grad
    elif is_channels_last(grad) != last:
        of_grad, once = 0, nbytes_of(grad)
    first = (of_x if any(read_x) else 0, once)
    return first if read_x else (), tuple(of_grad + (0 if reads_x else of_weight) for reads_x in read_x)


def _cudnn_refuses(weight: Tensor, last: bool, is_low: bool, is_large: bool, cudnn: int) -> bool:
    """Return whether torch computes without cuDNN, following the conditions in ATen's Convolution.cpp."""
    if is_large and cudnn < 90300:
        return True
    has_wrong_results = 90800 <= cudnn < 91500
    return has_wrong_results and is_low and not last and weight.dim() == 5 and math.prod(weight.shape[2:]) > 1


def _unfolded_bytes(x: Tensor, weight: Tensor, y: Tensor, is_transposed: bool, groups: int) -> int:
    channels, voxels = (y.shape[1], x.shape[2:]) if is_transposed else (x.shape[1], y.shape[2:])
    return channels // groups * math.prod(weight.shape[2:]) * math.prod(voxels) * x.element_size()


def is_channels_last(x: Tensor) -> bool:
    """Return whether torch reads the strides of `x` as channels-last."""
    return x.dim() in (4, 5) and x.stride(1) == 1 and x.stride(-1) >= x.shape[1]


def _is_dense(x: Tensor, last: bool) -> bool:
    """Return whether torch reads `x` as it is in channels-last order, or in the other one."""
    layout = torch.contiguous_format
    if last:
        layout = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
    return x.is_contiguous(memory_format=layout)


def nbytes_of(x: Tensor) -> int:
    """Return the bytes of the elements of `x`."""
    return x.numel() * x.element_size()
