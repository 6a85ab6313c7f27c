"""The norm operators as fused Triton kernels: each reads every value once and computes in fp32.

A volume is addressed as (batch, channels, voxels) through three strides, so the same kernels handle contiguous and
channels-last tensors, rows of either, and gradients whose layout differs from their input's. A program processes one
tile of channels x voxels. Sums have two stages of fixed order and no atomics, so the same input gives the same bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from subprocess import SubprocessError
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton.errors import TritonError  # type: ignore[import-untyped]

TILE_VALUES = 4096
NUM_WARPS = 8
MAX_TILE_CHANNELS = 64  # with channels last: 128 bytes of bf16 lie side by side
COMBINE_BLOCK = 2048


@triton.jit
def _tile(channels, voxels, num_chunks, block_c: tl.constexpr, block_v: tl.constexpr):
    """Return the batch item, channels, voxels and chunk of voxels of this program, and the mask of those that exist.

    Factors of addresses are 64 bits wide, because a volume may have more than 2^31 values.
    """
    program = tl.program_id(0)
    chunk = program % num_chunks
    block = program // num_chunks
    num_blocks = tl.cdiv(channels, block_c)
    c = (block % num_blocks) * block_c + tl.arange(0, block_c)
    v = chunk.to(tl.int64) * block_v + tl.arange(0, block_v)
    return (block // num_blocks).to(tl.int64), c, v, chunk, (c < channels)[:, None] & (v < voxels)[None, :]


@triton.jit
def _places(ptr, b, c, v, stride_b, stride_c, stride_v):
    return ptr + b * stride_b + c[:, None].to(tl.int64) * stride_c + v[None, :] * stride_v


@triton.jit
def _load(ptr, b, c, v, mask, stride_b, stride_c, stride_v):
    return tl.load(_places(ptr, b, c, v, stride_b, stride_c, stride_v), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, values, b, c, v, mask, stride_b, stride_c, stride_v):
    tl.store(_places(ptr, b, c, v, stride_b, stride_c, stride_v), values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _of_channels(ptr, c, channels):
    return tl.load(ptr + c, mask=c < channels, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _of_groups(ptr, b, c, channels, groups):
    return tl.load(ptr + b * groups + c // (channels // groups), mask=c < channels, other=0.0)[:, None]


@triton.jit
def _before_silu(grad, normed):
    s = tl.sigmoid(normed)
    return grad * s * (1.0 + normed * (1.0 - s))


@triton.jit
def _moments_kernel(
    x_ptr, out_ptr, parts_ptr, channels, voxels, num_chunks, plane, x_b, x_c, x_v, out_b, out_c, out_v,
    has_out: tl.constexpr, block_c: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Write each channel's mean over the tile, and the sum of squared distances from it; copy the tile if asked to."""
    b, c, v, chunk, mask = _tile(channels, voxels, num_chunks, block_c, block_v)
    x = _load(x_ptr, b, c, v, mask, x_b, x_c, x_v)
    if has_out:
        _store(out_ptr, x, b, c, v, mask, out_b, out_c, out_v)
    count = tl.minimum(voxels - chunk.to(tl.int64) * block_v, block_v).to(tl.float32)
    mean = tl.sum(x, 1) / count
    centred = tl.where(mask, x - mean[:, None], 0.0)
    place = parts_ptr + (b * channels + c) * num_chunks + chunk
    tl.store(place, mean, mask=c < channels)
    tl.store(place + plane, tl.sum(centred * centred, 1), mask=c < channels)


