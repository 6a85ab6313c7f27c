"""Where networks live."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

Network = TypeVar("Network", bound=nn.Module)


def move(network: Network, device: torch.device) -> Network:
    """Move a network to `device` in place, unless it is already there, and return it.

    `Module.to` replaces every parameter even if none has to move. Memory prediction builds networks from fake
    parameters, and torch cannot replace those.
    """
    if any(tensor.device != device for tensor in (*network.parameters(), *network.buffers())):
        network.to(device)
    return network
