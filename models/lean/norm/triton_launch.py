"""Launches the Triton kernels of the norm operators: how volumes are cut into tiles, and what each kernel is given."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from subprocess import SubprocessError
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.errors import TritonError  # type: ignore[import-untyped]

from models.lean.norm.affine import Norm
from models.lean.norm.triton_kernels import (
    combine_kernel,
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
        moments_kernel[(programs,)](
            x, target, parts, channels, voxels, num_chunks, parts.stride(0), *x_strides, *out_strides, out is not None,
            *block, num_warps=NUM_WARPS,
        )  # fmt: skip
        block_v = block[1]
        if num_chunks * channels // groups > COMBINE_BLOCK:
            # One program for each group would take its many parts one block after the other.
            chunks, num_chunks = num_chunks, triton.cdiv(num_chunks, COMBINE_BLOCK)
            spans = parts.new_empty((2, batch, channels, num_chunks))
            spans_kernel[(batch * channels * num_chunks,)](
                parts, spans, voxels, chunks, num_chunks, parts.stride(0), spans.stride(0), block_v, COMBINE_BLOCK
            )
            parts, block_v = spans, block_v * COMBINE_BLOCK
        combine_kernel[(batch * groups,)](
            parts, mean, rstd, channels // groups, voxels, num_chunks, eps, block_v, COMBINE_BLOCK
        )


def normalise(out: Tensor, x: Tensor, norm: Norm, rows_before: int) -> None:
    """Write the rows of `x`, after norm and optional SiLU, into `out`, and zeros into the rows around them."""
    x, x_strides = _readable(x)
    voxels, out_voxels, face = (t.shape[2:].numel() for t in (x, out, x[:, :, :1]))
    programs, num_chunks, *block = _tiles(x, out_voxels)
    with _on(x.device):
        normalise_kernel[(programs,)](
            x, out, *_dense(*norm.tensors), x.shape[1], norm.groups, voxels, out_voxels,
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
        sums_kernel[(programs,)](
            grad, x, target, parts, *_dense(*norm.tensors), channels, norm.groups, voxels, num_chunks, parts.stride(0),
            *grad_strides, *x_strides, *out_strides, norm.silu, out is not None, before_silu, *block,
            num_warps=NUM_WARPS,
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
        input_grad_kernel[(programs,)](
            grad, x, added, out, *_dense(*norm.tensors, group_means), x.shape[1], norm.groups, voxels, num_chunks,
            x.shape[0], *grad_strides, *x_strides, *plus_strides, *_writable(out), norm.silu, plus is not None,
            *block, num_warps=NUM_WARPS,
        )  # fmt: skip


def _dense(*values: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors contiguous, as the kernels index them."""
    return tuple(value.contiguous() for value in values)