@triton.jit
def _combine_kernel(parts_ptr, mean_ptr, rstd_ptr, size, voxels, num_chunks, eps, block_v, block: tl.constexpr):
    """Combine the parts of one group into its mean and rstd; distances from the mean avoid cancellation."""
    group = tl.program_id(0)
    num_parts = size * num_chunks
    means_ptr = parts_ptr + group.to(tl.int64) * num_parts
    squares_ptr = means_ptr + tl.num_programs(0).to(tl.int64) * num_parts
    total = (voxels * 1.0) * size
    first = tl.load(means_ptr)
    acc = tl.zeros([block], tl.float32)
    for start in range(0, num_parts, block):
        i = start + tl.arange(0, block)
        count = tl.minimum(voxels - (i % num_chunks).to(tl.int64) * block_v, block_v).to(tl.float32)
        acc += count * (tl.load(means_ptr + i, mask=i < num_parts, other=first) - first)
    mean = first + tl.sum(acc, 0) / total
    acc = tl.zeros([block], tl.float32)
    for start in range(0, num_parts, block):
        i = start + tl.arange(0, block)
        count = tl.minimum(voxels - (i % num_chunks).to(tl.int64) * block_v, block_v).to(tl.float32)
        distance = tl.load(means_ptr + i, mask=i < num_parts, other=mean) - mean
        acc += tl.load(squares_ptr + i, mask=i < num_parts, other=0.0) + count * distance * distance
    tl.store(mean_ptr + group, mean)
    tl.store(rstd_ptr + group, 1.0 / tl.sqrt(tl.sum(acc, 0) / total + eps))


