"""Gradient checkpointing through one function, with the option to keep the checkpoints' inputs in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from models.lean.rows import Copies, arrive
from runtime.observer import memory_observer

MIN_OFFLOAD_BYTES = 1 << 20
"""Smaller tensors stay on the device: copying them costs more time than the memory is worth."""


def empty_on_host(tensor: Tensor) -> Tensor:
    """Return an uninitialised host tensor of the shape, strides and dtype of `tensor`, pinned for copies from a GPU."""
    with memory_observer().host_allocation():
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)


@dataclass(eq=False)
class Offloaded:
    """A saved tensor that stays in host memory until backward needs it."""

    host: Tensor
    device: torch.device
    fetched: tuple[Tensor, torch.Event | None] | None = None


class HostOffload(AbstractContextManager[None]):
    """Saved-tensor hooks that move large activations to the host and bring them back in backward.

    At most one copy is in flight in each direction, because activations are 128 MiB and larger and a deeper queue would
    use up the memory that offloading saves. Use one object per pass through a network and enter it around every
    checkpoint.
    """

    def __init__(self) -> None:
        self._stack: list[Offloaded] = []
        self._copies = Copies()
        self._hooks: list[torch.autograd.graph.saved_tensors_hooks] = []

    def __enter__(self) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        hooks.__enter__()
        self._hooks.append(hooks)

    def __exit__(self, *exc_info: Any) -> None:
        self._hooks.pop().__exit__(*exc_info)

    def pack(self, tensor: Tensor) -> Tensor | Offloaded:
        """Start to move a tensor to the host, unless it is small or a parameter; return what `unpack` takes."""
        small = tensor.numel() * tensor.element_size() < MIN_OFFLOAD_BYTES
        if small or isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
            return tensor
        tensor = tensor.detach()
        entry = Offloaded(empty_on_host(tensor), tensor.device)
        self._copies.leave(entry.host, tensor, tensor)
        self._stack.append(entry)
        return entry

    def unpack(self, packed: Tensor | Offloaded) -> Tensor:
        """Return the tensor on its device, and start to fetch the one that was packed before it."""
        if isinstance(packed, Tensor):
            return packed
        self._copies.finish()
        tensor = arrive(*(packed.fetched or self._fetch(packed)))
        packed.fetched = None
        if packed in self._stack:
            position = self._stack.index(packed)
            del self._stack[position:]
            if position > 0:
                previous = self._stack[position - 1]
                previous.fetched = self._fetch(previous)
        return tensor

    def _fetch(self, entry: Offloaded) -> tuple[Tensor, torch.Event | None]:
        tensor = torch.empty_like(entry.host, device=entry.device, pin_memory=False)
        return tensor, self._copies.start(tensor, entry.host, entry.device)


@contextmanager
def recomputed(volume: Tensor, module: nn.Module, source: Tensor) -> Iterator[None]:
    """Have autograd keep, in place of `volume`, how to compute it again: as the output of `module` for `source`."""
    again = functools.partial(_computed_again, module, source.detach(), _Autocast.at(volume))
    # Autograd keeps `pack`, which therefore must not keep the volume.
    storage, shape = volume.untyped_storage()._cdata, volume.shape

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        if tensor.untyped_storage()._cdata != storage:
            return tensor
        assert tensor.shape == shape, "only the whole volume can be computed again"
        return again

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield


def _unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


class _Autocast(NamedTuple):
    """Autocast as it was in forward; backward runs without it."""

    device: str
    dtype: torch.dtype
    enabled: bool

    @classmethod
    def at(cls, tensor: Tensor) -> _Autocast | None:
        """Return the state for the device of a tensor; None if the device has no autocast."""
        device = tensor.device.type
        if not torch.amp.is_autocast_available(device):
            return None
        return cls(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))


def _in(autocast: _Autocast | None) -> AbstractContextManager[Any]:
    if autocast is None or not (autocast.enabled or torch.is_autocast_enabled(autocast.device)):
        return nullcontext()
    return torch.autocast(autocast.device, dtype=autocast.dtype, enabled=autocast.enabled)


def _computed_again(module: nn.Module, source: Tensor, autocast: _Autocast | None) -> Tensor:
    with torch.no_grad(), _in(autocast):
        return module(source)


class _Inputs(torch.autograd.Function):
    """Keeps the inputs of a checkpoint as autograd keeps any saved tensor, so that the hooks in force see them.

    The first argument requires gradients, so that there is a node even if no input does.
    """

    @staticmethod
    def forward(ctx: Any, flag: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return flag.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise AssertionError("nothing is computed from what this returns")


class _Enough(Exception):  # noqa: N818
    """Backward has what it needs, so the rest of a forward need not be computed again."""


class _Checkpoint:
    """The saved tensors of one call, which keep nothing and are computed again, all at once, when backward needs one.

    torch's own checkpoint does the same for any program. It takes the host three times as long, which is longer than
    the GPU takes for a small block: it also serves nested graphs, compilers and programs that change between calls.
    """

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...], is_random: bool) -> None:
        self._run, self._is_tensor = run, [isinstance(arg, Tensor) for arg in args]
        self._others = [arg for arg in args if not isinstance(arg, Tensor)]
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        self._autocast = _Autocast.at(tensors[0]) if tensors else None
        self._inputs: Any = _Inputs.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn
        self._random = (torch.get_rng_state(), *get_device_states(*tensors)) if is_random else None
        self._number = 0
        self._outputs: dict[int, int] = {}
        self._views: list[tuple[Any, ...]] = []
        self._found: dict[int, Tensor] = {}

    def first(self, *args: Any) -> Any:
        """Return the result of the call; what it saves for backward is replaced by its number."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return self._run(*args)

    def after(self, then: Callable[..., Any], *outputs: Tensor) -> Any:
        """Return what `then` makes of all outputs of `first`; it saves anything but them as it is."""
        self._outputs = {part.untyped_storage()._cdata: number for number, part in enumerate(outputs)}
        with torch.autograd.graph.saved_tensors_hooks(self._pack_view, self._unpack):
            return then(*outputs)

    def _pack(self, tensor: Tensor) -> int:
        self._number += 1
        return self._number - 1

    def _pack_view(self, tensor: Tensor) -> Tensor | int:
        output = self._outputs.get(tensor.untyped_storage()._cdata)
        if output is None:
            return tensor.detach()  # with its graph, a result would keep the operator that keeps it
        self._views.append((output, tensor.shape, tensor.stride(), tensor.storage_offset()))
        return -len(self._views)

    def _unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if packed not in self._found:
            self._compute_again()
        return self._found.pop(packed)

    def _compute_again(self) -> None:
        tensors, others = iter(self._inputs.saved_tensors), iter(self._others)
        args = [next(tensors if is_tensor else others) for is_tensor in self._is_tensor]
        saved: list[Tensor] = []
        outputs: Sequence[Tensor] = ()

        def collect(tensor: Tensor) -> None:
            saved.append(tensor.detach())
            if len(saved) == self._number and not self._views:
                raise _Enough

        forked = nullcontext() if self._random is None else torch.random.fork_rng(self._random[1])
        hooks = torch.autograd.graph.saved_tensors_hooks(collect, _never)
        with torch.enable_grad(), forked, _in(self._autocast), hooks, suppress(_Enough):
            if self._random is not None:
                of_cpu, devices, of_devices = self._random
                torch.set_rng_state(of_cpu)
                set_device_states(devices, of_devices)
            outputs = self._run(*args)
        assert len(saved) == self._number, "a checkpoint computed something else than the first time"
        self._found = dict(enumerate(saved))
        for number, (output, *view) in enumerate(self._views, start=1):
            self._found[-number] = outputs[output].detach().as_strided(*view)


