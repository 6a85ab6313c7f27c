"""Gradient checkpointing through one function, with the option to keep the checkpoints' inputs in host memory."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models.lean import native
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
    copied: torch.Event | None
    fetched: Tensor | None = field(default=None)


class HostOffload(AbstractContextManager[None]):
    """Saved-tensor hooks that move large activations to the host and bring them back in backward.

    At most one copy is in flight in each direction, because activations are 128 MiB and larger and a deeper queue would
    use up the memory that offloading saves. Use one object per pass through a network and enter it around every
    checkpoint.
    """

    def __init__(self) -> None:
        self._stack: list[Offloaded] = []
        self._leaving: deque[tuple[Tensor, torch.Event | None]] = deque()
        self._stream: torch.cuda.Stream | None = None
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
        host = empty_on_host(tensor)
        entry = Offloaded(host, tensor.device, self._copy(host, tensor, wait_for=None))
        self._stack.append(entry)
        self._leaving.append((tensor, entry.copied))
        if len(self._leaving) > 1:
            self._release(*self._leaving.popleft())
        return entry

    def unpack(self, packed: Tensor | Offloaded) -> Tensor:
        """Return the tensor on its device, and start to fetch the one that was packed before it."""
        if isinstance(packed, Tensor):
            return packed
        while self._leaving:
            self._release(*self._leaving.popleft())
        tensor = self._fetch(packed)
        if packed in self._stack:
            position = self._stack.index(packed)
            del self._stack[position:]
            if position > 0:
                previous = self._stack[position - 1]
                previous.fetched = self._start_fetch(previous)
        return tensor

    def _copy(self, target: Tensor, source: Tensor, wait_for: torch.Event | None) -> torch.Event | None:
        """Copy on a second CUDA stream and return the event at its end; on other devices, copy synchronously."""
        device = source.device if source.is_cuda else target.device
        if device.type != "cuda":
            target.copy_(source)
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            if wait_for is not None:
                self._stream.wait_event(wait_for)
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def _release(self, tensor: Tensor, copied: torch.Event | None) -> None:
        """Make the compute stream wait for the copy, so that the memory of `tensor` can be reused safely."""
        if copied is not None:
            torch.cuda.current_stream(tensor.device).wait_event(copied)

    def _start_fetch(self, entry: Offloaded) -> Tensor:
        tensor = torch.empty_like(entry.host, device=entry.device, pin_memory=False)
        entry.copied = self._copy(tensor, entry.host, wait_for=entry.copied)
        return tensor

    def _fetch(self, entry: Offloaded) -> Tensor:
        tensor = entry.fetched if entry.fetched is not None else self._start_fetch(entry)
        entry.fetched = None
        if entry.copied is not None:
            torch.cuda.current_stream(entry.device).wait_event(entry.copied)
        return tensor


@contextmanager
def recomputed(volume: Tensor, module: nn.Module, source: Tensor) -> Iterator[None]:
    """Have autograd keep, in place of `volume`, how to compute it again: as the output of `module` for `source`."""
    device = volume.device.type
    autocast = None
    if torch.amp.is_autocast_available(device):
        autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    again = functools.partial(_computed_again, module, source.detach(), autocast)
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


def _computed_again(module: nn.Module, source: Tensor, autocast: tuple[str, torch.dtype, bool] | None) -> Tensor:
    if autocast is None:
        with torch.no_grad():
            return module(source)
    device, dtype, enabled = autocast
    with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
        return module(source)


def _policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in native.ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def draws_random_numbers(module: Callable[..., Any]) -> bool:
    """Return whether `module` may use random numbers, so that a checkpoint must restore the generator's state."""
    if not isinstance(module, nn.Module):
        return True
    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    rates = [part.p if isinstance(part, dropouts) else getattr(part, "dropout_rate", 0.0) for part in module.modules()]
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
    `keeps_attention` keeps the results of attention and recomputes everything else.
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

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws_random_numbers(module)}
    if getattr(module, "keeps_attention", False):
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    with offload:
        return checkpoint(run, *args, *kwargs.values(), **options)
