"""Finds the most capable network that fits, with few predictions. Never imports torch."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from memory.kernels.gpus import Gpu
from memory.kernels.timing import time_range
from memory.predict.prediction import Prediction, Stage
from settings import Settings

PRUNE_ABOVE = 1.04
"""A candidate whose estimate exceeds the limit by this factor is not predicted any more."""

STOP_ABOVE = 0.95
"""An item that needs this part of the limit is taken, even if a little more might fit."""


Item = TypeVar("Item")


class StepPredictor(Protocol):
    """Whatever answers what a step of a config needs."""

    def submit(self, settings: Settings, stage: Stage) -> Future[Prediction]:
        """Start a prediction and return immediately."""


@dataclass(frozen=True)
class Assessment:
    """What a stage of a config needs, beside the budget; `max_hours`: how long the user lets it train, if limited."""

    prediction: Prediction
    budget_bytes: int
    gpu: Gpu
    max_hours: float | None = None

    @property
    def fits(self) -> bool:
        """Return whether the run fits the budget with its margin."""
        return self.prediction.required_with_margin <= self.budget_bytes

    @property
    def share(self) -> float:
        """Return the part of the budget that the run needs without its margin."""
        return self.prediction.required_bytes / self.budget_bytes

    @property
    def hours(self) -> float:
        """Return the predicted time of the stage; `max_hours` if the user set it."""
        return self.prediction.hours(self.gpu) if self.max_hours is None else self.max_hours

    @property
    def longest_hours(self) -> float:
        """Return the upper end of the predicted hours; `max_hours` if the user set it."""
        return self.hours if self.max_hours is not None else time_range(self.hours, self.prediction.is_time_measured)[1]


class PredictionCache:
    """Predicts configs, each once; several threads may ask at the same time."""

    def __init__(
        self,
        predictor: StepPredictor,
        budget_bytes: int,
        gpu: Gpu,
        correct: Callable[[Prediction], Prediction] = lambda prediction: prediction,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        self.budget_bytes, self.gpu = budget_bytes, gpu
        self._predictor, self._correct, self._progress = predictor, correct, progress
        self._futures: dict[tuple[str, str], Future[Prediction]] = {}
        self._lock = threading.Lock()

    def start(self, settings: Settings, stage: Stage) -> Future[Prediction]:
        """Start a prediction unless it was asked for before."""
        key = (stage, _decisive(settings, stage))
        with self._lock:
            if key not in self._futures:
                self._futures[key] = self._predictor.submit(settings, stage)
                self._progress()
            return self._futures[key]

    def assess(self, settings: Settings, stage: Stage, num_volumes: tuple[int, int] = (0, 0)) -> Assessment:
        """Return what a stage of a config needs; `num_volumes`: how many train and how many are held out."""
        training = settings.training_of(stage)
        # Candidates that differ only in these share a prediction.
        own = replace(
            self._correct(self.start(settings, stage).result()),
            max_steps=training.max_steps,
            num_validations=math.ceil(training.max_steps / training.validate_every),
            num_volumes=list(num_volumes),
        )
        return Assessment(own, self.budget_bytes, self.gpu, training.max_hours)


def _decisive(settings: Settings, stage: Stage) -> str:
    """Return what decides the memory and the time of an update, as text."""
    values = settings.model_dump(mode="json", exclude={"name", "seed"})
    values["data"] = {name: values["data"][name] for name in ("voxel_size", "patch_size")}
    if stage == "autoencoder":
        del values["ldm"]
    elif not settings.ldm.training.pixel_loss.weight:
        values["autoencoder"]["training"] = {"slab_rows": settings.autoencoder.training.slab_rows}
        del values["data"]["patch_size"]
    for section in ("autoencoder", "ldm"):
        training = values.get(section, {}).get("training", {})
        for name in [name for name in training if name.endswith(("_steps", "_step", "_every", "learning_rate"))]:
            if name != "gradient_accumulation_steps":
                del training[name]
    return json.dumps(values, sort_keys=True)


def last_that_fits(
    items: Sequence[Item],
    cost: Callable[[Item], float],
    need: Callable[[Item], float],
    limit: float,
    start: int = 0,
    fixed: float = 0.0,
) -> int:
    """Return the position of the last item whose need is within the limit, -1 if none is.

    Items are in the order of their needs, which grow about linearly with their costs. `need` is slow, so each call aims
    where the limit should lie by the calls before, and an item that nearly uses the limit ends the search. fixed: what
    an item without cost would need.
    """
    known: dict[int, float] = {}
    low, high = -1, len(items)
    position = start
    while high - low > 1:
        position = min(max(position, low + 1), high - 1)
        known[position] = need(items[position])
        low, high = (position, high) if known[position] <= limit else (low, position)
        if low >= 0 and known[low] >= STOP_ABOVE * limit:
            break
        estimate = _line(known, [cost(item) for item in items], fixed)
        if low >= 0 and len(known) > 1 and high - low > 1 and estimate(low + 1) > PRUNE_ABOVE * limit:
            break
        fitting = [place for place in range(low + 1, high) if estimate(place) <= limit]
        position = fitting[-1] if fitting else low + 1
    return low


def _line(known: dict[int, float], costs: Sequence[float], fixed: float) -> Callable[[int], float]:
    """Return the line through the last two known needs, or through the only one and `fixed`."""
    (last, value), *others = reversed(known.items())
    for other, earlier in others:
        if costs[other] != costs[last]:
            slope = (value - earlier) / (costs[last] - costs[other])
            if slope > 0:
                return lambda place: value + slope * (costs[place] - costs[last])
    slope = (value - fixed) / costs[last] if costs[last] else 0.0
    return lambda place: value + slope * (costs[place] - costs[last])
