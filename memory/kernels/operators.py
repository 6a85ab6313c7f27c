"""What operators do: which tensors they read and write, how often, their FLOPs, and the sums of all that.

Counted as if every kernel read its arguments and wrote its results once. Views and allocations are no kernels, and
`copy_` does not read what it overwrites. The norms of `models/lean` read a volume more than once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from memory.kernels.timing import BACKWARD_CONVOLUTION, WorkPart

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
    written = [args[position] for position in _writes_arguments(func) if position < len(args)]
    again = [args[position] for position in _second_reads(func)]
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
