"""The base of both training steps: precision, noise, guard, optimizers, averaged weights, and their state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from runtime.files import RunFolder
from runtime.observer import phase
from runtime.precision import Precision, move
from runtime.processes import Process
from runtime.randomness import SampleNoise
from settings import Settings, TrainingSettings
from training.guard import FilesOf, Guard
from training.optimization import AveragedWeights, Schedule, Updater


class TrainingStep(ABC):
    """The networks of a stage with their optimizers; a stage registers its networks and adds its passes."""

    stage: str
    terms: tuple[str, ...]
    best_metric: str
    higher_is_better: bool

    def __init__(
        self, settings: Settings, training: TrainingSettings, process: Process, files_of: FilesOf = None
    ) -> None:
        self.settings, self.training = settings, training
        self.process = process
        self.precision = Precision(settings.device, process.device, process.has_bfloat16)
        self.noise = SampleNoise(settings.seed, process.device)
        self.networks: dict[str, nn.Module] = {}
        self.schedule = Schedule(training)
        self.updaters: dict[str, Updater] = {}
        self.average: AveragedWeights | None = None
        self._files_of = files_of
        self._guard: Guard | None = None
        torch.manual_seed(settings.seed)

    def register(self, name: str, network: nn.Module, learning_rate: float) -> nn.Module:
        """Move a network to the device and give it its optimizers; return it wrapped for distributed training."""
        move(network, self.process.device, self.settings.device.memory_format).train()
        self.networks[name] = network
        # Muon is for the network that the stage trains, not for a discriminator, whose game it would upset.
        uses_muon = name == self.stage and self.training.optimizer == "muon"
        self.updaters[name] = Updater(
            name, network, learning_rate, self.training, self.precision, self.schedule, uses_muon
        )
        if name == self.stage and self.training.ema_decay != 0:
            self.average = AveragedWeights(network, self.training.ema_decay)
        return self.process.wrap(network)

    @property
    def metadata(self) -> dict[str, Any]:
        """Return what is stored with the trained weights besides the settings."""
        return {}

    @abstractmethod
    def next_command(self, run: RunFolder) -> str:
        """Return what users run after the stage is finished."""

    @property
    @abstractmethod
    def networks_on_device(self) -> dict[str, nn.Module]:
        """Return all networks of the step, trained and frozen, by name."""

    @property
    def tensors_on_device(self) -> Sequence[Tensor]:
        """Return what else stays on the device from step to step."""
        return ()

    @property
    def network(self) -> nn.Module:
        """Return the main network of the stage."""
        return self.networks[self.stage]

    def inference_weights(self) -> AbstractContextManager[None]:
        """Give the main network its averaged weights inside the block, if there are any."""
        return nullcontext() if self.average is None else self.average.swapped_in()

    @property
    def samples_per_update(self) -> int:
        """Return the number of volumes per update over all processes."""
        return self.training.samples_per_rank * self.process.world_size

    @property
    def guard(self) -> Guard:
        """Return the guard of all registered networks, built on first use."""
        if self._guard is None:
            names = [*self.terms, *(f"{name} gradient" for name in self.updaters)]
            skips = self.precision.skips_overflows
            self._guard = Guard(self.process, names, skips, self._files_of)
        return self._guard

    def __call__(self, micro_batches: Sequence[Any], step: int) -> dict[str, Tensor]:
        """Make one update (steps count from 0) and return its loss terms and gradient norms, still on the device."""
        return self.backward(micro_batches, step) | self.update(step)

    @abstractmethod
    def backward(self, micro_batches: Sequence[Any], step: int) -> dict[str, Tensor]:
        """Leave the update's gradients on the networks and return the loss terms."""

    @abstractmethod
    def example_batch(self, batch_size: int) -> Any:
        """Return a micro-batch of zeros in the shape that training uses."""

    def updated_networks(self, step: int) -> list[str]:
        """Return the names of the networks that a step updates."""
        return list(self.updaters)

    def accumulate(
        self, micro_batches: Sequence[Any], step: int, run: Callable[[Any, float, bool], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Call `run` with each micro-batch, its share of the update and whether it is the last; return mean terms."""
        self.guard.start(step)
        share = 1 / len(micro_batches)
        totals: dict[str, Tensor] = {}
        for number, batch in enumerate(micro_batches):
            terms = run(batch, share, number == len(micro_batches) - 1)
            self.guard.check_terms(number, terms)
            for name, value in terms.items():
                totals[name] = totals[name] + share * value if name in totals else share * value
        return totals

    def update(self, step: int) -> dict[str, Tensor]:
        """Update the networks that take part in a step and return their gradient norms."""
        with phase("optimizer"):
            # The guard checks every gradient before any network is updated.
            norms = {name: self.updaters[name].gradient_norm(self.guard) for name in self.updated_networks(step)}
            for name, norm in norms.items():
                self.updaters[name].update(step, norm, self.guard)
            self.precision.scaler.update()
            if self.average is not None:
                self.average.update(step)
        self.guard.finish()
        return {f"{name}_gradient_norm": norm for name, norm in norms.items()}

    def learning_rates(self, step: int) -> dict[str, float]:
        """Return the learning rate of each network that a step has just updated; read on the host."""
        groups = {name: self.updaters[name].optimizers[0].param_groups[0] for name in self.updated_networks(step)}
        return {f"{name}_learning_rate": float(group["lr"]) for name, group in groups.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs."""
        timed = {} if self.training.max_hours is None else {"seconds": self.schedule.seconds}
        return timed | {
            "networks": {name: network.state_dict() for name, network in self.networks.items()},
            "optimizers": {name: updater.state_dict() for name, updater in self.updaters.items()},
            "precision": self.precision.state_dict(),
            "average": self.average.state_dict() if self.average is not None else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, network in self.networks.items():
            network.load_state_dict(state["networks"][name])
        for name, updater in self.updaters.items():
            updater.load_state_dict(state["optimizers"][name])
        self.precision.load_state_dict(state["precision"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.schedule.start(state.get("seconds", 0.0))
