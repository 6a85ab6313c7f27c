"""Launches the Triton kernels of the norm operators: how volumes are cut into tiles, and what each kernel is given."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain
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


class _Launch:
    """A kernel and its numbers, for tensors of the same dtypes on the same device.

    What Triton compiled is launched directly the next time, and with addresses in place of tensors, because its own way
    of finding it takes the host ten times as long. The alignment of addresses is all that is left to specialise on.
    """

    def __init__(self, kernel: Any, programs: int, *numbers: float, **options: int) -> None:
        self._kernel, self._programs, self._numbers, self._options = kernel, programs, numbers, options
        self._compiled: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(*tensors)
        addresses = [tensor.data_ptr() for tensor in tensors]
        kind = tuple([address % 16 for address in addresses])
        found = self._compiled.get(kind)
        if found is not None:
            run, stream_of, *known = found
            # As Triton calls it (checked with 3.7.1), but for hooks of its profiler: none.
            run(self._programs, 1, 1, stream_of(device.index), *known, None, None, None, *addresses, *self._numbers)
            return None
        compiled = self._kernel[(self._programs,)](*tensors, *self._numbers, **self._options)
        # The interpreter compiles nothing.
        if compiled is not None:
            stream_of = driver.active.get_current_stream
            self._compiled[kind] = compiled.run, stream_of, compiled.function, compiled.packed_metadata
        return None


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
    launches = _statistics_launches(x.shape, x.stride(), stride_out, groups, eps, _kinds(x, target))
    launches(x, target, mean, rstd)


class _Statistics(NamedTuple):
    """The kernels that find the statistics, and how many values the results of the first two have."""

    moments: _Launch
    num_parts: int
    spans: _Launch | None
    num_spanned: int
    combine: _Launch

    def __call__(self, x: Tensor, target: Tensor, mean: Tensor, rstd: Tensor) -> None:
        parts = torch.empty(self.num_parts, dtype=torch.float32, device=x.device)
        self.moments(x, target, parts)
        if self.spans is not None:
            spanned = torch.empty(self.num_spanned, dtype=torch.float32, device=x.device)
            self.spans(parts, spanned)
            parts = spanned
        self.combine(parts, mean, rstd)


@_cached
def _statistics_launches(
    shape: torch.Size, stride: Stride, stride_out: Stride | None, groups: int, eps: float, kinds: Any
) -> _Statistics:
    (batch, channels), voxels = shape[:2], shape[2:].numel()
    programs, num_chunks, block_c, block_v = _tiles(shape, stride, voxels)
    plane = batch * channels * num_chunks
    volumes = _volume(shape, stride), _volume(shape, stride_out or stride)
    moments = _Launch(
        moments_kernel, programs, channels, voxels, num_chunks, plane, *volumes[0], *volumes[1], stride_out is not None,
        _multiple(channels, *volumes), block_c, block_v, num_warps=NUM_WARPS,
    )  # fmt: skip
    num_spans = triton.cdiv(num_chunks, COMBINE_BLOCK)
    spans_plane = batch * channels * num_spans
    spans = _Launch(
        spans_kernel, spans_plane, voxels, num_chunks, num_spans, plane, spans_plane, block_v, COMBINE_BLOCK
    )
    # One program for each group would take its many parts one block after the other.
    has_spans = num_chunks * channels // groups > MOST_PARTS
    if has_spans:
        num_chunks, block_v = num_spans, block_v * COMBINE_BLOCK
    combine = _Launch(
        combine_kernel, batch * groups, channels // groups, voxels, num_chunks, eps, block_v, COMBINE_BLOCK
    )
    return _Statistics(moments, 2 * plane, spans if has_spans else None, 2 * spans_plane, combine)


def is_small(shape: torch.Size, groups: int) -> bool:
    """Return whether one kernel normalises a volume."""
    return shape.numel() <= SMALL_VALUES and shape[1] // groups <= TILE_VALUES


def group_norm(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor]:
    """Write a whole `x`, after norm and optional SiLU, into `out`; return the statistics."""
    kinds = x.device, x.dtype, out.dtype, weight.dtype
    launches = _group_norm_launches(x.shape, x.stride(), out.stride(), groups, eps, silu, kinds)
    if launches is None:
        return group_norm(out, x.contiguous(), weight, bias, groups, eps, silu)
    mean = torch.empty((x.shape[0], groups), dtype=torch.float32, device=kinds[0])
    rstd = torch.empty_like(mean)
    launches(x, out, mean, rstd, *_dense(weight, bias))
    return mean, rstd


class _LargeNorm(NamedTuple):
    """The kernels that find the statistics of a large volume, and the one that uses them."""

    statistics: _Statistics
    normalise: _Launch

    def __call__(self, x: Tensor, out: Tensor, mean: Tensor, rstd: Tensor, *affine: Tensor) -> None:
        self.statistics(x, x, mean, rstd)
        self.normalise(x, out, mean, rstd, *affine)


@_cached
def _group_norm_launches(
    shape: torch.Size, stride: Stride, stride_out: Stride, groups: int, eps: float, silu: bool, kinds: Any
) -> _Launch | _LargeNorm | None:
    """Return the kernel that does it all, or those for a large volume; None if the voxels are not evenly spaced."""
    if strides(shape, stride) is None:
        return None
    if not is_small(shape, groups):
        return _LargeNorm(
            _statistics_launches(shape, stride, None, groups, eps, kinds[:2]),
            _normalise_launch((shape,) * 2, (stride, stride_out), 0, groups, silu, kinds),
        )
    (batch, channels), voxels = shape[:2], shape[2:].numel()
    return _Launch(
        group_norm_kernel, batch * groups, channels, groups, voxels, eps, *_volume(shape, stride),
        *_volume(shape, stride_out), silu, *_blocks(channels // groups, voxels), num_warps=NUM_WARPS,
    )  # fmt: skip


def group_norm_backward(out: Tensor, grad: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """Write the gradient of a whole `x` into `out`; return the sums of `norm_sums`."""
    mean, rstd, weight, bias, silu = norm
    kinds = x.device, x.dtype, grad.dtype, out.dtype, weight.dtype
    strides = grad.stride(), x.stride(), out.stride()
    launches = _group_norm_backward_launches(x.shape, strides, mean.shape[1], silu, kinds)
    if launches is None:
        return group_norm_backward(out, _readable(grad), _readable(x), norm)
    sums = torch.empty((2, *x.shape[:2]), dtype=torch.float32, device=kinds[0])
    launches(grad, x, out, sums, *_dense(mean, rstd, weight, bias))
    return sums


class _LargeNormBackward(NamedTuple):
    """The kernels that sum the gradient of a large volume in parts, that combine these, and that write it."""

    num_chunks: int
    summing: _Launch
    combine: _Launch
    writing: _Launch

    def __call__(self, grad: Tensor, x: Tensor, out: Tensor, sums: Tensor, *dense: Tensor) -> None:
        parts = torch.empty((*sums.shape, self.num_chunks), dtype=torch.float32, device=x.device)
        self.summing(grad, x, grad, parts, *dense)
        if self.num_chunks > MOST_PARTS:
            parts = parts.sum(3)
        mean, _, weight, _ = dense
        means = torch.empty((2, *mean.shape), dtype=torch.float32, device=x.device)
        self.combine(parts, sums, means, weight)
        self.writing(grad, x, grad, out, *dense, means)


@_cached
def _group_norm_backward_launches(
    shape: torch.Size, strides_of: tuple[Stride, ...], groups: int, silu: bool, kinds: Any
) -> _Launch | _LargeNormBackward | None:
    """Return the kernel that does it all, or those for a large volume; None if the voxels are not evenly spaced.

    The strides are those of the gradient, of x and of `out`.
    """
    if any(strides(shape, stride) is None for stride in strides_of[:2]):
        return None
    (batch, channels), voxels = shape[:2], shape[2:].numel()
    if is_small(shape, groups):
        return _Launch(
            group_norm_backward_kernel, batch * groups, channels, groups, voxels, batch * channels,
            *chain(*[_volume(shape, stride) for stride in strides_of]), silu, *_blocks(channels // groups, voxels),
            num_warps=NUM_WARPS,
        )  # fmt: skip
    stride_grad, stride, stride_out = strides_of
    num_chunks, summing = _sums_launch(shape, (stride_grad, stride), None, groups, silu, False, kinds)
    num_parts = 1 if num_chunks > MOST_PARTS else num_chunks
    block = min(triton.next_power_of_2(num_parts), COMBINE_BLOCK)
    combine = _Launch(
        group_means_kernel, batch * groups, channels, groups, voxels, num_parts, batch * channels, block
    )  # fmt: skip
    writing = _input_grad_launch(shape, (stride_grad, stride, stride_grad, stride_out), groups, silu, False, kinds)
    return _LargeNormBackward(num_chunks, summing, combine, writing)


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
def _normalise_launch(
    shapes: tuple[torch.Size, ...], strides: tuple[Stride, ...], rows_before: int, groups: int, silu: bool, kinds: Any
) -> _Launch:
    """Return the kernel for the shapes and strides of x and of `out`."""
    (shape, shape_out), (stride, stride_out) = shapes, strides
    voxels, out_voxels = shape[2:].numel(), shape_out[2:].numel()
    programs, num_chunks, *block = _tiles(shape, stride, out_voxels)
    volumes = _volume(shape, stride), _volume(shape_out, stride_out)
    return _Launch(
        normalise_kernel, programs, shape[1], groups, voxels, out_voxels, rows_before * shape[3:].numel(), num_chunks,
        *volumes[0], *volumes[1], silu, _multiple(shape[1], *volumes), *block, num_warps=NUM_WARPS,
    )  # fmt: skip


def store_norm_sums(out: Tensor | None, sums: Tensor, grad: Tensor, x: Tensor, norm: Norm, before_silu: bool) -> None:
    """Write the sums of the gradient before SiLU and of its product with the standardised input into `sums`.

    The gradient itself, before or after SiLU, goes into `out`, if given.
    """
    x, grad = _readable(x), _readable(grad)
    target = grad if out is None else out
    stride_out, kinds = None if out is None else out.stride(), _kinds(x, grad, target, norm.weight)
    strides, options = (grad.stride(), x.stride()), (norm.silu, before_silu, kinds)
    num_chunks, launch = _sums_launch(x.shape, strides, stride_out, norm.groups, *options)
    parts = torch.empty((2, *x.shape[:2], num_chunks), dtype=torch.float32, device=x.device)
    launch(grad, x, target, parts, *_dense(*norm[:4]))
    torch.sum(parts, 3, out=sums)


@_cached
def _sums_launch(
    shape: torch.Size, strides: tuple[Stride, ...], stride_out: Stride | None, groups: int, *options: Any
) -> tuple[int, _Launch]:
    """Return the number of chunks and the kernel, for the strides of the gradient and of x.

    `options`: whether SiLU follows, whether the gradient before it is stored, and `_kinds`.
    """
    silu, before_silu, _ = options
    batch, channels = shape[:2]
    voxels, (stride_grad, stride) = shape[2:].numel(), strides
    programs, num_chunks, *block = _tiles(shape, stride, voxels)
    volumes = [_volume(shape, each) for each in (stride_grad, stride, stride_out or stride_grad)]
    return num_chunks, _Launch(
        sums_kernel, programs, channels, groups, voxels, num_chunks, batch * channels * num_chunks, *chain(*volumes),
        silu, stride_out is not None, before_silu, _multiple(channels, *volumes), *block, num_warps=NUM_WARPS,
    )  # fmt: skip


def norm_input_grad(out: Tensor, grad: Tensor, x: Tensor, norm: Norm, group_means: Tensor, plus: Tensor | None) -> None:
    """Write the gradient of `x`, and `plus` added to it, into `out`, which may be `grad` or `plus` itself."""
    x, grad = _readable(x), _readable(grad)
    added = grad if plus is None else _readable(plus)
    strides, kinds = (grad.stride(), x.stride(), added.stride(), out.stride()), _kinds(x, grad, added, out, norm.weight)
    launch = _input_grad_launch(x.shape, strides, norm.groups, norm.silu, plus is not None, kinds)
    launch(grad, x, added, out, *_dense(*norm[:4], group_means))


@_cached
def _input_grad_launch(
    shape: torch.Size, strides: tuple[Stride, ...], groups: int, silu: bool, has_plus: bool, kinds: Any
) -> _Launch:
    """Return the kernel for the strides of the gradient, of x, of what is added, and of `out`."""
    voxels = shape[2:].numel()
    programs, num_chunks, *block = _tiles(shape, strides[1], voxels)
    volumes = [_volume(shape, each) for each in strides]
    return _Launch(
        input_grad_kernel, programs, shape[1], groups, voxels, num_chunks, shape[0], *chain(*volumes), silu, has_plus,
        _multiple(shape[1], *volumes), *block, num_warps=NUM_WARPS,
    )  # fmt: skip


def _dense(*values: Tensor) -> list[Tensor]:
    """Return the tensors contiguous, as the kernels index them."""
    return [value if value.is_contiguous() else value.contiguous() for value in values]
