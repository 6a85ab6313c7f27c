"""Weight updates: the optimizer, the learning-rate schedule, gradient clipping and averaged weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runtime.precision import Precision
from settings import TrainingSettings
from training.guard import Guard


def build_optimizer(network: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """Return fused AdamW, which makes no foreach copies of the gradients and skips updates on the device."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay, fused=True)


def learning_rate_factor(step: int, settings: TrainingSettings) -> float:
    """Return the factor on the learning rate at `step`: linear warm-up, then constant or cosine decay."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.learning_rate_decay == "none":
        return 1.0
    progress = (step - settings.warmup_steps) / max(1, settings.max_steps - settings.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Updater:
    """The optimizer of one network, with everything that happens between backward and the next step."""

    def __init__(
        self, name: str, network: nn.Module, learning_rate: float, settings: TrainingSettings, precision: Precision
    ) -> None:
        self.name = name
        self.settings = settings
        self.learning_rate = learning_rate
        self.precision = precision
        self.optimizer = build_optimizer(network, learning_rate, settings.weight_decay)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def gradient_norm(self, guard: Guard) -> Tensor:
        """Unscale the gradients, have the guard check them, and return their norm."""
        self.precision.scaler.unscale_(self.optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        guard.check_gradient(self.name, norm)
        return norm

    def move(self, step: int, norm: Tensor, guard: Guard) -> None:
        """Clip the gradients, move the weights unless the guard blocks that, and drop the gradients."""
        if self.settings.max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(self.parameters, self.settings.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * learning_rate_factor(step, self.settings)
        # Fused AdamW skips the update on the device when this is 1. The scaler's own step would not do: it sees only
        # overflows in this network's gradient.
        self.optimizer.found_inf = guard.holds(norm)  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the optimizer, also from a run in another memory layout.

        The fused update walks through parameters and states in the order of memory, so their strides must agree.
        """
        self.optimizer.load_state_dict(state)
        for parameter, states in self.optimizer.state.items():
            for name, values in states.items():
                if values.shape == parameter.shape and values.stride() != parameter.stride():
                    states[name] = torch.empty_like(parameter, requires_grad=False).copy_(values)

    @property
    def current_rate(self) -> float:
        """Return the learning rate of the last update."""
        return float(self.optimizer.param_groups[0]["lr"])


class AveragedWeights:
    """An exponential moving average (EMA) of a network's parameters."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.names = [name for name, p in network.named_parameters() if p.requires_grad]
        self.averages = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the averages towards the weights; faster at first, so that the initial weights fade quickly."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.averages, [p.detach() for p in self.parameters], 1 - decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the network the averaged weights inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, average in zip(self.parameters, self.averages, strict=True):
            parameter.data, average.data = average.data, parameter.data

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by parameter name."""
        return dict(zip(self.names, self.averages, strict=True))

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the averages."""
        for name, average in zip(self.names, self.averages, strict=True):
            average.copy_(state[name])
