"""Walk the rungs from a config towards a budget and say which one to take. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from memory.ladder.rungs import Order, Rung, build_rungs, look_up
from memory.predict.prediction import GIB, Prediction, Predictor, Stage
from settings import Settings, dump_yaml, known_keys

NUM_WORKERS = 2
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Step:
    """A rung with its prediction and whether the budget holds it."""

    rung: Rung
    prediction: Prediction
    fits: bool
    relative_flops: float

    @property
    def margin_bytes(self) -> int:
        """Return what steps of this tier may need beyond their prediction; nothing once a step was measured."""
        if self.prediction.correction_source:
            return 0
        return round(self.prediction.margin * self.prediction.peak_reserved_bytes)

    def fits_with_margin(self, budget_bytes: int) -> bool:
        """Return whether the budget also holds the margin."""
        return self.prediction.required_bytes + self.margin_bytes <= budget_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {
            "name": self.rung.name,
            "changes": self.rung.changes,
            "all_changes": self.rung.all_changes,
            "same_mathematics": self.rung.same_mathematics,
            "lowers": self.rung.lowers,
            "tier": self.prediction.tier,
            "peak_allocated_bytes": self.prediction.peak_allocated_bytes,
            "peak_reserved_bytes": self.prediction.peak_reserved_bytes,
            "required_bytes": self.prediction.required_bytes,
            "host_bytes": self.prediction.host_bytes,
            "phase": self.prediction.phase,
            "flops": self.prediction.flops["total"],
            "relative_flops": round(self.relative_flops, 3),
            "margin": self.prediction.margin,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Ladder:
    """All rungs that were looked at, in order."""

    stage: Stage
    order: Order
    budget_bytes: int
    steps: tuple[Step, ...]

    @property
    def first(self) -> Step | None:
        """Return the first rung that fits."""
        return next((step for step in self.steps if step.fits), None)

    @property
    def fastest(self) -> Step | None:
        """Return the rung that fits with the least compute; the same mathematics before any other."""
        return _least_compute([step for step in self.steps if step.fits])

    @property
    def recommended(self) -> Step | None:
        """Return what `--write-config` writes: the fastest that fits with its margin, else the fastest that fits."""
        roomy = [step for step in self.steps if step.fits_with_margin(self.budget_bytes) and step.rung.same_mathematics]
        return _least_compute(roomy) or self.fastest

    @property
    def without_effect(self) -> list[Step]:
        """Return the rungs whose peak is that of the rung above them: what they lower does not hold it."""
        peaks = [step.prediction.peak_allocated_bytes for step in self.steps]
        return [step for step, above, peak in zip(self.steps[1:], peaks, peaks[1:], strict=False) if peak == above]

    @property
    def smallest(self) -> Step:
        """Return the rung with the least memory."""
        return min(self.steps, key=lambda step: step.prediction.required_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {
            "stage": self.stage,
            "order": self.order,
            "budget_bytes": self.budget_bytes,
            "rungs": [step.to_json() for step in self.steps],
            "first": self.first.rung.name if self.first else None,
            "fastest": self.fastest.rung.name if self.fastest else None,
            "recommended": self.recommended.rung.name if self.recommended else None,
        }


def _least_compute(steps: list[Step]) -> Step | None:
    return min(steps, key=lambda step: (not step.rung.same_mathematics, step.relative_flops), default=None)


def walk(
    settings: Settings,
    stage: Stage,
    budget_bytes: int,
    order: Order = "lossless-first",
    progress: Progress | None = None,
    correct: Callable[[Prediction], Prediction] = lambda prediction: prediction,
) -> Ladder:
    """Predict the rungs, two at a time, until the rest cannot matter.

    Skipped: thinner slabs when thicker ones fit, and changes of the mathematics when something gentler fits.
    correct: scales predictions by what was once measured on this machine.
    """
    rungs = build_rungs(settings, stage, order)
    steps: list[Step] = []
    waiting: list[tuple[Rung, Future[Prediction]]] = []

    def collect() -> None:
        rung, future = waiting.pop(0)
        prediction = correct(future.result())
        base = steps[0].prediction if steps else prediction
        relative = prediction.flops["total"] / max(1, base.flops["total"])
        steps.append(Step(rung, prediction, prediction.fits(budget_bytes), relative))
        if progress is not None:
            progress(len(steps), len(rungs), rung.name)

    with Predictor(NUM_WORKERS) as predictor:
        for rung in _still_wanted(rungs, steps, order):
            waiting.append((rung, predictor.submit(rung.settings, stage)))
            if len(waiting) == NUM_WORKERS:
                collect()
        while waiting:
            collect()
    return Ladder(stage, order, budget_bytes, tuple(steps))


def _still_wanted(rungs: list[Rung], steps: list[Step], order: Order) -> Iterator[Rung]:
    """Yield rungs while they can matter, looking at the steps that were finished meanwhile.

    What follows a rung that was left out builds on the last that was not, so that each differs from the one above it
    by its own changes only.
    """
    above: Rung | None = None
    for rung in rungs:
        fitting = [step.rung for step in steps if step.fits]
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
    """Return the next rung of the default order that leaves the mathematics alone; None when there is none left."""
    rungs = build_rungs(settings, stage, "lossless-first")
    return next((rung for rung in rungs[1:] if rung.same_mathematics), None)


def config_with_reasons(ladder: Ladder, source: str) -> str:
    """Return the recommended rung as a complete YAML whose head says what was changed and why."""
    step = ladder.recommended
    assert step is not None, "there is nothing to write when nothing fits"
    given = ladder.steps[0]
    peak, budget = step.prediction.required_bytes / GIB, ladder.budget_bytes / GIB
    lines = [
        f"{source} changed to fit {budget:g} GiB: rung '{step.rung.name}' of the {ladder.order} order.",
        f"Predicted for {ladder.stage}: {peak:.2f} GiB with the CUDA context, peak in {step.prediction.phase};",
        f"as configured {given.prediction.required_bytes / GIB:.2f} GiB. Compute: {step.relative_flops:.2f} times.",
    ]
    fields = dict(known_keys())
    for key, value in step.rung.all_changes.items():
        field = fields[key]
        was = look_up(given.rung.settings, key)
        lines.append(f"{key}: {_plain(value)}, was {_plain(was)} ({field.json_schema_extra['promise']})")
        lines.append(f"  {field.description}")
    if not step.rung.all_changes:
        lines.append("Nothing had to change.")
    return "".join(f"# {line}\n" for line in lines) + "\n" + dump_yaml(step.rung.settings)


def promise(same_mathematics: bool) -> str:
    """Return the promise in the words of the config's comments."""
    return "same mathematics" if same_mathematics else "different mathematics"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else value
