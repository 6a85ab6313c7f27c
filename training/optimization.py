"""Weight updates: the optimizers, the learning-rate schedule, gradient clipping and averaged weights."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from runtime.precision import Precision
from runtime.processes import Process
from settings import TrainingSettings
from training.guard import Guard
from training.muon import Muon, is_hidden_kernel

AUTO_LENGTH = 0.05
"""Mean age of the averaged weights with `ema_decay: auto`, as a share of the steps so far."""


def learning_rate_factor(step: int, settings: TrainingSettings, progress: float | None = None) -> float:
    """Return the factor on the learning rate at `step`: linear warm-up, then constant or cosine decay.

    `progress` is the share of the run that has passed, if its time is limited instead of its steps. That may allow far
    fewer steps than `max_steps`: a warm-up of `auto` then takes a twentieth of the time at most, and the decay ends
    with the time even if a warm-up of a given number of steps does not.
    """
    warmed = 20 * progress if progress is not None and settings.warmup_steps == "auto" else 0.0
    is_rising = step < settings.num_warmup_steps and warmed < 1
    risen = max(warmed, (step + 1) / settings.num_warmup_steps) if is_rising else 1.0
    if settings.learning_rate_decay == "none" or (is_rising and progress is None):
        return risen
    if progress is None:
        progress = (step - settings.num_warmup_steps) / max(1, settings.max_steps - settings.num_warmup_steps)
    return min(risen, 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


class Schedule:
    """How far a run has got: in steps or, with `max_hours`, in seconds of training, earlier sessions included."""

    def __init__(self, settings: TrainingSettings) -> None:
        self.settings = settings
        self.seconds = 0.0
        self._resumed_at = time.monotonic()

    def start(self, seconds: float | None = None) -> None:
        """Start the clock at `seconds`, which a resumed run takes from its checkpoint."""
        self.seconds = self.seconds if seconds is None else seconds
        self._resumed_at = time.monotonic() - self.seconds

    def read_clock(self, process: Process) -> None:
        """Take the time of the first process, so that the learning rate is the same in all of them."""
        if self.settings.max_hours is not None:
            self.seconds = process.broadcast(time.monotonic() - self._resumed_at)

    @property
    def progress(self) -> float | None:
        """Return the share of the run's time that has passed; None if its steps are limited instead."""
        return None if self.settings.max_hours is None else self.seconds / (3600 * self.settings.max_hours)

    @property
    def tenths(self) -> int:
        """Return how many tenths of the run's time have passed; 0 if its steps are limited instead."""
        return 0 if self.progress is None else int(10 * self.progress)

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds left of the run's time; None if its steps are limited instead."""
        hours = self.settings.max_hours
        return None if hours is None else max(0.0, 3600 * hours - self.seconds)

    def is_over(self, done: int) -> bool:
        """Return whether the run ends after `done` steps."""
        return done >= self.settings.last_step if self.progress is None else self.progress >= 1

    def factor(self, step: int) -> float:
        """Return the factor on the learning rate at a step."""
        return learning_rate_factor(step, self.settings, self.progress)


class Updater:
    """The optimizers of one network, with everything that happens between backward and the next step."""

    def __init__(
        self,
        name: str,
        network: nn.Module,
        learning_rate: float,
        settings: TrainingSettings,
        precision: Precision,
        schedule: Schedule | None = None,
        uses_muon: bool = False,
    ) -> None:
        self.name = name
        self.settings = settings
        self.schedule = schedule or Schedule(settings)
        self.learning_rate = learning_rate
        self.precision = precision
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        kernels = [p for p in self.parameters if uses_muon and is_hidden_kernel(p)]
        others = [p for p in self.parameters if not (uses_muon and is_hidden_kernel(p))]
        # Fused Adam makes no foreach copies of the gradients and skips updates on the device.
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(others, lr=learning_rate, fused=True)]
        if kernels:
            self.optimizers.append(Muon(kernels, lr=learning_rate))

    def gradient_norm(self, guard: Guard) -> Tensor:
        """Unscale the gradients, have the guard check them, and return their norm."""
        for optimizer in self.optimizers:
            self.precision.scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        guard.check_gradient(self.name, norm)
        return norm

    def update(self, step: int, norm: Tensor, guard: Guard) -> None:
        """Clip the gradients, update the weights unless the guard blocks that, and drop the gradients."""
        if self.settings.max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(self.parameters, self.settings.max_grad_norm, norm)
        # Both optimizers skip the update on the device when this is 1. The scaler's own step would not do: it sees only
        # overflows in this network's gradient.
        is_blocked = guard.blocks_update(norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * self.schedule.factor(step)
            optimizer.found_inf = is_blocked  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of Adam and, under a name of its own, that of Muon."""
        adam, *muon = self.optimizers
        return adam.state_dict() | ({"muon": muon[0].state_dict()} if muon else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the optimizers, also from a run in another memory layout.

        The fused update walks through parameters and states in memory order, so their strides must agree.
        """
        adam, *muon = self.optimizers
        adam.load_state_dict({name: part for name, part in state.items() if name != "muon"})
        for optimizer in muon:
            optimizer.load_state_dict(state["muon"])
        for optimizer in self.optimizers:
            for parameter, states in optimizer.state.items():
                for name, values in states.items():
                    if values.shape == parameter.shape and values.stride() != parameter.stride():
                        states[name] = torch.empty_like(parameter, requires_grad=False).copy_(values)


class AveragedWeights:
    """An exponential moving average (EMA) of a network's parameters.

    With a `decay` of auto, the average grows with the run: the mean age of the weights in it is a twentieth of the
    steps so far (the power function of Karras et al. 2024, section 3.1).
    """

    def __init__(self, network: nn.Module, decay: float | Literal["auto"]) -> None:
        self.decay = decay
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.names = [name for name, p in network.named_parameters() if p.requires_grad]
        self.averages = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def start(self) -> None:
        """Start from the weights that the network has now."""
        torch._foreach_copy_(self.averages, [p.detach() for p in self.parameters])

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the averages towards the weights; faster at first, so that the initial weights fade quickly."""
        if self.decay == "auto":
            # After the first step this is 0, so the initial weights are forgotten at once.
            decay = (1 - 1 / (1 + step)) ** (1 / AUTO_LENGTH - 1)
        else:
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
