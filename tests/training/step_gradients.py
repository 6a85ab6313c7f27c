"""The gradients that a training step leaves on its networks."""

from __future__ import annotations

import torch

from training.step import TrainingStep


def gradients(step: TrainingStep) -> dict[str, torch.Tensor]:
    """Return a copy of every gradient by network and parameter."""
    return {
        f"{network}.{name}": parameter.grad.clone()
        for network, module in step.networks.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
