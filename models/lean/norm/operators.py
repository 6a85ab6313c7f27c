"""The operators that make up a GroupNorm, whole or in slabs; each reads its tensors once and copies none of them.

They are registered with torch's dispatcher (`torch.ops.lean`), so a dispatch mode sees each call as one operator, and
fake tensors work. On CUDA they run as fused Triton kernels, elsewhere through torch's own kernels. Volumes are (batch,
channels, rows, height, width), contiguous, channels-last, or rows of either. Statistics and sums are fp32, and fp64 for
fp64 volumes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from models.lean import native
from models.lean.layout import layout_of
from models.lean.norm import torch_kernels
from models.lean.norm.torch_kernels import Norm

log = logging.getLogger(__name__)

OLDEST_CAPABILITY = (7, 5)
Kernel = Callable[..., Any]

# `Library` rather than `custom_op`, whose wrappers add 40 microseconds to each call.
_library = torch.library.Library("lean", "DEF")
_NORM = "Tensor mean, Tensor rstd, Tensor weight, Tensor bias, bool silu"


def group_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float,
    silu: bool,
    dtype: torch.dtype,
    layout: torch.memory_format | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a whole `x` after norm and optional SiLU, in `dtype`, and its statistics. Two reads, one write.

    The result has the layout of `x` if `layout` is None.
    """
    direct = _direct_backend(x)
    if direct is not None:
        out = torch.empty_like(x, dtype=dtype, memory_format=layout or layout_of(x))
        return out, *direct.group_norm(out, x, weight, bias, groups, eps, silu)
    with torch.autocast(x.device.type, enabled=False):
        return torch.ops.lean.group_norm.default(x, weight, bias, groups, eps, silu, dtype, layout)


