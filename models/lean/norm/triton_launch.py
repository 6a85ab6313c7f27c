"""Launches the Triton kernels of the norm operators: how volumes are cut into tiles, and what each kernel is given."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from subprocess import SubprocessError
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.errors import TritonError  # type: ignore[import-untyped]

from models.lean.norm.affine import Norm
from models.lean.norm.triton_kernels import (
    combine_kernel,
    group_norm_backward_kernel,
    group_norm_kernel,
    input_grad_kernel,
    moments_kernel,
    normalise_kernel,
    spans_kernel,
    sums_kernel,
)

TILE_VALUES = 4096
NUM_WARPS = 8
MAX_TILE_CHANNELS = 64  # with channels last: 128 bytes of bf16 lie side by side
COMBINE_BLOCK = 2048


SMALL_VALUES = 2**22
"""A volume with at most this many values is normalised by one kernel, with one program for each group.

The kernel reads a group three times, and with channels last it uses a few bytes of each 32 that it reads. That does not
matter as long as the volume stays in the GPU's cache.
"""

_LAUNCHERS: dict[tuple[Any, ...], Any] = {}


def _launch(kernel: Any, programs: int, tensors: tuple[Tensor, ...], *numbers: float, **options: int) -> None:
    """Launch a kernel on the current device.

    What Triton compiled for these kinds of arguments is launched directly the next time, because its own way of finding
    it takes the host five times as long. Kinds are all that it specialises on: dtypes, alignment of addresses, numbers.
    """
    kinds = [(tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors]
    # By identity, because Triton would hash the source of the kernel.
    key = (id(kernel), torch.cuda.current_device() if tensors[0].is_cuda else None, programs, numbers, *kinds)
    launcher = _LAUNCHERS.get(key)
    if launcher is not None:
        launcher(*tensors, *numbers)
        return
    compiled = kernel[(programs,)](*tensors, *numbers, **options)
    # The interpreter compiles nothing.
    if compiled is not None:
        _LAUNCHERS[key] = compiled[(programs, 1, 1)]


class _Tiles(NamedTuple):
    """How a volume is cut into tiles: the number of programs and of chunks of voxels, and the shape of a tile."""

    programs: int
    num_chunks: int
    block_c: int
    block_v: int


def _tiles(x: Tensor, voxels: int) -> _Tiles:
    """Choose tiles along the dimension that is contiguous in memory: voxels, or channels and voxels."""
    return _tiles_of(x.shape[0], x.shape[1], voxels, x.stride(1) == 1, TILE_VALUES)


@lru_cache(maxsize=4096)
def _tiles_of(batch: int, channels: int, voxels: int, channels_last: bool, tile_values: int) -> _Tiles:
    whole_c, whole_v = triton.next_power_of_2(channels), triton.next_power_of_2(voxels)
    if channels_last:
        block_c = min(whole_c, MAX_TILE_CHANNELS)
        block_v = min(whole_v, tile_values // block_c)
    else:
        block_v = min(whole_v, tile_values)
        block_c = min(whole_c, tile_values // block_v)
    num_chunks = triton.cdiv(voxels, block_v)
    return _Tiles(batch * triton.cdiv(channels, block_c) * num_chunks, num_chunks, block_c, block_v)


def strides(x: Tensor) -> tuple[int, int, int] | None:
    """Return the strides of batch items, channels and voxels; None if the voxels are not evenly spaced."""
    return _strides_of(x.shape, x.stride())


@lru_cache(maxsize=4096)
def _strides_of(shape: tuple[int, ...], all_strides: tuple[int, ...]) -> tuple[int, int, int] | None:
    step, expected = 1, None
    for size, stride in zip(reversed(shape[2:]), reversed(all_strides[2:]), strict=True):
        if size == 1:
            continue
        if expected is None:
            step = stride
        elif stride != expected:
            return None
        expected = stride * size
    return all_strides[0], all_strides[1], step


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
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


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
        _launch(
            moments_kernel, programs, (x, target, parts), channels, voxels, num_chunks, parts.stride(0), *x_strides,
            *out_strides, out is not None, *block, num_warps=NUM_WARPS,
        )  # fmt: skip
        block_v = block[1]
        if num_chunks * channels // groups > COMBINE_BLOCK:
            # One program for each group would take its many parts one block after the other.
            chunks, num_chunks = num_chunks, triton.cdiv(num_chunks, COMBINE_BLOCK)
            spans = parts.new_empty((2, batch, channels, num_chunks))
            _launch(
                spans_kernel, batch * channels * num_chunks, (parts, spans), voxels, chunks, num_chunks,
                parts.stride(0), spans.stride(0), block_v, COMBINE_BLOCK,
            )  # fmt: skip
            parts, block_v = spans, block_v * COMBINE_BLOCK
        _launch(
            combine_kernel, batch * groups, (parts, mean, rstd), channels // groups, voxels, num_chunks, eps, block_v,
            COMBINE_BLOCK,
        )  # fmt: skip


def group_norm(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool) -> Norm:
    """Write a whole `x`, after norm and optional SiLU, into `out`; return the norm with its statistics."""
    if not is_small(x, groups):
        norm = Norm(*statistics(x, groups, eps), weight, bias, silu)
        normalise(out, x, norm, 0)
        return norm
    x, x_strides = _readable(x)
    (batch, channels), voxels = x.shape[:2], x.shape[2:].numel()
    mean, rstd = (x.new_empty((batch, groups), dtype=torch.float32) for _ in range(2))
    with _on(x.device):
        _launch(
            group_norm_kernel, batch * groups, (x, out, mean, rstd, *_dense(weight, bias)), channels, groups, voxels,
            eps, *x_strides, *_writable(out), silu, *_blocks(channels // groups, voxels, TILE_VALUES),
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return Norm(mean, rstd, weight, bias, silu)


def group_norm_backward(out: Tensor, grad: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """Write the gradient of a small `x` into `out`; return the sums of `norm_sums`."""
    x, x_strides = _readable(x)
    grad, grad_strides = _readable(grad)
    (batch, channels), voxels, groups = x.shape[:2], x.shape[2:].numel(), norm.groups
    sums = x.new_empty((2, batch, channels), dtype=torch.float32)
    with _on(x.device):
        _launch(
            group_norm_backward_kernel, batch * groups, (grad, x, out, sums, *_dense(*norm.tensors)), channels, groups,
            voxels, batch * channels, *grad_strides, *x_strides, *_writable(out), norm.silu,
            *_blocks(channels // groups, voxels, TILE_VALUES), num_warps=NUM_WARPS,
        )  # fmt: skip
    return sums


def is_small(x: Tensor, groups: int) -> bool:
    """Return whether one kernel normalises `x`."""
    return x.numel() <= SMALL_VALUES and x.shape[1] // groups <= TILE_VALUES


@lru_cache(maxsize=4096)
def _blocks(size: int, voxels: int, tile_values: int) -> tuple[int, int]:
    """Return how many channels and voxels of a group are processed at a time."""
    block_c = triton.next_power_of_2(size)
    return block_c, min(triton.next_power_of_2(voxels), max(1, tile_values // block_c))


def normalise(out: Tensor, x: Tensor, norm: Norm, rows_before: int) -> None:
    """Write the rows of `x`, after norm and optional SiLU, into `out`, and zeros into the rows around them."""
    x, x_strides = _readable(x)
    voxels, out_voxels, face = (t.shape[2:].numel() for t in (x, out, x[:, :, :1]))
    programs, num_chunks, *block = _tiles(x, out_voxels)
    with _on(x.device):
        _launch(
            normalise_kernel, programs, (x, out, *_dense(*norm.tensors)), x.shape[1], norm.groups, voxels, out_voxels,
            rows_before * face, num_chunks, *x_strides, *_writable(out), norm.silu, *block, num_warps=NUM_WARPS,
        )  # fmt: skip


def norm_sums(grad: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """Return the sums of the gradient before SiLU and of its product with the standardised input."""
    return _sums(None, grad, x, norm, False)


def store_norm_sums(out: Tensor, sums: Tensor, grad: Tensor, x: Tensor, norm: Norm, before_silu: bool) -> None:
    """Write the sums of `norm_sums` into `sums`, and the gradient, before or after SiLU, into `out`."""
    sums.copy_(_sums(out, grad, x, norm, before_silu))


def _sums(out: Tensor | None, grad: Tensor, x: Tensor, norm: Norm, before_silu: bool) -> Tensor:
    x, x_strides = _readable(x)
    grad, grad_strides = _readable(grad)
    target, out_strides = (grad, grad_strides) if out is None else (out, _writable(out))
    batch, channels, voxels = x.shape[0], x.shape[1], x.shape[2:].numel()
    programs, num_chunks, *block = _tiles(x, voxels)
    parts = x.new_empty((2, batch, channels, num_chunks), dtype=torch.float32)
    with _on(x.device):
        _launch(
            sums_kernel, programs, (grad, x, target, parts, *_dense(*norm.tensors)), channels, norm.groups, voxels,
            num_chunks, parts.stride(0), *grad_strides, *x_strides, *out_strides, norm.silu, out is not None,
            before_silu, *block, num_warps=NUM_WARPS,
        )  # fmt: skip
    return parts.squeeze(3) if num_chunks == 1 else parts.sum(3)


def norm_input_grad(out: Tensor, grad: Tensor, x: Tensor, norm: Norm, group_means: Tensor, plus: Tensor | None) -> None:
    """Write the gradient of `x`, and `plus` added to it, into `out`, which may be `grad` or `plus` itself."""
    x, x_strides = _readable(x)
    grad, grad_strides = _readable(grad)
    added, plus_strides = (grad, grad_strides) if plus is None else _readable(plus)
    voxels = x.shape[2:].numel()
    programs, num_chunks, *block = _tiles(x, voxels)
    with _on(x.device):
        _launch(
            input_grad_kernel, programs, (grad, x, added, out, *_dense(*norm.tensors, group_means)), x.shape[1],
            norm.groups, voxels, num_chunks, x.shape[0], *grad_strides, *x_strides, *plus_strides, *_writable(out),
            norm.silu, plus is not None, *block, num_warps=NUM_WARPS,
        )  # fmt: skip


def _dense(*values: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors contiguous, as the kernels index them."""
    return tuple(value if value.is_contiguous() else value.contiguous() for value in values)
