"""Moves networks to their device and memory layout."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch
from torch import nn

from runtime.observer import memory_observer

Network = TypeVar("Network", bound=nn.Module)
MemoryFormat = Literal["auto", "contiguous", "channels_last"]

_LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last_3d}


def move(network: Network, device: torch.device, memory_format: MemoryFormat | None = None) -> Network:
    """Move a network to `device` in place, unless it is already there, and return it.

    A memory format, which only our own networks take, also sets its layout; `auto` is the fastest one.
    `Module.to` replaces every parameter even if none has to move. Memory prediction builds networks from fake
    parameters, and torch cannot replace those.
    """
    if any(tensor.device != device for tensor in (*network.parameters(), *network.buffers())):
        network.to(device)
    if memory_format is not None:
        lay_out(network, memory_format)
    return network


def lay_out(network: Any, memory_format: MemoryFormat) -> None:
    """Bring the weights of one of our networks into a memory format, on the device where they are."""
    before = list(network.parameters())
    network.set_layout(network.fastest_layout if memory_format == "auto" else _LAYOUTS[memory_format])
    copies = [new for old, new in zip(before, network.parameters(), strict=True) if new is not old]
    memory_observer().weights_copied(copies)
