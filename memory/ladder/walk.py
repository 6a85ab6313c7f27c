"""Predict the rungs below a config until a memory budget is met, and choose one. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from memory.kernels.gpus import Gpu, chosen_gpu
from memory.ladder.rungs import Order, Rung, build_rungs
from memory.predict.prediction import Prediction, Predictor, Stage
from settings import Settings, look_up

NUM_WORKERS = 2
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class PredictedRung:
    """A rung, its prediction, and whether it fits the budget; one row of the table."""

    rung: Rung
    prediction: Prediction
    fits: bool
    gpu: Gpu

    @property
    def seconds(self) -> float:
        """Return the least time of an update."""
        return self.prediction.seconds_per_step(self.gpu)

    def fits_with_margin(self, budget_bytes: int) -> bool:
        """Return whether the rung fits the budget even if it needs its whole margin."""
        return self.prediction.required_with_margin <= budget_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        p, rung = self.prediction, self.rung
        names = [
            *("tier", "peak_allocated_bytes", "peak_reserved_bytes", "required_bytes", "host_bytes", "phase"),
            *("traffic_bytes", "work", "run_peaks", "max_steps", "margin"),
        ]
        return {
            "name": rung.name,
            "changes": rung.changes,
            "all_changes": rung.all_changes,
            "same_mathematics": rung.same_mathematics,
            "lowers": rung.lowers,
            **{name: getattr(p, name) for name in names},
            "flops": p.flops["total"],
            "seconds_per_step": self.seconds if p.is_for_gpu else None,
            "hours": p.hours(self.gpu) if p.is_for_gpu else None,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Ladder:
    """All rungs that were predicted, in order."""

    stage: Stage
    order: Order
    budget_bytes: int
    rungs: tuple[PredictedRung, ...]
    gpu: Gpu

    @property
    def first(self) -> PredictedRung | None:
        """Return the first rung that fits."""
        return next((rung for rung in self.rungs if rung.fits), None)

    @property
    def fastest(self) -> PredictedRung | None:
        """Return the rung that fits and takes the least time; prefer those with the same mathematics."""
        return _least_time([rung for rung in self.rungs if rung.fits])

    @property
    def recommended(self) -> PredictedRung | None:
        """Return the fastest rung that fits with its margin, else the fastest that fits; `--write-config` writes it."""
        roomy = [row for row in self.rungs if row.fits_with_margin(self.budget_bytes) and row.rung.same_mathematics]
        return _least_time(roomy) or self.fastest

    @property
    def without_effect(self) -> list[PredictedRung]:
        """Return the rungs with the same peak as the rung above, because they lower memory that is not in the peak."""
        return [
            rung
            for above, rung in pairwise(self.rungs)
            if rung.prediction.peak_allocated_bytes == above.prediction.peak_allocated_bytes
        ]

    @property
    def smallest(self) -> PredictedRung:
        """Return the rung that needs the least memory."""
        return min(self.rungs, key=lambda rung: rung.prediction.required_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {
            "stage": self.stage,
            "order": self.order,
            "budget_bytes": self.budget_bytes,
            "gpu": self.gpu.name if self.rungs[0].prediction.is_for_gpu else None,
            "rungs": [rung.to_json() for rung in self.rungs],
            "first": self.first.rung.name if self.first else None,
            "fastest": self.fastest.rung.name if self.fastest else None,
            "recommended": self.recommended.rung.name if self.recommended else None,
        }


def _least_time(rungs: list[PredictedRung]) -> PredictedRung | None:
    return min(rungs, key=lambda rung: (not rung.rung.same_mathematics, rung.seconds), default=None)


def walk(
    settings: Settings,
    stage: Stage,
    budget_bytes: int,
    order: Order = "lossless-first",
    progress: Progress | None = None,
    correct: Callable[[Prediction], Prediction] = lambda prediction: prediction,
    gpu: Gpu | None = None,
) -> Ladder:
    """Predict the rungs, two at a time, until the remaining ones cannot change the choice.

    Thinner slabs are skipped once thicker ones fit, and changes to the mathematics once any rung fits without one.
    correct: scales a prediction by earlier measurements on this machine. gpu: the card whose time counts.
    """
    card = gpu or chosen_gpu(None)
    rungs = build_rungs(settings, stage, order)
    predicted: list[PredictedRung] = []
    waiting: list[tuple[Rung, Future[Prediction]]] = []

    def collect() -> None:
        rung, future = waiting.pop(0)
        prediction = correct(future.result())
        predicted.append(PredictedRung(rung, prediction, prediction.required_bytes <= budget_bytes, card))
        if progress is not None:
            progress(len(predicted), len(rungs), rung.name)

    with Predictor(NUM_WORKERS, card.without_triton) as predictor:
        for rung in _still_wanted(rungs, predicted, order):
            waiting.append((rung, predictor.submit(rung.settings, stage)))
            if len(waiting) == NUM_WORKERS:
                collect()
        while waiting:
            collect()
    return Ladder(stage, order, budget_bytes, tuple(predicted), card)


def _still_wanted(rungs: list[Rung], predicted: list[PredictedRung], order: Order) -> Iterator[Rung]:
    """Yield rungs while they can change the choice; `predicted` grows between them.

    After a skipped rung, build on the last rung that was yielded, so that each rung differs from the one above it only
    by its own changes.
    """
    above: Rung | None = None
    for rung in rungs:
        fitting = [other.rung for other in predicted if other.fits]
        if fitting and (order == "guide" or not rung.same_mathematics):
            return
        if rung.family and any(other.family == rung.family for other in fitting):
            continue
        above = rung if above is None else _on_top_of(above, rung)
        yield above


def _on_top_of(above: Rung, rung: Rung) -> Rung:
    changes = {key: value for key, value in rung.changes.items() if look_up(above.settings, key) != value}
    everything = {**above.all_changes, **changes}
    return replace(rung, changes=changes, all_changes=everything, settings=above.settings.with_overrides(changes))


def next_same_mathematics_rung(settings: Settings, stage: Stage) -> Rung | None:
    """Return the next rung of the default order that keeps the mathematics; None if none is left."""
    rungs = build_rungs(settings, stage, "lossless-first")
    return next((rung for rung in rungs[1:] if rung.same_mathematics), None)