@triton.jit
def _normalise_kernel(
    x_ptr, out_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, channels, groups, voxels, out_voxels, voxels_before,
    num_chunks, x_b, x_c, x_v, out_b, out_c, out_v,
    silu: tl.constexpr, block_c: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    b, c, v, _, mask = _tile(channels, out_voxels, num_chunks, block_c, block_v)
    inside = (v >= voxels_before) & (v - voxels_before < voxels)  # `v` has 64 bits, their sum may not
    x = _load(x_ptr, b, c, v - voxels_before, mask & inside[None, :], x_b, x_c, x_v)
    scale = _of_groups(rstd_ptr, b, c, channels, groups) * _of_channels(weight_ptr, c, channels)
    y = (x - _of_groups(mean_ptr, b, c, channels, groups)) * scale + _of_channels(bias_ptr, c, channels)
    if silu:
        y = y * tl.sigmoid(y)
    _store(out_ptr, tl.where(inside[None, :], y, 0.0), b, c, v, mask, out_b, out_c, out_v)


@triton.jit
def _sums_kernel(
    grad_ptr, x_ptr, out_ptr, parts_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, channels, groups, voxels, num_chunks,
    plane, grad_b, grad_c, grad_v, x_b, x_c, x_v, out_b, out_c, out_v, silu: tl.constexpr, has_out: tl.constexpr,
    before_silu: tl.constexpr, block_c: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Write each channel's sums over the tile of the gradient before SiLU, and of it times the standardised input.

    If asked to, store the gradient as well, before or after SiLU.
    """
    b, c, v, chunk, mask = _tile(channels, voxels, num_chunks, block_c, block_v)
    x = _load(x_ptr, b, c, v, mask, x_b, x_c, x_v)
    grad = _load(grad_ptr, b, c, v, mask, grad_b, grad_c, grad_v)
    mean, rstd = _of_groups(mean_ptr, b, c, channels, groups), _of_groups(rstd_ptr, b, c, channels, groups)
    x = (x - mean) * rstd
    if has_out and not before_silu:
        _store(out_ptr, grad, b, c, v, mask, out_b, out_c, out_v)
    if silu:
        grad = _before_silu(grad, x * _of_channels(weight_ptr, c, channels) + _of_channels(bias_ptr, c, channels))
    if has_out and before_silu:
        _store(out_ptr, grad, b, c, v, mask, out_b, out_c, out_v)
    place = parts_ptr + (b * channels + c) * num_chunks + chunk
    tl.store(place, tl.sum(grad, 1), mask=c < channels)
    tl.store(place + plane, tl.sum(grad * x, 1), mask=c < channels)


@triton.jit
def _input_grad_kernel(
    grad_ptr, x_ptr, plus_ptr, out_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, group_means_ptr, channels, groups,
    voxels, num_chunks, batch, grad_b, grad_c, grad_v, x_b, x_c, x_v, plus_b, plus_c, plus_v, out_b, out_c, out_v,
    silu: tl.constexpr, has_plus: tl.constexpr, block_c: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    b, c, v, _, mask = _tile(channels, voxels, num_chunks, block_c, block_v)
    x = _load(x_ptr, b, c, v, mask, x_b, x_c, x_v)
    grad = _load(grad_ptr, b, c, v, mask, grad_b, grad_c, grad_v)
    rstd, weight = _of_groups(rstd_ptr, b, c, channels, groups), _of_channels(weight_ptr, c, channels)
    x = (x - _of_groups(mean_ptr, b, c, channels, groups)) * rstd
    if silu:
        grad = _before_silu(grad, x * weight + _of_channels(bias_ptr, c, channels))
    of_grad = _of_groups(group_means_ptr, b, c, channels, groups)
    of_product = _of_groups(group_means_ptr + batch * groups, b, c, channels, groups)
    result = (grad * weight - of_grad - x * of_product) * rstd
    if has_plus:
        result += _load(plus_ptr, b, c, v, mask, plus_b, plus_c, plus_v)
    _store(out_ptr, result, b, c, v, mask, out_b, out_c, out_v)


class _Tiles(NamedTuple):
    """How a volume is cut into tiles: the number of programs and of chunks of voxels, and the shape of a tile."""

    programs: int
    num_chunks: int
    block_c: int
    block_v: int


def _tiles(x: Tensor, voxels: int) -> _Tiles:
    """Choose tiles along the dimension that is contiguous in memory: voxels, or channels and voxels."""
    batch, channels = x.shape[:2]
    whole_c, whole_v = triton.next_power_of_2(channels), triton.next_power_of_2(voxels)
    if x.stride(1) == 1:
        block_c = min(whole_c, MAX_TILE_CHANNELS)
        block_v = min(whole_v, TILE_VALUES // block_c)
    else:
        block_v = min(whole_v, TILE_VALUES)
        block_c = min(whole_c, TILE_VALUES // block_v)
    num_chunks = triton.cdiv(voxels, block_v)
    return _Tiles(batch * triton.cdiv(channels, block_c) * num_chunks, num_chunks, block_c, block_v)


def strides(x: Tensor) -> tuple[int, int, int] | None:
    """Return the strides of batch items, channels and voxels; None if the voxels are not evenly spaced."""
    step, expected = 1, None
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size == 1:
            continue
        if expected is None:
            step = stride
        elif stride != expected:
            return None
        expected = stride * size
    return x.stride(0), x.stride(1), step


def _readable(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return the tensor and its strides; make it contiguous if its voxels are not evenly spaced."""
    found = strides(x)
    if found is not None:
        return x, found
    x = x.contiguous()
    return x, (x.stride(0), x.stride(1), 1)


def _writable(out: Tensor) -> tuple[int, int, int]:
    found = strides(out)
    assert found is not None, f"out: strides {out.stride()} of {tuple(out.shape)}; voxels must be evenly spaced"
    return found


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make Triton launch on `device`; CPU tensors go to its interpreter."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def failure(device: torch.device) -> str:
    """Return why the kernels do not run on `device`, or "" if they do; Triton needs a C compiler, for example."""
    try:
        statistics(torch.zeros((1, 1, 1, 1, 1), device=device), 1, 1e-5)
    except (TritonError, RuntimeError, OSError, SubprocessError, ImportError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def statistics(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(variance + eps) of each group, (batch, groups)."""
    mean, rstd = (x.new_empty((x.shape[0], groups), dtype=torch.float32) for _ in range(2))
    store_statistics(None, mean, rstd, x, eps)
    return mean, rstd


def store_statistics(out: Tensor | None, mean: Tensor, rstd: Tensor, x: Tensor, eps: float) -> None:
    """Write the statistics of groups, as many as `mean` has columns, and copy `x` into `out` if given."""
    x, x_strides = _readable(x)
    (batch, groups), channels, voxels = mean.shape, x.shape[1], x.shape[2:].numel()
    assert mean.stride() == rstd.stride() == (groups, 1), "statistics are written in order"
    programs, num_chunks, *block = _tiles(x, voxels)
    parts = x.new_empty((2, batch, channels, num_chunks), dtype=torch.float32)
    target, out_strides = (x, x_strides) if out is None else (out, _writable(out))
    with _on(x.device):
        _moments_kernel[(programs,)](
            x, target, parts, channels, voxels, num_chunks, parts.stride(0), *x_strides, *out_strides, out is not None,
            *block, num_warps=NUM_WARPS,
        )  # fmt: skip
        _combine_kernel[(batch * groups,)](
            parts, mean, rstd, channels // groups, voxels, num_chunks, eps, block[1], COMBINE_BLOCK
        )


def normalise(
    out: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, silu: bool, rows_before: int
) -> None:
    """Write the rows of `x`, after norm and optional SiLU, into `out`, and zeros into the rows around them."""
    x, x_strides = _readable(x)
    voxels, out_voxels, face = (t.shape[2:].numel() for t in (x, out, x[:, :, :1]))
    programs, num_chunks, *block = _tiles(x, out_voxels)
    with _on(x.device):
        _normalise_kernel[(programs,)](
            x, out, *_dense(mean, rstd, weight, bias), x.shape[1], mean.shape[1], voxels, out_voxels,
            rows_before * face, num_chunks, *x_strides, *_writable(out), silu, *block, num_warps=NUM_WARPS,
        )  # fmt: skip


def norm_sums(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor, silu: bool) -> Tensor:
    """Return the sums of the gradient before SiLU and of its product with the standardised input."""
    return _sums(None, grad, x, (mean, rstd, weight, bias), silu, False)


def store_norm_sums(
    out: Tensor,
    sums: Tensor,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    silu: bool,
    before_silu: bool,
) -> None:
    """Write the sums of `norm_sums` into `sums`, and the gradient, before or after SiLU, into `out`."""
    sums.copy_(_sums(out, grad, x, (mean, rstd, weight, bias), silu, before_silu))


def _sums(
    out: Tensor | None, grad: Tensor, x: Tensor, norm: tuple[Tensor, ...], silu: bool, before_silu: bool
) -> Tensor:
    x, x_strides = _readable(x)
    grad, grad_strides = _readable(grad)
    target, out_strides = (grad, grad_strides) if out is None else (out, _writable(out))
    batch, channels, voxels = x.shape[0], x.shape[1], x.shape[2:].numel()
    programs, num_chunks, *block = _tiles(x, voxels)
    parts = x.new_empty((2, batch, channels, num_chunks), dtype=torch.float32)
    with _on(x.device):
        _sums_kernel[(programs,)](
            grad, x, target, parts, *_dense(*norm), channels, norm[0].shape[1], voxels, num_chunks, parts.stride(0),
            *grad_strides, *x_strides, *out_strides, silu, out is not None, before_silu, *block, num_warps=NUM_WARPS,
        )  # fmt: skip
    return parts.squeeze(3) if num_chunks == 1 else parts.sum(3)


def norm_input_grad(
    out: Tensor,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Tensor,
    group_means: Tensor,
    silu: bool,
    plus: Tensor | None,
) -> None:
    """Write the gradient of `x`, and `plus` added to it, into `out`, which may be `grad` or `plus` itself."""
    x, x_strides = _readable(x)
    grad, grad_strides = _readable(grad)
    added, plus_strides = (grad, grad_strides) if plus is None else _readable(plus)
    voxels = x.shape[2:].numel()
    programs, num_chunks, *block = _tiles(x, voxels)
    with _on(x.device):
        _input_grad_kernel[(programs,)](
            grad, x, added, out, *_dense(mean, rstd, weight, bias, group_means), x.shape[1], mean.shape[1], voxels,
            num_chunks, x.shape[0], *grad_strides, *x_strides, *plus_strides, *_writable(out), silu,
            plus is not None, *block, num_warps=NUM_WARPS,
        )  # fmt: skip


def _dense(*values: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors contiguous, as the kernels index them."""
    return tuple(value.contiguous() for value in values)
