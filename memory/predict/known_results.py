"""Answer operators on fake tensors that a step repeats thousands of times without asking torch's fake kernels again.

An operator that only writes to its first argument, or to one given for its result, returns that. A view comes from the
meta kernel, whose strides are those of a real view also along axes of one element. An operator whose results are new
tensors returns fake tensors of the shapes, strides and dtypes that it returned for the same arguments before.
Everything else goes through `FakeTensorMode`.
"""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._mode_utils import no_dispatch

from memory.kernels.convolutions import convolution_layout
from memory.kernels.operators import held_elements

How = Literal["in place", "out", "view", "remembered", "asked"]
CPU = torch.device("cpu")
aten = torch.ops.aten

# In-place operators that change the sizes, strides or storage of their argument.
_RESHAPING = {"resize_", "set_", "as_strided_", "squeeze_", "unsqueeze_", "transpose_", "t_", "resize_as_", "swapaxes_"}
_VIEWS = {
    *("view", "slice", "select", "expand", "transpose", "permute", "unsqueeze", "squeeze", "detach", "alias", "t"),
    *("split", "split_with_sizes", "unbind", "as_strided", "_unsafe_view", "_reshape_alias", "unfold", "diagonal"),
}
# The types of arguments other than tensors and lists.
_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.layout, torch.device, torch.memory_format}


class KnownResults:
    """Call this instead of `func(*args, **kwargs)` in a dispatch mode that was entered after `mode`.

    cuda: convolutions return the layouts of a GPU. Fake ones return those of this machine's CPU, whose instruction set
    decides.
    """

    _results_by_device: ClassVar[dict[bool, dict[Any, list[Any] | None]]] = {True: {}, False: {}}

    def __init__(self, mode: FakeTensorMode, cuda: bool) -> None:
        self.mode, self.cuda = mode, cuda
        self._results = self._results_by_device[cuda]

    def __call__(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the operator returns."""
        how = _how(func)
        if how == "in place":
            return args[0] if func._schema.returns else None
        if how == "out":
            return kwargs[func._schema.arguments[-1].name]
        if how == "view":
            with in_kernel_invocation_manager(self.mode):
                out = func(*args, **kwargs)
                return [self._wrap(part) for part in out] if isinstance(out, (list, tuple)) else self._wrap(out)
        key = key_of(func, args, kwargs) if how == "remembered" else None
        if key is not None and key not in self._results:
            self._results[key] = self._shapes(func, args, func(*args, **kwargs))
        shapes = None if key is None else self._results[key]
        if shapes is None:
            return func(*args, **kwargs)
        made = [None if shape is None else self._make(*shape) for shape in shapes]
        return made[0] if len(func._schema.returns) == 1 else tuple(made)

    def _shapes(self, func: Any, args: tuple[Any, ...], out: Any) -> list[Any] | None:
        """Return shape, strides, dtype and elements held of every result; None if they are no fake tensors."""
        parts = list(out) if isinstance(out, tuple) else [out]
        if not all(part is None or type(part) is FakeTensor for part in parts):
            return None
        is_error = func is aten.mse_loss_backward.default  # whose real gradient is always contiguous
        layout = torch.contiguous_format if is_error else convolution_layout(func, args) if self.cuda else None
        least, shapes = held_elements(func, args), []
        for part in parts:
            stride = None if part is None else part.stride()
            if part is not None and layout is not None and part.dim() >= 4:
                with no_dispatch():
                    stride = torch.empty(tuple(part.shape), device="meta", memory_format=layout).stride()
            shapes.append(None if part is None else (tuple(part.shape), stride, part.dtype, least))
        return shapes

    def _make(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, least: int) -> FakeTensor:
        with no_dispatch():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if least:
                meta = torch.empty(least, dtype=dtype, device="meta").as_strided(shape, stride)
        return FakeTensor(self.mode, meta, CPU)

    def _wrap(self, view: Tensor) -> Tensor:
        return view if isinstance(view, FakeTensor) else FakeTensor(self.mode, view, CPU)


@functools.cache
def _how(func: torch._ops.OpOverload) -> How:
    schema, name = func._schema, func._overloadpacket.__name__
    if func.namespace == "lean" and schema.is_mutable:
        return "in place"
    outs = [argument.is_out for argument in schema.arguments]
    if func.namespace not in ("aten", "lean") or any(outs):
        return "out" if outs[-1:] == [True] and sum(outs) == 1 else "asked"
    if name in _VIEWS:
        return "view"
    if schema.is_mutable:
        writes_first = name.endswith("_") and name not in _RESHAPING and not name.startswith("_foreach")
        return "in place" if writes_first and len(schema.returns) <= 1 else "asked"
    is_new = all(result.alias_info is None and str(result.type) == "Tensor" for result in schema.returns)
    is_pure = bool(schema.returns) and torch.Tag.data_dependent_output not in func.tags
    return "remembered" if is_new and is_pure else "asked"


def key_of(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return a key that determines the metadata of the results; None if an argument prevents that."""
    parts: list[Any] = [func]
    is_complete = _collect(args, parts) and (
        not kwargs or _collect([part for pair in kwargs.items() for part in pair], parts)
    )
    return tuple(parts) if is_complete else None


def _collect(values: Sequence[Any], parts: list[Any]) -> bool:
    parts.append(len(values))
    for value in values:
        kind = type(value)
        if kind is FakeTensor or kind is torch.nn.Parameter:
            parts += (value.shape, value.stride(), value.dtype)
        elif kind in _PLAIN:
            parts += (kind, value)  # with its type, because 1, 1.0 and True are equal
        elif not (isinstance(value, (list, tuple)) and _collect(value, parts)):
            return False
    return True


def is_added_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether autograd, adding up the gradients of a tensor with several uses, overwrites the first of them.

    It does so if nothing else holds that memory, but not with tensors of a subclass, which fake ones are.
    """
    if func is not aten.add.Tensor or kwargs or torch.is_grad_enabled():
        return False
    first, second = args[:2]
    if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
        return False
    storage = first.untyped_storage()
    is_dense = storage.nbytes() == first.numel() * first.element_size()
    return is_dense and torch._C._storage_Use_Count(storage._cdata) <= 2  # one of them is `storage`


def plausible_value(dtype: torch.dtype) -> bool | float | int:
    """Return a value for a fake tensor, which has none: checks such as `isfinite` pass, counts of bad values are 0."""
    if dtype == torch.bool:
        return True
    return 0.0 if dtype.is_floating_point else 0
