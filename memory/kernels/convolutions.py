"""What a convolution allocates besides its results: copies, a workspace, or an unfolded input.

cuDNN computes convolutions in 16 bits, and with TF32 those in fp32, in channels-last order. For contiguous tensors it
copies the input and the output into that order, in a workspace of their size; figures that others read from GPUs agree
with that to the percent. For channels-last tensors no workspace is known. Where torch does not use cuDNN, it unfolds
the input: a copy of channels x kernel x output voxels, one sample at a time.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.precision import ONEDNN_LIMIT

SHIPPED_CUDNN = 92000
"""The cuDNN that comes with the pinned torch; assumed where torch was built without cuDNN."""

_LOW_PRECISION = (torch.float16, torch.bfloat16)
aten = torch.ops.aten


@dataclass(frozen=True)
class ConvolutionMemory:
    """Bytes that the passes of one call hold, one pass after the other, and what they are.

    copies: those of arguments in another layout, which torch makes first and holds until the passes are over.
    pass_copies: those that it makes for one pass.
    unfolded: the size of the unfolded input if this call is computed without cuDNN.
    """

    passes: tuple[int, ...]
    copies: tuple[int, ...] = ()
    pass_copies: tuple[int, ...] = ()
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
        x, weight, *_, is_transposed, _, groups = args
        grad, y, wanted = None, out, [(x, out)]
    elif packet is aten.convolution_backward:
        grad, x, weight, *_, is_transposed, _, groups, needs = args
        y = grad
        wanted = [part for part, is_needed in zip(((grad, x), (x, grad)), needs[:2], strict=True) if is_needed]
    else:
        return None
    last = is_channels_last(x) or is_channels_last(weight)
    is_low = x.dtype in _LOW_PRECISION
    is_copied = not last and (is_low or x.dtype == torch.float32)
    # As ATen's Convolution.cpp has it: these versions compute volumes in 16 bits wrongly. Samples beyond 2^31 elements
    # are no matter: cuDNN has 64-bit indices from 9.3 on, and no build of the pinned torch comes with an older one.
    if 90800 <= cudnn < 91500 and is_low and not last and weight.dim() == 5 and weight.shape[2:].numel() > 1:
        channels, voxels = (y.shape[1], x.shape[2:]) if is_transposed else (x.shape[1], y.shape[2:])
        unfolded = channels // groups * weight.shape[2:].numel() * voxels.numel() * x.element_size()
        return ConvolutionMemory((unfolded,) * len(wanted), unfolded=unfolded)
    return ConvolutionMemory(
        tuple(source.nbytes + result.nbytes if is_copied else 0 for source, result in wanted),
        *_copies([source is x for source, _ in wanted], x, weight, grad, last, is_transposed),
    )


def convolution_layout(func: Any, args: tuple[Any, ...]) -> torch.memory_format | None:
    """Return the layout in which cuDNN returns what has the axes of its input; None for other operators."""
    packet = func._overloadpacket
    if packet not in (aten.convolution, aten.convolution_backward):
        return None
    x, weight = args[:2] if packet is aten.convolution else args[1:3]
    return _layout_of(x, x.dim() in (4, 5) and (is_channels_last(x) or is_channels_last(weight)))


def trial_key(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return by what torch remembers which algorithm cuDNN's trials chose: sizes and layout, but no strides.

    So slices of a gradient share the trials of a gradient that is whole.
    """
    first = int(func._overloadpacket is aten.convolution_backward)  # whose first argument is a gradient
    x, weight = args[first : first + 2]
    geometry = (tuple(part) if isinstance(part, list) else part for part in args[first + 3 : first + 9])
    return (func, x.dtype, x.shape, weight.shape, convolution_layout(func, args), *geometry)


