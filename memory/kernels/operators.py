"""What an operator does to its tensors: which ones it reads and writes, how often, and whether it is a kernel at all.

Counted as if every kernel read its arguments and wrote its results once. Views and allocations are no kernels, and
`copy_` does not read what it overwrites. The norms of `models/lean` read a volume more than once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["convolution", "attention", "matrix product", "norm", "copy", "other"]

_NO_KERNELS = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias"),
    *("_local_scalar_dense", "resize_", "set_", "lift_fresh"),
}
_MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv"}
_COPIES = {"copy_", "_to_copy", "clone", "cat", "stack", "constant_pad_nd"}
# Arguments that a norm reads a second time: once for the statistics or the sums, once for the result.
_SECOND_READS = {"group_norm": ("x",), "group_norm_backward": ("grad", "x")}


@functools.cache
def is_kernel(func: torch._ops.OpOverload) -> bool:
    """Return whether an operator runs a kernel: it neither returns a view nor only allocates."""
    name = func._overloadpacket.__name__
    aliases = [result.alias_info for result in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    return func.namespace in ("aten", "lean") and not is_view and name not in _NO_KERNELS


@functools.cache
def kind_of(func: torch._ops.OpOverload) -> Kind:
    """Return the kind of work that an operator does."""
    name = func._overloadpacket.__name__
    if "convolution" in name:
        return "convolution"
    if "scaled_dot_product" in name:
        return "attention"
    if name in _MATRIX_PRODUCTS:
        return "matrix product"
    if func.namespace == "lean" or ("norm" in name and not name.startswith(("_foreach", "linalg"))):
        return "norm"
    return "copy" if name in _COPIES else "other"


@functools.cache
def _second_reads(func: torch._ops.OpOverload) -> tuple[int, ...]:
    if func.namespace != "lean":
        return ()
    names = [argument.name for argument in func._schema.arguments]
    return tuple(names.index(name) for name in _SECOND_READS.get(func._overloadpacket.__name__, ()))


def passes(func: torch._ops.OpOverload) -> int:
    """Return how many times the kernels of an operator go over its tensors."""
    return 2 if _second_reads(func) else 1


@functools.cache
def _writes_arguments(func: torch._ops.OpOverload) -> tuple[int, ...]:
    """Return the positions of the written arguments of an operator that returns nothing."""
    if func._schema.returns:
        return ()
    arguments = enumerate(func._schema.arguments)
    return tuple(n for n, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write)


def traffic_bytes(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that the kernels of one call read and write."""
    read = args[1:] if func._overloadpacket is torch.ops.aten.copy_ else args
    total = sum(_nbytes(tensor) for tensor in tensors_in(read))
    if kwargs:
        total += sum(_nbytes(tensor) for tensor in tensors_in(kwargs.values()))
    total += sum(_nbytes(tensor) for tensor in tensors_in((out,)))
    total += sum(_nbytes(args[position]) for position in _second_reads(func))
    written = [args[position] for position in _writes_arguments(func) if position < len(args)]
    return total + sum(_nbytes(tensor) for tensor in tensors_in(written))


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in a sequence and in the lists inside it."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
