"""What an operator does: which tensors it reads and writes, how often, its FLOPs, and whether it is a kernel at all.

Counted as if every kernel read its arguments and wrote its results once. Views and allocations are no kernels, and
`copy_` does not read what it overwrites. The norms of `models/lean` read a volume more than once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

aten = torch.ops.aten
Kind = Literal["convolution", "attention", "matrix product", "norm", "copy", "other"]

_NO_KERNELS = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias"),
    *("_local_scalar_dense", "resize_", "set_", "lift_fresh"),
}
_FIRST_FACTOR = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
"""Where the first factor of a matrix product is among its arguments; the second follows it."""
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
    read = args[1:] if func._overloadpacket is aten.copy_ else args
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


def count_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], out: Any) -> int:
    """Return the floating-point operations of one call; 0 for other operators.

    torch's own counter gives the same, but importing it takes a third of a second.
    """
    packet = func._overloadpacket
    # On CPU and fake tensors attention uses these two. Backward computes the weights again and four products.
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return 2 * _attention_flops(*args[:3])
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return 5 * _attention_flops(*args[1:4])
    if packet is aten.convolution:
        return _convolution_flops(args[0], args[1], out, is_transposed=args[6])
    if packet is aten.convolution_backward:
        grad, x, weight = args[:3]
        return sum(args[-1][:2]) * _convolution_flops(x, weight, grad, is_transposed=args[7])
    if packet in _FIRST_FACTOR:
        first, second = args[_FIRST_FACTOR[packet] :][:2]
        return 2 * first.numel() * second.shape[-1]
    return 0


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the operations of one of attention's matrix products: of the queries with the keys."""
    batch, heads, tokens, channels = query.shape
    assert value.shape[-1] == channels, "keys and values have as many channels"
    return 2 * batch * heads * tokens * key.shape[-2] * channels


def _convolution_flops(x: Tensor, weight: Tensor, y: Tensor, is_transposed: bool) -> int:
    """Return the operations of a convolution from `x` to `y`; each of its two gradients takes as many."""
    return 2 * weight.numel() * y.shape[0] * math.prod((x if is_transposed else y).shape[2:])