def _copies(
    read_x: list[bool], x: Tensor, weight: Tensor, grad: Tensor | None, last: bool, is_transposed: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the copies that a call makes first, and those of each of its passes; `read_x`: which passes read `x`.

    A gradient that is not dense is copied for each pass, but once for a transposed convolution, or if its strides name
    the other layout. Those of a gradient with one channel may do that, although it is dense in both.
    """
    of_x, of_weight = (0 if _is_dense(part, last) else part.nbytes for part in (x, weight))
    if grad is None:
        return (of_x,), (of_weight,)
    of_grad, once = 0 if _is_dense(grad, last) else grad.nbytes, 0
    if is_transposed:
        of_grad, once = 0, of_grad
    elif is_channels_last(grad) != last:
        of_grad, once = 0, grad.nbytes
    first = (of_x if any(read_x) else 0, once)
    return first if read_x else (), tuple(of_grad + (0 if reads_x else of_weight) for reads_x in read_x)


def is_channels_last(x: Tensor) -> bool:
    """Return whether torch reads the strides of `x` as channels-last."""
    return x.dim() in (4, 5) and x.stride(1) == 1 and x.stride(-1) >= x.shape[1]


def _is_dense(x: Tensor, last: bool) -> bool:
    """Return whether torch reads `x` as it is in channels-last order, or in the other one."""
    return x.is_contiguous(memory_format=_layout_of(x, last))


def _layout_of(x: Tensor, last: bool) -> torch.memory_format:
    if not last:
        return torch.contiguous_format
    return torch.channels_last_3d if x.dim() == 5 else torch.channels_last


# On a CPU oneDNN computes contiguous tensors in blocks of channels, as many as a vector register holds: it copies the
# input and the weights into that order and the output back. Channels-last tensors are read as they are. Where oneDNN is
# not used, torch unfolds the input. Found by the growth of the resident memory around single calls, with torch 2.13.

SMALLEST_FOR_ONEDNN = 20480
"""torch asks oneDNN for a single sample only if batch x channels x rows x height exceed this, or for large kernels."""
_NARROW = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")
_SUPPORTED = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}
_limit: ContextVar[str | None] = ContextVar("limit", default=None)


@contextmanager
def limited_to(instructions: str) -> Iterator[None]:
    """Count inside the block as if oneDNN might use these instructions at most; else as ONEDNN_MAX_CPU_ISA says."""
    token = _limit.set(instructions)
    try:
        yield
    finally:
        _limit.reset(token)


def cpu_convolution_passes(func: Any, args: tuple[Any, ...], out: Any) -> list[int]:
    """Return what each pass of a convolution or of its backward holds besides its result; empty for other operators."""
    packet = func._overloadpacket
    if packet is aten.convolution:
        x, weight, _, stride, _, _, is_transposed, _, _ = args
        return [_result_pass(x, out, x, weight, stride, is_transposed)]
    passes = []
    if packet is aten.convolution_backward:
        grad, x, weight, _, stride, _, _, is_transposed, _, _, needs = args
        if needs[0]:  # the gradient of the input is a convolution of the other direction
            passes.append(_result_pass(grad, x, x, weight, stride, not is_transposed, is_backward=True))
        if needs[1]:
            passes.append(_weight_pass(grad, x, weight, stride, is_transposed))
    return passes


def _result_pass(
    source: Tensor,
    result: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    is_transposed: bool,
    is_backward: bool = False,
) -> int:
    """Return what a pass from `source` to `result` holds besides both; `x` is the input of the forward pass."""
    if not _asks_onednn(x, weight, stride):
        if _is_pointwise(weight, stride) and not is_backward:
            return x.nbytes if is_channels_last(x) else 0  # torch's own kernels copy it
        unfolded = _unfolded_on_cpu(source, result, weight, is_transposed)
        return unfolded * (3 if is_backward and x.element_size() == 2 else 1)
    if is_channels_last(x) or is_channels_last(weight):
        return 0
    if is_transposed and max(stride) > 1:
        return 2 * result.nbytes
    blocked = _blocked_bytes(result)
    return max(_blocked_bytes(source) + blocked - result.nbytes, blocked)


def _weight_pass(grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], is_transposed: bool) -> int:
    last = is_channels_last(x) or is_channels_last(weight)
    if not _asks_onednn(x, weight, stride):
        if _is_pointwise(weight, stride):
            return x.nbytes if is_channels_last(x) else 0
        return _unfolded_on_cpu(x, grad, weight, is_transposed)
    if _block() < 16 and not _is_pointwise(weight, stride):
        # Without AVX-512 one row of the input is unfolded at a time, after its sample was copied from channels-last.
        large, small = (grad, x) if is_transposed else (x, grad)
        row = _unfolded_on_cpu(large, small, weight, False) // small.shape[0] // small.shape[2]
        return row + (large.nbytes // large.shape[0] if last else 0)
    if last:
        return 0
    blocked = _blocked_bytes(grad) + (_blocked_bytes(x) if x.shape[1] > 1 else 0)
    return blocked * (2 if x.element_size() == 2 else 1)


def _asks_onednn(x: Tensor, weight: Tensor, stride: list[int]) -> bool:
    """Return whether torch computes with oneDNN, following the conditions in ATen's Convolution.cpp."""
    if x.dtype in _SUPPORTED:
        return _SUPPORTED[x.dtype]() and _block() == 16
    if x.dtype != torch.float32:
        return False
    if _is_pointwise(weight, stride) and x.shape[0] < 16 and torch.get_num_threads() == 1:
        return False
    is_wide = weight.shape[-1] > 3 and weight.shape[-2] > 3
    return is_wide or x.shape[0] > 1 or math.prod(x.shape[:4]) > SMALLEST_FOR_ONEDNN


def _is_pointwise(weight: Tensor, stride: list[int]) -> bool:
    return math.prod(weight.shape[2:]) == 1 and max(stride) == 1


def _unfolded_on_cpu(source: Tensor, result: Tensor, weight: Tensor, is_transposed: bool) -> int:
    """Return the size of all taps of the larger side at all voxels of the smaller one."""
    taps, voxels = (result, source) if is_transposed else (source, result)
    return taps.shape[0] * taps.shape[1] * weight.shape[2:].numel() * voxels.shape[2:].numel() * taps.element_size()


def _blocked_bytes(x: Tensor) -> int:
    """Return the size of a tensor whose channels are filled up to whole blocks."""
    return x.nbytes // x.shape[1] * (-(-x.shape[1] // _block()) * _block())


def _block() -> int:
    """Return how many channels one of oneDNN's blocks has."""
    is_limited = (_limit.get() or os.environ.get(ONEDNN_LIMIT, "")).upper() in _NARROW
    return 8 if is_limited or "AVX512" not in torch.backends.cpu.get_cpu_capability() else 16
