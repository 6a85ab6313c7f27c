"""Launches the Triton kernels of the norm operators: how volumes are cut into tiles, and what each kernel is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from subprocess import SubprocessError
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.errors import TritonError  # type: ignore[import-untyped]
from triton.runtime import driver  # type: ignore[import-untyped]

from models.lean.norm.torch_kernels import Norm
from models.lean.norm.triton_kernels import (
    combine_kernel,
    group_means_kernel,
    group_norm_backward_kernel,
    group_norm_kernel,
    input_grad_kernel,
    moments_kernel,
    normalise_kernel,
    spans_kernel,
    sums_kernel,
    total_kernel,
)

Stride = tuple[int, ...]
"""The strides of a tensor."""

TILE_VALUES = 4096
NUM_WARPS = 8
MAX_TILE_CHANNELS = 64  # with channels last: 128 bytes of bf16 lie side by side
COMBINE_BLOCK = 2048
MOST_PARTS = 4 * COMBINE_BLOCK
"""How many parts of a group one program adds up, block after block; more of them are added up in advance."""

SMALL_VALUES = 2**22
"""A volume with at most this many values is normalised by one kernel, with one program for each group.

The kernel reads a group three times, and with channels last it uses a few bytes of each 32 that it reads. That does not
matter as long as the volume stays in the GPU's cache.
"""


class _Kernel(NamedTuple):
    """A kernel with its numbers, and which of the tensors of a `_Launch` it takes."""

    kernel: Any
    places: tuple[int, ...]
    programs: int
    numbers: tuple[float, ...]
    options: dict[str, int]


def _kernel(kernel: Any, places: Sequence[int], programs: int, *numbers: float, **options: int) -> _Kernel:
    return _Kernel(kernel, tuple(places), programs, numbers, options)


class _Launch:
    """Kernels that run one after the other, for tensors of the same dtypes on the same device.

    The tensors are those it is called with, then those that only the kernels need: fp32, of the sizes in `own`.

    What Triton compiled is launched directly the next time, and with addresses in place of tensors, because its own way
    of finding it takes the host ten times as long. The alignment of addresses is all that is left to specialise on.
    """

    def __init__(self, kernels: Sequence[_Kernel], own: Sequence[int] = ()) -> None:
        self._kernels, self._own = kernels, own
        self._compiled: dict[tuple[int, ...], tuple[Callable[[int], int], list[tuple[Any, ...]]]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(*tensors)
        tensors += tuple([torch.empty(size, dtype=torch.float32, device=device) for size in self._own])
        addresses = [tensor.data_ptr() for tensor in tensors]
        kind = tuple([address % 16 for address in addresses])
        found = self._compiled.get(kind)
        if found is None:
            self._compile(kind, tensors)
            return None
        stream_of, kernels = found
        stream = stream_of(device.index)
        for run, programs, taken, known, numbers in kernels:
            # As Triton calls it (checked with 3.7.1), but for hooks of its profiler: none.
            run(programs, 1, 1, stream, *known, None, None, None, *taken(addresses), *numbers)
        return None

    def _compile(self, kind: tuple[int, ...], tensors: tuple[Tensor, ...]) -> None:
        """Launch through Triton, and keep what it compiled."""
        ready: list[tuple[Any, ...]] = []
        for kernel, places, programs, numbers, options in self._kernels:
            taken = itemgetter(*places)
            compiled = kernel[(programs,)](*taken(tensors), *numbers, **options)
            if compiled is None:  # the interpreter compiles nothing
                continue
            ready.append((compiled.run, programs, taken, (compiled.function, compiled.packed_metadata), numbers))
        if ready:
            self._compiled[kind] = driver.active.get_current_stream, ready


_cached = lru_cache(maxsize=4096)
"""For what depends on shapes, strides and `_kinds` only, and would take the host longer than the launch."""


def _kinds(*tensors: Tensor) -> tuple[Any, ...]:
    """Return what Triton compiles for: the device and the dtypes."""
    return tensors[0].device, *[tensor.dtype for tensor in tensors]


class _Tiles(NamedTuple):
    """How a volume is cut into tiles: the number of programs and of chunks of voxels, and the shape of a tile."""

    programs: int
    num_chunks: int
    block_c: int
    block_v: int


@_cached
def _tiles(shape: torch.Size, stride: Stride, voxels: int) -> _Tiles:
    """Choose tiles along the dimension that is contiguous in memory: voxels, or channels and voxels."""
    batch, channels = shape[:2]
    whole_c, whole_v = triton.next_power_of_2(channels), triton.next_power_of_2(voxels)
    if stride[1] == 1:
        block_c = min(whole_c, MAX_TILE_CHANNELS)
        block_v = min(whole_v, TILE_VALUES // block_c)
    else:
        block_v = min(whole_v, TILE_VALUES)
        block_c = min(whole_c, TILE_VALUES // block_v)
    num_chunks = triton.cdiv(voxels, block_v)
    return _Tiles(batch * triton.cdiv(channels, block_c) * num_chunks, num_chunks, block_c, block_v)


@_cached
def strides(shape: torch.Size, stride: Stride) -> tuple[int, int, int] | None:
    """Return the strides of batch items, channels and voxels; None if the voxels are not evenly spaced."""
    step, expected = 1, None
    for size, of_axis in zip(reversed(shape[2:]), reversed(stride[2:]), strict=True):
        if size == 1:
            continue
        if expected is None:
            step = of_axis
        elif of_axis != expected:
            return None
        expected = of_axis * size
    return stride[0], stride[1], step


def _readable(x: Tensor) -> Tensor:
    """Return the tensor, contiguous if its voxels are not evenly spaced."""
    return x if strides(x.shape, x.stride()) is not None else x.contiguous()


def _volume(shape: torch.Size, stride: Stride) -> tuple[int, int, int]:
    found = strides(shape, stride)
    assert found is not None, f"out: strides {stride} of {tuple(shape)}; voxels must be evenly spaced"
    return found


def _multiple(channels: int, *volumes: tuple[int, int, int]) -> int:
    """Return a power of two of which the channels and all strides of batch items and voxels are multiples.

    Triton finds out 16 by itself, but nothing less: it would read volumes with 24 channels last one by one.
    """
    found = math.gcd(16, channels, *[stride for of_batch, _, of_voxel in volumes for stride in (of_batch, of_voxel)])
    return found if found < 16 else 1


def failure(device: torch.device) -> str:
    """Return why the kernels do not run on `device`, or "" if they do; Triton needs a C compiler, for example."""
    try:
        statistics(torch.zeros((1, 1, 1, 1, 1), device=device), 1, 1e-5)
    except (TritonError, RuntimeError, OSError, SubprocessError, ImportError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def statistics(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(variance + eps) of each group, (batch, groups)."""
    mean = torch.empty((x.shape[0], groups), dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    store_statistics(None, mean, rstd, x, eps)
    return mean, rstd


def store_statistics(out: Tensor | None, mean: Tensor, rstd: Tensor, x: Tensor, eps: float) -> None:
    """Write the statistics of groups, as many as `mean` has columns, and copy `x` into `out` if given."""
    x = _readable(x)
    groups = mean.shape[1]
    assert mean.stride() == rstd.stride() == (groups, 1), "statistics are written in order"
    target = x if out is None else out
    stride_out = None if out is None else out.stride()
    _statistics_launch(x.shape, x.stride(), stride_out, groups, eps, _kinds(x, target))(x, target, mean, rstd)


@_cached
def _statistics_launch(
    shape: torch.Size, stride: Stride, stride_out: Stride | None, groups: int, eps: float, kinds: Any
) -> _Launch:
    """Return the kernels for x, what it is copied to, mean and rstd."""
    return _Launch(*_statistics_kernels(shape, stride, stride_out, groups, eps, places=(0, 1, 2, 3), own=4))


def _statistics_kernels(
    shape: torch.Size, stride: Stride, stride_out: Stride | None, groups: int, eps: float, *, places: Any, own: int
) -> tuple[list[_Kernel], list[int]]:
    """Return the kernels that find the statistics, and the sizes of their own tensors, of which the first is `own`.

    `places` are those of x, of what it is copied to, of mean and of rstd.
    """
    (batch, channels), voxels = shape[:2], shape[2:].numel()
    programs, num_chunks, block_c, block_v = _tiles(shape, stride, voxels)
    plane = batch * channels * num_chunks
    volumes = _volume(shape, stride), _volume(shape, stride_out or stride)
    x, target, *results = places
    kernels, sizes = [
        _kernel(
            moments_kernel, (x, target, own), programs, channels, voxels, num_chunks, plane, *volumes[0], *volumes[1],
            stride_out is not None, _multiple(channels, *volumes), block_c, block_v, num_warps=NUM_WARPS,
        )
    ], [2 * plane]  # fmt: skip
    # One program for each group would take its many parts one block after the other.
    if num_chunks * channels // groups > MOST_PARTS:
        num_spans = triton.cdiv(num_chunks, COMBINE_BLOCK)
        spans_plane = batch * channels * num_spans
        spanned = voxels, num_chunks, num_spans, plane, spans_plane, block_v, COMBINE_BLOCK
        kernels.append(_kernel(spans_kernel, (own, own + 1), spans_plane, *spanned))
        sizes.append(2 * spans_plane)
        num_chunks, block_v, own = num_spans, block_v * COMBINE_BLOCK, own + 1
    numbers = channels // groups, voxels, num_chunks, eps, block_v, COMBINE_BLOCK
    kernels.append(_kernel(combine_kernel, (own, *results), batch * groups, *numbers))
    return kernels, sizes


def is_small(shape: torch.Size, groups: int) -> bool:
    """Return whether one kernel normalises a volume."""
    return shape.numel() <= SMALL_VALUES and shape[1] // groups <= TILE_VALUES


def group_norm(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """Write a whole `x`, after norm and optional SiLU, into `out`; return the statistics."""
    kinds = x.device, weight.device, x.dtype, out.dtype, weight.dtype
    launch = _group_norm_launch(x.shape, x.stride(), out.stride(), groups, eps, silu, kinds)
    if launch is None:
        return group_norm(out, x.contiguous(), weight, bias, groups, eps, silu)
    mean = torch.empty((x.shape[0], groups), dtype=torch.float32, device=kinds[0])
    rstd = torch.empty_like(mean)
    launch(x, out, mean, rstd, *_dense(weight, bias))
    return mean, rstd


@_cached
def _group_norm_launch(
    shape: torch.Size, stride: Stride, stride_out: Stride, groups: int, eps: float, silu: bool, kinds: Any
) -> _Launch | None:
    """Return the kernels for x, `out`, mean, rstd, weight and bias; None if the voxels are not evenly spaced."""
    # Kernels that are launched with addresses check nothing.
    device, of_weight, *_ = kinds
    assert of_weight == device, f"the norm's weight is on {of_weight}, its input on {device}"
    assert shape.numel() > 0, f"a volume of shape {tuple(shape)} has no values to normalise"
    if strides(shape, stride) is None:
        return None
    if not is_small(shape, groups):
        kernels, sizes = _statistics_kernels(shape, stride, None, groups, eps, places=(0, 0, 2, 3), own=6)
        return _Launch([*kernels, _normalise_kernel((shape,) * 2, (stride, stride_out), 0, groups, silu)], sizes)
    (batch, channels), voxels = shape[:2], shape[2:].numel()
    small = _kernel(
        group_norm_kernel, range(6), batch * groups, channels, groups, voxels, eps, *_volume(shape, stride),
        *_volume(shape, stride_out), silu, *_blocks(channels // groups, voxels), num_warps=NUM_WARPS,
    )  # fmt: skip
    return _Launch([small])


def group_norm_backward(out: Tensor, grad: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """Write the gradient of a whole `x` into `out`; return the sums of `norm_sums`."""
    mean, rstd, weight, bias, silu = norm
    kinds = x.device, x.dtype, grad.dtype, out.dtype, weight.dtype
    strides = grad.stride(), x.stride(), out.stride()
    launch = _group_norm_backward_launch(x.shape, strides, mean.shape[1], silu, kinds)
    if launch is None:
        return group_norm_backward(out, _readable(grad), _readable(x), norm)
    sums = torch.empty((2, *x.shape[:2]), dtype=torch.float32, device=kinds[0])
    launch(grad, x, out, sums, *_dense(mean, rstd, weight, bias))
    return sums


@_cached
def _group_norm_backward_launch(
    shape: torch.Size, strides_of: tuple[Stride, ...], groups: int, silu: bool, kinds: Any
) -> _Launch | None:
    """Return the kernels for the gradient, x, `out`, the sums, and a `Norm`; None if the voxels are not evenly spaced.

    The strides are those of the gradient, of x and of `out`.
    """
    if any(strides(shape, stride) is None for stride in strides_of[:2]):
        return None
    (batch, channels), voxels = shape[:2], shape[2:].numel()
    plane = batch * channels
    if is_small(shape, groups):
        small = _kernel(
            group_norm_backward_kernel, range(8), batch * groups, channels, groups, voxels, plane,
            *chain(*[_volume(shape, stride) for stride in strides_of]), silu, *_blocks(channels // groups, voxels),
            num_warps=NUM_WARPS,
        )  # fmt: skip
        return _Launch([small])
    grad, x, out, sums, mean, rstd, weight, bias, parts, means, totals = range(11)
    stride_grad, stride, stride_out = strides_of
    norm = mean, rstd, weight, bias
    num_chunks, summing = _sums_kernel((grad, x, grad, parts, *norm), shape, strides_of[:2], None, groups, silu, False)
    kernels, sizes = [summing], [2 * plane * num_chunks, 2 * batch * groups]
    if num_chunks > MOST_PARTS:
        kernels.append(_kernel(total_kernel, (parts, totals), 2 * plane, num_chunks, COMBINE_BLOCK))
        sizes.append(2 * plane)
        parts, num_chunks = totals, 1
    block = min(triton.next_power_of_2(num_chunks), COMBINE_BLOCK)
    numbers = channels, groups, voxels, num_chunks, plane, block
    kernels.append(_kernel(group_means_kernel, (parts, sums, means, weight), batch * groups, *numbers))
    strides_all = stride_grad, stride, stride_grad, stride_out
    places = grad, x, grad, out, *norm, means
    writing = _input_grad_kernel(places, shape, strides_all, groups, silu, False)
    return _Launch([*kernels, writing], sizes)


def _blocks(size: int, voxels: int) -> tuple[int, int]:
    """Return how many channels and voxels of a group are processed at a time."""
    block_c = triton.next_power_of_2(size)
    return block_c, min(triton.next_power_of_2(voxels), max(1, TILE_VALUES // block_c))


def normalise(out: Tensor, x: Tensor, norm: Norm, rows_before: int) -> None:
    """Write the rows of `x`, after norm and optional SiLU, into `out`, and zeros into the rows around them."""
    x = _readable(x)
    shapes, strides, kinds = (x.shape, out.shape), (x.stride(), out.stride()), _kinds(x, out, norm.weight)
    launch = _normalise_launch(shapes, strides, rows_before, norm.groups, norm.silu, kinds)
    launch(x, out, *_dense(*norm[:4]))


@_cached
def _normalise_launch(*asked: Any) -> _Launch:
    *options, _ = asked
    return _Launch([_normalise_kernel(*options)])


def _normalise_kernel(
    shapes: tuple[torch.Size, ...], strides: tuple[Stride, ...], rows_before: int, groups: int, silu: bool
) -> _Kernel:
    """Return the kernel for the shapes and strides of x and of `out`, which takes these and a `Norm`."""
    (shape, shape_out), (stride, stride_out) = shapes, strides
    voxels, out_voxels = shape[2:].numel(), shape_out[2:].numel()
    programs, num_chunks, *block = _tiles(shape, stride, out_voxels)
    volumes = _volume(shape, stride), _volume(shape_out, stride_out)
    return _kernel(
        normalise_kernel, range(6), programs, shape[1], groups, voxels, out_voxels, rows_before * shape[3:].numel(),
        num_chunks, *volumes[0], *volumes[1], silu, _multiple(shape[1], *volumes), *block, num_warps=NUM_WARPS,
    )  # fmt: skip


def store_norm_sums(out: Tensor | None, sums: Tensor, grad: Tensor, x: Tensor, norm: Norm, before_silu: bool) -> None:
    """Write the sums of the gradient before SiLU and of its product with the standardised input into `sums`.

    The gradient itself, before or after SiLU, goes into `out`, if given.
    """
    assert sums.is_contiguous(), "sums are written in order"
    x, grad = _readable(x), _readable(grad)
    target = grad if out is None else out
    stride_out, kinds = None if out is None else out.stride(), _kinds(x, grad, target, norm.weight)
    strides = grad.stride(), x.stride()
    launch = _norm_sums_launch(x.shape, strides, stride_out, norm.groups, norm.silu, before_silu, kinds)
    launch(grad, x, target, sums, *_dense(*norm[:4]))


@_cached
def _norm_sums_launch(shape: torch.Size, *asked: Any) -> _Launch:
    *options, _ = asked
    plane, parts = shape[:2].numel(), 8
    num_chunks, summing = _sums_kernel((0, 1, 2, parts, 4, 5, 6, 7), shape, *options)
    block = min(triton.next_power_of_2(num_chunks), COMBINE_BLOCK)
    total = _kernel(total_kernel, (parts, 3), 2 * plane, num_chunks, block)
    return _Launch([summing, total], [2 * plane * num_chunks])


def _sums_kernel(
    places: Sequence[int], shape: torch.Size, strides: tuple[Stride, ...], stride_out: Stride | None, groups: int,
    silu: bool, before_silu: bool,
) -> tuple[int, _Kernel]:  # fmt: skip
    """Return the number of chunks and the kernel, for the strides of the gradient and of x.

    `before_silu` says whether the gradient before SiLU is stored, or that after it.
    """
    batch, channels = shape[:2]
    voxels, (stride_grad, stride) = shape[2:].numel(), strides
    programs, num_chunks, *block = _tiles(shape, stride, voxels)
    volumes = [_volume(shape, each) for each in (stride_grad, stride, stride_out or stride_grad)]
    return num_chunks, _kernel(
        sums_kernel, places, programs, channels, groups, voxels, num_chunks, batch * channels * num_chunks,
        *chain(*volumes), silu, stride_out is not None, before_silu, _multiple(channels, *volumes), *block,
        num_warps=NUM_WARPS,
    )  # fmt: skip


def norm_input_grad(out: Tensor, grad: Tensor, x: Tensor, norm: Norm, group_means: Tensor, plus: Tensor | None) -> None:
    """Write the gradient of `x`, and `plus` added to it, into `out`, which may be `grad` or `plus` itself."""
    x, grad = _readable(x), _readable(grad)
    added = grad if plus is None else _readable(plus)
    strides, kinds = (grad.stride(), x.stride(), added.stride(), out.stride()), _kinds(x, grad, added, out, norm.weight)
    launch = _input_grad_launch(x.shape, strides, norm.groups, norm.silu, plus is not None, kinds)
    launch(grad, x, added, out, *_dense(*norm[:4], group_means))


@_cached
def _input_grad_launch(*asked: Any) -> _Launch:
    *options, _ = asked
    return _Launch([_input_grad_kernel(range(9), *options)])


def _input_grad_kernel(
    places: Sequence[int], shape: torch.Size, strides: tuple[Stride, ...], groups: int, silu: bool, has_plus: bool
) -> _Kernel:
    """Return the kernel for the strides of the gradient, of x, of what is added, and of `out`."""
    voxels = shape[2:].numel()
    programs, num_chunks, *block = _tiles(shape, strides[1], voxels)
    volumes = [_volume(shape, each) for each in strides]
    return _kernel(
        input_grad_kernel, places, programs, shape[1], groups, voxels, num_chunks, shape[0], *chain(*volumes), silu,
        has_plus, _multiple(shape[1], *volumes), *block, num_warps=NUM_WARPS,
    )  # fmt: skip


def _dense(*values: Tensor) -> list[Tensor]:
    """Return the tensors contiguous, as the kernels index them."""
    return [value if value.is_contiguous() else value.contiguous() for value in values]
