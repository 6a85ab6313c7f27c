"""What a convolution allocates on a CPU besides its results: copies in oneDNN's blocked order, or an unfolded input.

oneDNN computes contiguous tensors in blocks of channels, as many as a vector register holds: it copies the input and
the weights into that order and the output back. Channels-last tensors are read as they are. Where torch does not use
oneDNN, it unfolds the input. Found by the growth of the resident memory around single calls, with torch 2.13.0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from memory.kernels.convolutions import ConvolutionMemory, is_channels_last, nbytes_of
from runtime.precision import ONEDNN_LIMIT

SMALLEST_FOR_ONEDNN = 20480
"""torch asks oneDNN for a single sample only if batch x channels x rows x height exceed this, or for large kernels."""
_NARROW = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")
_SUPPORTED = {
    torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
}
_limit: ContextVar[str | None] = ContextVar("limit", default=None)
aten = torch.ops.aten


@contextmanager
def limited_to(instructions: str) -> Iterator[None]:
    """Count inside the block as if oneDNN might use these instructions at most; else as ONEDNN_MAX_CPU_ISA says."""
    token = _limit.set(instructions)
    try:
        yield
    finally:
        _limit.reset(token)


def cpu_convolution_memory(func: Any, args: tuple[Any, ...], out: Any) -> ConvolutionMemory | None:
    """Return what one call of a convolution or of its backward allocates; None for other operators."""
    packet = func._overloadpacket
    if packet is aten.convolution:
        x, weight, _, stride, _, _, is_transposed, _, _ = args
        return ConvolutionMemory((_result_pass(x, out, x, weight, stride, is_transposed),))
    if packet is aten.convolution_backward:
        grad, x, weight, _, stride, _, _, is_transposed, _, _, needs = args
        passes = []
        if needs[0]:  # the gradient of the input is a convolution of the other direction
            passes.append(_result_pass(grad, x, x, weight, stride, not is_transposed, is_backward=True))
        if needs[1]:
            passes.append(_weight_pass(grad, x, weight, stride, is_transposed))
        return ConvolutionMemory(tuple(passes))
    return None


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
            return _contiguous_bytes(x)
        unfolded = _unfolded_bytes(source, result, weight, is_transposed)
        return unfolded * (3 if is_backward and x.element_size() == 2 else 1)
    if is_channels_last(x) or is_channels_last(weight):
        return 0
    if is_transposed and max(stride) > 1:
        return 2 * nbytes_of(result)
    blocked = _blocked_bytes(result)
    return max(_blocked_bytes(source) + blocked - nbytes_of(result), blocked)


def _weight_pass(grad: Tensor, x: Tensor, weight: Tensor, stride: list[int], is_transposed: bool) -> int:
    if not _asks_onednn(x, weight, stride):
        is_pointwise = _is_pointwise(weight, stride)
        return _contiguous_bytes(x) if is_pointwise else _unfolded_bytes(x, grad, weight, is_transposed)
    last = is_channels_last(x) or is_channels_last(weight)
    if _block() < 16 and not _is_pointwise(weight, stride):
        # Without AVX-512 one row of the input is unfolded at a time, after its sample was copied from channels-last.
        large, small = (grad, x) if is_transposed else (x, grad)
        row = _unfolded_bytes(large, small, weight, False) // small.shape[0] // small.shape[2]
        return row + (nbytes_of(large) // large.shape[0] if last else 0)
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


def _contiguous_bytes(x: Tensor) -> int:
    """Return the size of the copy that torch's own kernels make of a channels-last tensor."""
    return nbytes_of(x) if is_channels_last(x) else 0


def _is_pointwise(weight: Tensor, stride: list[int]) -> bool:
    return math.prod(weight.shape[2:]) == 1 and max(stride) == 1


def _unfolded_bytes(source: Tensor, result: Tensor, weight: Tensor, is_transposed: bool) -> int:
    """Return the size of all taps of the larger side at all voxels of the smaller one."""
    taps, voxels = (result, source) if is_transposed else (source, result)
    return taps.shape[0] * taps.shape[1] * weight.shape[2:].numel() * voxels.shape[2:].numel() * taps.element_size()


def _blocked_bytes(x: Tensor) -> int:
    """Return the size of a tensor whose channels are filled up to whole blocks."""
    return nbytes_of(x) // x.shape[1] * (-(-x.shape[1] // _block()) * _block())


def _block() -> int:
    """Return how many channels one of oneDNN's blocks has."""
    is_limited = (_limit.get() or os.environ.get(ONEDNN_LIMIT, "")).upper() in _NARROW
    return 8 if is_limited or "AVX512" not in torch.backends.cpu.get_cpu_capability() else 16