def _never(packed: Any) -> Tensor:
    raise AssertionError("no gradients pass through what is computed again")


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_with_rates: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


def draws_random_numbers(module: Callable[..., Any]) -> bool:
    """Return whether `module` may use random numbers, so that a checkpoint must restore the generator's state."""
    if not isinstance(module, nn.Module):
        return True
    parts = _with_rates.get(module)
    if parts is None:
        found = [part for part in module.modules() if isinstance(part, _DROPOUTS) or hasattr(part, "dropout_rate")]
        parts = _with_rates[module] = found
    rates: list[Any] = [part.p if isinstance(part, _DROPOUTS) else part.dropout_rate for part in parts]
    return any(rate > 0 for rate in rates)


def gradient_checkpoint_forward(
    module: Callable[..., Any],
    *args: Any,
    use_gradient_checkpointing: bool,
    use_gradient_checkpointing_offload: bool | HostOffload = False,
    keep: AbstractContextManager[None] | None = None,
    **kwargs: Any,
) -> Any:
    """Call `module(*args, **kwargs)` and, if asked to, recompute its activations in backward.

    Offloading implies checkpointing and keeps the tensor arguments in host memory; pass a `HostOffload` to share its
    queue between the blocks of one pass. `keep` holds other saved-tensor hooks, which decide how the arguments are kept
    in place of an offload. Under `no_grad` and for a module in eval mode this is a plain call. Frozen
    modules are checkpointed too, because gradients that pass through them need their activations. A module with
    `keeps_attention` is called in three parts: what it projects is recomputed, what it attends to is kept.
    """
    wanted = use_gradient_checkpointing or bool(use_gradient_checkpointing_offload)
    if not (wanted and torch.is_grad_enabled() and getattr(module, "training", True)):
        return module(*args, **kwargs)
    offload: AbstractContextManager[None] = keep or nullcontext()
    if use_gradient_checkpointing_offload and keep is None:
        own = use_gradient_checkpointing_offload is True
        offload = HostOffload() if own else use_gradient_checkpointing_offload  # type: ignore[assignment]
    # Saved-tensor hooks see positional arguments only, so keyword arguments are passed as positional ones.
    names, num_args = list(kwargs), len(args)

    def run(*values: Any) -> Any:
        return module(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

    values: tuple[Any, ...] = (*args, *kwargs.values())
    if not getattr(module, "keeps_attention", False):
        with offload:
            checkpoint = _Checkpoint(run if kwargs else module, values, is_random=draws_random_numbers(module))
        return checkpoint.first(*values)
    block: Any = module
    with offload:
        checkpoint = _Checkpoint(block.project, values, is_random=False)
    return block.finish(*values, checkpoint.after(block.attend, *checkpoint.first(*values)))
