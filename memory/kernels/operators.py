"""What operators do: what they read and write, how often, their FLOPs, and what sums and attention allocate besides.

Counted as if every kernel read its arguments and wrote its results once. Views and allocations are no kernels, and
`copy_` does not read what it overwrites. The norms of `models/lean` read a volume more than once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from memory.kernels.convolutions import is_channels_last
from memory.kernels.gpus import BACKWARD_CONVOLUTION, WorkPart

aten = torch.ops.aten

_NO_KERNELS = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias"),
    *("_local_scalar_dense", "resize_", "set_", "lift_fresh"),
}
_FLOPS = {
    **flop_registry,
    # On CPU and fake tensors attention uses these two.
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
_MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv"}
_COPIES = {"copy_", "_to_copy", "clone", "cat", "stack", "constant_pad_nd"}
_READ_TWICE = {"group_norm": 1, "group_norm_backward": 2}
"""How many of its first arguments a norm reads twice: once for the statistics or the sums, once for the result."""


@functools.cache
def is_kernel(func: torch._ops.OpOverload) -> bool:
    """Return whether an operator runs a kernel: it neither returns a view nor only allocates."""
    name = func._overloadpacket.__name__
    aliases = [result.alias_info for result in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return func.namespace in ("aten", "lean") and not is_view and name not in _NO_KERNELS


@functools.cache
def kind_of(func: torch._ops.OpOverload) -> str:
    """Return the kind of work that an operator does."""
    name = func._overloadpacket.__name__
    if "convolution" in name:
        return BACKWARD_CONVOLUTION if name == "convolution_backward" else "convolution"
    if "scaled_dot_product" in name:
        return "attention"
    if name in _MATRIX_PRODUCTS:
        return "matrix product"
    if func.namespace == "lean" or ("norm" in name and not name.startswith(("_foreach", "linalg"))):
        return "norm"
    return "copy" if name in _COPIES else "other"


def _num_read_twice(func: torch._ops.OpOverload) -> int:
    return _READ_TWICE.get(func._overloadpacket.__name__, 0) if func.namespace == "lean" else 0


def passes(func: torch._ops.OpOverload) -> int:
    """Return how many times the kernels of an operator go over its tensors."""
    return 2 if _num_read_twice(func) else 1


@functools.cache
def _writes_arguments(func: torch._ops.OpOverload) -> tuple[int, ...]:
    """Return the positions of the written arguments of an operator that returns nothing."""
    if func._schema.returns:
        return ()
    arguments = enumerate(func._schema.arguments)
    return tuple(n for n, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write)


def traffic_bytes(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that the kernels of one call read and write."""
    read = args[1:] if func._overloadpacket is aten.copy_ else args
    written = [args[position] for position in _writes_arguments(func) if position < len(args)]
    again = args[: _num_read_twice(func)]
    return sum(tensor.nbytes for tensor in tensors_in((read, tuple(kwargs.values()), out, again, written)))


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in a sequence and in the lists inside it."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def count_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], out: Any) -> int:
    """Return the floating-point operations of one call as torch's own counter does; 0 for other operators."""
    formula = _FLOPS.get(func._overloadpacket)
    return formula(*args, out_val=out) if formula is not None else 0


_TILE_INPUTS, _TILE_OUTPUTS = 8, 32
"""How many channels of its input and output a convolution's kernels compute at least."""


def computed_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], flops: int) -> int:
    """Return the operations that the kernels of one call do for its FLOPs: convolutions do whole tiles of channels."""
    at = {aten.convolution: 1, aten.convolution_backward: 2}.get(func._overloadpacket)  # where the weight is
    if at is None or args[at + 7] > 1:  # groups
        return flops
    outputs, inputs = args[at].shape[1::-1] if args[at + 5] else args[at].shape[:2]  # transposed or not
    tiles = -(-inputs // _TILE_INPUTS) * -(-outputs // _TILE_OUTPUTS)
    return round(flops * tiles * _TILE_INPUTS * _TILE_OUTPUTS / (inputs * outputs))


@dataclass(slots=True)
class Work:
    """What the kernels of one kind did on tensors of one shape: bytes moved, FLOPs and calls."""

    nbytes: int = 0
    flops: int = 0
    kernels: int = 0

    def add(self, other: Work, times: float = 1) -> None:
        """Add other work, multiplied by a number."""
        self.nbytes += round(times * other.nbytes)
        self.flops += round(times * other.flops)
        self.kernels += round(times * other.kernels)


WorkKey = tuple[str, tuple[int, ...], str]
"""The kind of an operator, and the shape and dtype of its first tensor."""
Done = dict[WorkKey, Work]
"""The work of one part of a run."""


def combined(parts: Iterable[tuple[float, Done]]) -> Done:
    """Return the sum of several amounts of work, each multiplied by its number."""
    total: Done = {}
    for times, work in parts:
        for key, done in work.items():
            total.setdefault(key, Work()).add(done, times)
    return total


def work_parts(work: Done, level_of: Callable[[tuple[int, ...]], int | None] = lambda _: None) -> list[dict[str, Any]]:
    """Return work by kind, level and precision; `level_of` gives the level of a shape."""
    sums: dict[tuple[str, int | None, bool], Work] = {}
    for (kind, shape, dtype), done in work.items():
        key = (kind, level_of(shape), dtype in ("torch.bfloat16", "torch.float16"))
        sums.setdefault(key, Work()).add(done)
    return [WorkPart(*key, total.nbytes, total.flops, total.kernels).to_json() for key, total in sums.items()]


# A sum over the voxels of a channels-last volume, or over the tokens of attention, has few results and much to add for
# each, so many blocks of threads share one result, and each thread of each block leaves its partial sum in memory.
# Follows `setReduceConfig` in ATen's Reduce.cuh for sums in fp32 on an A100; other current cards start between 0.9 and
# 1.3 times as many blocks. A contiguous volume needs a few kilobytes. Our norms: two numbers for each tile of channels
# x voxels and each of its channels.

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
    return func is aten.mse_loss.default and args[2:] != (0,)  # 0: not reduced


def channel_sum_bytes(x: Tensor) -> int:
    """Return the size of the partial sums for a sum over everything but the channels of `x`; 0 if it needs none."""
    return _sum_bytes(x.shape[1], _divisible(x), x.numel() // x.shape[1]) if is_channels_last(x) else 0


def sum_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the size of what an operator that sums over all voxels allocates for what it adds up; 0 for others."""
    if _is_mean_squared_error(func, args):
        return args[0].nbytes
    if func is not aten.sum.dim_IntList:
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
    if func._overloadpacket is not aten._scaled_dot_product_flash_attention_for_cpu_backward:
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