def group_norm_backward(grad: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `x`, weight and bias, the last two in full precision. Four reads, one write."""
    direct = _direct_backend(x)
    if direct is not None:
        return _triton_backward(direct, grad, x, norm)
    with torch.autocast(x.device.type, enabled=False):
        return torch.ops.lean.group_norm_backward.default(grad, x, *norm)


def statistics(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(variance + eps) of each group, both (batch, groups). One read."""
    return torch.ops.lean.statistics.default(x, groups, eps)


def store_statistics(out: Tensor, mean: Tensor, rstd: Tensor, x: Tensor, eps: float) -> None:
    """Copy `x` into `out`, and write its statistics into `mean` and `rstd`, (batch, groups). One read, one write."""
    torch.ops.lean.store_statistics.default(out, mean, rstd, x, eps)


def normalise(x: Tensor, norm: Norm, dtype: torch.dtype, rows_before: int = 0, rows_after: int = 0) -> Tensor:
    """Return `x` after norm and optional SiLU, in `dtype`, with rows of zeros around it. One read, one write."""
    return torch.ops.lean.normalise.default(x, *norm, dtype, rows_before, rows_after)


def store_norm_sums(out: Tensor, sums: Tensor, grad: Tensor, x: Tensor, norm: Norm) -> None:
    """Write two sums over voxels, (2, batch, channels), from the gradient of the output of `normalise`, into `sums`.

    The first sums the gradient before SiLU, the second its product with the standardised input. Summed over the batch,
    they are the gradients of bias and weight. `out`, which may be `grad` itself, gets the gradient that
    `norm_input_grad` needs. In full precision that is the gradient before SiLU, so that SiLU is not computed again. In
    low precision that would be one more rounding, so the incoming gradient is kept as it is. Two reads, one write.
    """
    torch.ops.lean.store_norm_sums.default(out, sums, grad, x, *norm)


def stores_before_silu(out: Tensor) -> bool:
    """Return whether `store_norm_sums` writes the gradient before SiLU into `out`."""
    return out.dtype in (torch.float32, torch.float64)


def group_means(sums: Tensor, weight: Tensor, groups: int, count: int) -> Tensor:
    """Turn the sums over all voxels into the group means that `norm_input_grad` takes, (2, batch, groups).

    `count` is the number of values in a group: its channels times the voxels of the whole volume.
    """
    return (sums * (weight.to(sums.dtype) / count)).unflatten(2, (groups, -1)).sum(3)


def norm_input_grad(
    out: Tensor, grad: Tensor, x: Tensor, norm: Norm, group_means: Tensor, plus: Tensor | None = None
) -> None:
    """Write the gradient of `x`, plus `plus` if given, into `out`. Two or three reads, one write.

    `out` may be `grad` or `plus` itself but must not overlap any other input.
    """
    torch.ops.lean.norm_input_grad.default(out, grad, x, *norm, group_means, plus)


@functools.cache
def uses_triton(device: torch.device) -> bool:
    """Return whether volumes on `device`, except fp64 ones, are processed by the Triton kernels.

    If a CUDA device cannot run them, log the reason once.
    """
    if device.type != "cuda":
        return False
    reason = _reason_against_triton(device)
    if reason:
        log.warning(
            "norms on %s use torch's own kernels, which are slower and convert up to %d MiB at once to fp32: %s",
            device, torch_kernels.piece_values(device) * 4 // 2**20, reason,
        )  # fmt: skip
    return not reason


def _reason_against_triton(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < OLDEST_CAPABILITY:
        return f"its compute capability is {major}.{minor}, and Triton needs 7.5 or newer"
    try:
        from models.lean.norm import triton_launch
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    failure = triton_launch.failure(device)
    return f"Triton cannot compile for it ({failure})" if failure else ""


def _direct_backend(x: Tensor) -> Any:
    """Return what launches the kernels for a whole `x` without torch's dispatcher, or None if the operator must run.

    The dispatcher takes the host as long as a launch. Dispatch modes and fake tensors need the operator. The Triton
    kernels take no notice of autocast.
    """
    if not x.is_cuda or type(x) is not Tensor or native.in_dispatch_mode():
        return None
    backend = _backend(x)
    return None if backend is torch_kernels else backend


def _triton_backward(backend: Any, grad: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = torch.empty_like(x, memory_format=layout_of(x))
    sums = backend.group_norm_backward(grad_x, grad, x, norm)
    grad_bias, grad_weight = (sums.view(2, -1) if x.shape[0] == 1 else sums.sum(1)).unbind()
    return grad_x, grad_weight, grad_bias


def _check(x: Tensor, *others: Tensor | None) -> None:
    assert x.dim() == 5, f"the norm operators take (batch, channels, rows, height, width), not {tuple(x.shape)}"
    assert x.numel() > 0, f"a volume of shape {tuple(x.shape)} has no values to normalise"
    for other in others:
        assert other is None or other.shape == x.shape, f"{tuple(other.shape)} does not belong to {tuple(x.shape)}"


def _empty_rows(x: Tensor, dtype: torch.dtype, more_rows: int, layout: torch.memory_format | None = None) -> Tensor:
    """Return an uninitialised tensor for the rows of `x` and `more_rows` more, in its layout if no other is given."""
    layout = layout or layout_of(x)
    if not more_rows:
        return torch.empty_like(x, dtype=dtype, memory_format=layout)
    batch, channels, rows, height, width = x.shape
    shape = (batch, channels, rows + more_rows, height, width)
    return torch.empty(shape, dtype=dtype, device=x.device, memory_format=layout)


def _backend(x: Tensor) -> Any:
    if x.dtype == torch.float64 or not uses_triton(x.device):
        return torch_kernels
    return _triton_launch()


@functools.cache
def _triton_launch() -> Any:
    from models.lean.norm import triton_launch

    return triton_launch


def _uses_fused_kernel(x: Tensor, groups: int) -> bool:
    """Return whether, of torch's kernels, those of GroupNorm process `x`: they do unless it is an instance norm.

    torch's own instance norm rounds less than they do: for a large mean their statistics are slightly off, and their
    backward does not centre its input.
    """
    return x.is_contiguous() and groups != x.shape[1]


def _operator(schema: str, fake: Callable[..., Any] = lambda *tensors: None) -> Callable[[Kernel], Kernel]:
    """Register a function as the kernel of an operator; `fake` returns tensors like its results, or nothing."""

    def register(kernel: Kernel) -> Kernel:
        name = _library.define(schema)
        for device in ("CPU", "CUDA"):
            _library.impl(name, kernel, device)
        torch.library.register_fake(f"lean::{name}", fake, lib=_library)
        return kernel

    return register


def _fake_statistics(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((x.shape[0], groups), dtype=dtype), x.new_empty((x.shape[0], groups), dtype=dtype)


@_operator("statistics(Tensor x, int groups, float eps) -> (Tensor, Tensor)", _fake_statistics)
def _statistics(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    _check(x)
    return _backend(x).statistics(x, groups, eps)


@_operator("store_statistics(Tensor(a!) out, Tensor(b!) mean, Tensor(c!) rstd, Tensor x, float eps) -> ()")
def _store_statistics(out: Tensor, mean: Tensor, rstd: Tensor, x: Tensor, eps: float) -> None:
    _check(x, out)
    _backend(x).store_statistics(out, mean, rstd, x, eps)


# The dispatcher passes the five fields of a `Norm` one by one.


def _fake_normalise(x: Tensor, *values: Any) -> Tensor:
    *_, dtype, rows_before, rows_after = values
    return _empty_rows(x, dtype, rows_before + rows_after)


@_operator(
    f"normalise(Tensor x, {_NORM}, ScalarType dtype, int rows_before, int rows_after) -> Tensor", _fake_normalise
)
def _normalise(x: Tensor, *values: Any) -> Tensor:
    *fields, dtype, rows_before, rows_after = values
    _check(x)
    out = _empty_rows(x, dtype, rows_before + rows_after)
    _backend(x).normalise(out, x, Norm(*fields), rows_before)
    return out


@_operator(f"store_norm_sums(Tensor(a!) out, Tensor(b!) sums, Tensor grad, Tensor x, {_NORM}) -> ()")
def _store_norm_sums(out: Tensor, sums: Tensor, grad: Tensor, x: Tensor, *fields: Any) -> None:
    _check(x, out, grad)
    _backend(x).store_norm_sums(out, sums, grad, x, Norm(*fields), stores_before_silu(out))


@_operator(f"norm_input_grad(Tensor(a!) out, Tensor grad, Tensor x, {_NORM}, Tensor group_means, Tensor? plus) -> ()")
def _norm_input_grad(out: Tensor, grad: Tensor, x: Tensor, *values: Any) -> None:
    *fields, means, plus = values
    _check(x, out, grad, plus)
    _backend(x).norm_input_grad(out, grad, x, Norm(*fields), means, plus)


def _fake_group_norm(x: Tensor, weight: Tensor, bias: Tensor, *values: Any) -> tuple[Tensor, Tensor, Tensor]:
    groups, eps, _, dtype, layout = values
    return _empty_rows(x, dtype, 0, layout), *_fake_statistics(x, groups, eps)


@_operator(
    "group_norm(Tensor x, Tensor weight, Tensor bias, int groups, float eps, bool silu, ScalarType dtype, "
    "MemoryFormat? layout) -> (Tensor, Tensor, Tensor)",
    _fake_group_norm,
)
def _group_norm(x: Tensor, weight: Tensor, bias: Tensor, *values: Any) -> tuple[Tensor, Tensor, Tensor]:
    groups, eps, silu, dtype, layout = values
    _check(x)
    backend = _backend(x)
    if backend is torch_kernels and _uses_fused_kernel(x, groups):
        return torch_kernels.group_norm(x, weight, bias, groups, eps, silu, dtype, layout or torch.contiguous_format)
    out = _empty_rows(x, dtype, 0, layout)
    if backend is not torch_kernels:
        return out, *backend.group_norm(out, x, weight, bias, groups, eps, silu)
    mean, rstd = backend.statistics(x, groups, eps)
    backend.normalise(out, x, Norm(mean, rstd, weight, bias, silu), 0)
    return out, mean, rstd


def _fake_group_norm_backward(grad: Tensor, x: Tensor, mean: Tensor, *fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_rows(x, x.dtype, 0), mean.new_empty(x.shape[1]), mean.new_empty(x.shape[1])


@_operator(
    f"group_norm_backward(Tensor grad, Tensor x, {_NORM}) -> (Tensor, Tensor, Tensor)", _fake_group_norm_backward
)
def _group_norm_backward(grad: Tensor, x: Tensor, *fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    norm = Norm(*fields)
    _check(x, grad)
    backend = _backend(x)
    if backend is torch_kernels and _uses_fused_kernel(x, norm.groups):
        return torch_kernels.group_norm_backward(grad, x, norm)
    if backend is not torch_kernels:
        return _triton_backward(backend, grad, x, norm)
    grad_x = _empty_rows(x, x.dtype, 0)
    # Without fused kernels, SiLU computed again would take longer than writing its gradient and reading it.
    is_before_silu = stores_before_silu(grad_x)
    sums = norm.mean.new_empty((2, *x.shape[:2]))
    backend.store_norm_sums(grad_x if is_before_silu else None, sums, grad, x, norm, is_before_silu)
    if is_before_silu:
        grad, norm = grad_x, norm._replace(silu=False)
    means = group_means(sums, norm.weight, norm.groups, x.numel() // norm.mean.numel())
    _norm_input_grad(grad_x, grad, x, *norm, means, None)
    return grad_x, sums[1].sum(0), sums[0].sum(0)
