"""What reductions and attention on a GPU allocate besides their result, such as the partial sums of thread blocks.

torch: a sum over the voxels of a channels-last volume, or over the tokens of attention, has few results and much to add
for each, so many blocks share one result, and each thread of each block leaves its partial sum in memory. Follows
`setReduceConfig` in ATen's Reduce.cuh for sums in fp32 on an A100; other current cards start between 0.9 and 1.3 times
as many blocks. A contiguous volume needs a few kilobytes. Our norms: two numbers for each tile of channels x voxels and
each of its channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from memory.kernels.convolutions import is_channels_last

MULTIPROCESSORS, THREADS_OF_MULTIPROCESSOR = 108, 2048
_MOST_THREADS, _WARP, _WIDEST_VECTOR = 512, 32, 4
_LEAST_VALUES, _MOST_VALUES = 16, 256  # of one thread
_TILE_VALUES, _TILE_CHANNELS = 4096, 64  # of the norms' kernels; the channels only with channels last
_SUMMED = {"statistics": 0, "store_statistics": 3, "norm_sums": 1, "store_norm_sums": 3, "group_norm": 0}
_SUMMED |= {"group_norm_backward": 1}
"""The position of the volume among the arguments of those of our operators that sum."""
_WHOLE, _SMALL_VALUES = ("group_norm", "group_norm_backward"), 2**22
"""The operators that process small volumes with one kernel, which adds up without leaving parts in memory."""


_BLOCK_TOKENS = 64  # of the blocks in which fp32 attention accumulates the gradient of the query
_BLOCK_STATE_BYTES = 16  # before each of them


def held_elements(func: Any, args: tuple[Any, ...]) -> int:
    """Return how many elements the memory of a result has; 0 if as many as the result.

    The mean of squared differences keeps the memory that torch allocates for all of them.
    """
    return args[0].numel() if _is_mean_squared_error(func, args) else 0


def _is_mean_squared_error(func: Any, args: tuple[Any, ...]) -> bool:
    return func is torch.ops.aten.mse_loss.default and args[2:] != (0,)  # 0: not reduced


def channel_sum_bytes(x: Tensor) -> int:
    """Return the size of the partial sums for a sum over everything but the channels of `x`; 0 if it needs none."""
    return _sum_bytes(x.shape[1], _divisible(x), x.numel() // x.shape[1]) if is_channels_last(x) else 0


def sum_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the size of what an operator that sums over all voxels allocates for what it adds up; 0 for others."""
    if _is_mean_squared_error(func, args):
        return args[0].nbytes
    if func is not torch.ops.aten.sum.dim_IntList:
        return 0
    x, axes = args[:2]
    if x.dim() == 2:
        is_by_channel = list(axes) == [0] and x.stride(1) == 1 and x.stride(0) >= x.shape[1]
        return _sum_bytes(x.shape[1], _divisible(x), x.shape[0]) if is_by_channel else 0
    voxel_axes = list(range(2, x.dim()))
    if sorted(axes or ()) == voxel_axes and is_channels_last(x):
        samples = x.shape[0] * x.shape[1]
        return _sum_bytes(samples, _divisible(x), x.numel() // samples)
    return channel_sum_bytes(x) if sorted(axes or ()) == [0, *voxel_axes] else 0


def _divisible(x: Tensor) -> int:
    """Return what vectors of channels must divide: their number, and the distance from one voxel to the next."""
    return math.gcd(x.shape[1], x.stride(0 if x.dim() == 2 else -1))


def _sum_bytes(results: int, divisible: int, added: int) -> int:
    """Return the size of the partial sums for `added` values of each result, with the channels of a voxel together."""
    vector = _WIDEST_VECTOR
    while divisible % vector:
        vector //= 2
    most = _MOST_THREADS // vector
    across = min(_power_of_two(results // vector), most)
    down = min(_power_of_two(added), most)
    width = min(across, _WARP)
    height = min(down, most // width)
    width = min(across, most // height)
    values = added
    if values < min(height * 16, _MOST_VALUES):
        return 0
    values = -(-values // height)
    grid = -(-(results // vector) // width)
    target = MULTIPROCESSORS * (THREADS_OF_MULTIPROCESSOR // (width * height))
    if values < _MOST_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    return 4 * results * blocks * width * vector if blocks > 1 else 0


def partial_sum_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return what one of our norm operators allocates for the partial sums of its tiles, before its results."""
    name = func._overloadpacket.__name__
    position = _SUMMED.get(name)
    if position is None:
        return 0
    x = args[position]
    if name in _WHOLE and x.numel() <= _SMALL_VALUES:
        return 0
    batch, channels, voxels = x.shape[0], x.shape[1], x.shape[2:].numel()
    tile = min(1 << (voxels - 1).bit_length(), _TILE_VALUES)
    if x.stride(1) == 1:
        tile = min(tile, _TILE_VALUES // min(1 << (channels - 1).bit_length(), _TILE_CHANNELS))
    return 8 * batch * channels * -(-voxels // tile)


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not above a positive number."""
    return 1 << (number.bit_length() - 1)


def attention_workspaces(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the bytes of each workspace that attention's CUDA kernel allocates; empty for other operators.

    The complement of a position among the workspaces stands where that one is freed; the others stay to the end.
    torch serves 16 bits with flash attention and fp32 with its memory-efficient kernel; both need none in forward.
    """
    if func._overloadpacket is not torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return ()
    query = args[1]
    return _memory_efficient_backward(*query.shape) if query.dtype == torch.float32 else _flash_backward(*query.shape)


def _flash_backward(batch: int, heads: int, tokens: int, channels: int) -> tuple[int, ...]:
    """One fp32 number per token and head, and the query's gradient in fp32; both are rounded up to whole blocks."""
    numbers = 4 * batch * heads * math.ceil(tokens / 128) * 128
    return numbers, numbers * math.ceil(channels / 32) * 32


def _memory_efficient_backward(batch: int, heads: int, tokens: int, channels: int) -> tuple[int, ...]:
    """The product of result and gradient, its sums by token and head, and the query's gradient in blocks."""
    sums = 4 * batch * heads * tokens
    width = 64 if channels <= 64 else 128
    blocks = batch * heads * math.ceil(tokens / _BLOCK_TOKENS) * math.ceil(channels / width)
    workspace = blocks * (_BLOCK_STATE_BYTES + 4 * _BLOCK_TOKENS * width)
    reordered = (sums, ~1) if heads > 1 else ()
    return sums * channels, sums, *reordered, ~0, workspace
