"""Predict the rungs below a config until a memory budget is met, choose one, and say which and why."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from memory.kernels.gpus import Gpu, chosen_gpu, hours_range_text
from memory.ladder.rungs import Order, Rung, build_rungs
from memory.predict.prediction import GIB, Prediction, Predictor, Stage
from memory.predict.text import CPU_TIME, dominant_text, gib, table
from settings import Settings, dump_short, known_keys, look_up
from settings.section import value_text

NUM_WORKERS = 2
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class PredictedRung:
    """A rung and its prediction; whether it fits the budget, and whether it does if it needs its whole margin."""

    rung: Rung
    prediction: Prediction
    fits: bool
    fits_with_margin: bool
    seconds: float

    def to_json(self, gpu: Gpu) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        p, rung = self.prediction, self.rung
        rung_names = ("name", "changes", "all_changes", "same_mathematics")
        names = [
            *("tier", "peak_allocated_bytes", "peak_reserved_bytes", "required_bytes", "host_bytes", "phase"),
            *("traffic_bytes", "work", "run_peaks", "max_steps", "margin"),
        ]
        return {
            **{name: getattr(rung, name) for name in rung_names},
            **{name: getattr(p, name) for name in names},
            "flops": p.flops["total"],
            "seconds_per_step": self.seconds if p.is_for_gpu else None,
            "hours": p.hours(gpu) if p.is_for_gpu else None,
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
        return next((row for row in self.rungs if row.fits), None)

    @property
    def fastest(self) -> PredictedRung | None:
        """Return the rung that fits and takes the least time; prefer those with the same mathematics."""
        fitting = [row for row in self.rungs if row.fits]
        return min(fitting, key=lambda row: (not row.rung.same_mathematics, row.seconds), default=None)

    @property
    def recommended(self) -> PredictedRung | None:
        """Return the fastest rung that fits with its margin, else the fastest that fits; `--write-config` writes it."""
        roomy = [row for row in self.rungs if row.fits_with_margin and row.rung.same_mathematics]
        return min(roomy, key=lambda row: row.seconds, default=self.fastest)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        chosen = {"first": self.first, "fastest": self.fastest, "recommended": self.recommended}
        return {
            "stage": self.stage,
            "order": self.order,
            "budget_bytes": self.budget_bytes,
            "gpu": self.gpu.name if self.rungs[0].prediction.is_for_gpu else None,
            "rungs": [row.to_json(self.gpu) for row in self.rungs],
            **{name: row.rung.name if row else None for name, row in chosen.items()},
        }


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
        p = correct(future.result())
        fits, fits_with_margin = p.required_bytes <= budget_bytes, p.required_with_margin <= budget_bytes
        predicted.append(PredictedRung(rung, p, fits, fits_with_margin, p.seconds_per_step(card)))
        if progress is not None:
            progress(len(predicted), len(rungs), rung.name)

    with Predictor(NUM_WORKERS, card.without_triton) as predictor:
        above: Rung | None = None
        for rung in rungs:
            if len(waiting) == NUM_WORKERS:
                collect()
            fitting = [row.rung for row in predicted if row.fits]
            if fitting and (order == "guide" or not rung.same_mathematics):
                break
            if rung.family and any(other.family == rung.family for other in fitting):
                continue
            above = rung if above is None else _on_top_of(above, rung)
            waiting.append((above, predictor.submit(above.settings, stage)))
        while waiting:
            collect()
    return Ladder(stage, order, budget_bytes, tuple(predicted), card)


def _on_top_of(above: Rung, rung: Rung) -> Rung:
    """Return the rung without those that were skipped: it differs from the one above only by its own changes."""
    changes = {key: value for key, value in rung.changes.items() if look_up(above.settings, key) != value}
    everything = {**above.all_changes, **changes}
    return replace(rung, changes=changes, all_changes=everything, settings=above.settings.with_overrides(changes))


def next_same_mathematics_rung(settings: Settings, stage: Stage) -> Rung | None:
    """Return the next rung of the default order that keeps the mathematics; None if none is left."""
    rungs = build_rungs(settings, stage, "lossless-first")
    return next((rung for rung in rungs[1:] if rung.same_mathematics), None)


def promise(same_mathematics: bool) -> str:
    """Return the promise as the comments of the config word it."""
    return "same mathematics" if same_mathematics else "different mathematics"


def as_overrides(changes: dict[str, Any]) -> list[str]:
    """Return changes as users write them on the command line."""
    return [f"{key}={value_text(value).replace(' ', '')}" for key, value in changes.items()]


def describe_ladder(ladder: Ladder, measured: dict[str, int] | None = None) -> str:
    """Return a table of the rungs, then which one to take; `measured` maps rung names to reserved bytes."""
    head = ["rung", "promise", "allocated", "needed", "host", "moved", "time", "fits"]
    rows = [head + (["measured"] if measured is not None else [])]
    for row in ladder.rungs:
        rung, p = row.rung, row.prediction
        cells = [
            *(rung.name, promise(rung.same_mathematics)),
            *map(gib, (p.peak_allocated_bytes, p.required_bytes, p.host_bytes)),
            f"{p.traffic_bytes / GIB:.0f} GiB",
            hours_range_text(p.hours(ladder.gpu), p.is_time_measured) if p.is_for_gpu else "?",
            "no" if not row.fits else "yes" if row.fits_with_margin else "yes, without margin",
        ]
        if measured is not None:
            cells.append(gib(measured[rung.name]) if rung.name in measured else "failed")
        rows.append(cells)
    given = ladder.rungs[0].prediction
    time = CPU_TIME
    if given.is_for_gpu:
        time = (
            f"Time: of the whole run of {given.max_steps:,} updates on {ladder.gpu.name}, from operations, bytes moved "
            "and kernels." + dominant_text(given, ladder.gpu)
        )
    return "\n\n".join([table(rows, right=(2, 3, 4, 5, 6)), time, _verdict(ladder)])


def _verdict(ladder: Ladder) -> str:
    budget = gib(ladder.budget_bytes)
    if ladder.first is None or ladder.fastest is None or ladder.recommended is None:
        smallest = min(ladder.rungs, key=lambda row: row.prediction.required_bytes)
        p = smallest.prediction
        context = f", {gib(p.context_bytes)} of it for the CUDA context" if p.context_bytes else ""
        holder = p.largest[0]
        return (
            f"Nothing on the ladder fits {budget}. The smallest is '{smallest.rung.name}' with "
            f"{gib(p.required_bytes)}{context}; it peaks in {p.phase}, held by "
            f"{holder['module'] or holder['category']} ({gib(holder['bytes'])} in one tensor of "
            f"{'x'.join(map(str, holder['shape']))}). Use a smaller grid or patches (data.patch_size), or a larger GPU."
        )
    lines = [
        f"First that fits {budget}: {ladder.first.rung.name}.",
        f"Fastest that fits: {ladder.fastest.rung.name}.",
        f"Recommended: {ladder.recommended.rung.name}"
        + (", which leaves the margin." if ladder.recommended.fits_with_margin else "."),
        *(f"  {override}" for override in as_overrides(ladder.recommended.rung.all_changes)),
    ]
    return "\n".join(lines)


def config_with_reasons(ladder: Ladder, source: str) -> str:
    """Return the recommended rung as short as a preset; comments at the top say what changed and why."""
    given, chosen = ladder.rungs[0], ladder.recommended
    assert chosen is not None, "no rung fits, so there is no config to write"
    peak, budget = chosen.prediction.required_bytes / GIB, ladder.budget_bytes / GIB
    times = chosen.seconds / given.seconds if given.seconds else 1.0
    lines = [
        f"{source} changed to fit {budget:g} GiB: rung '{chosen.rung.name}' of the {ladder.order} order.",
        f"Predicted for {ladder.stage}: {peak:.2f} GiB with the CUDA context, peak in {chosen.prediction.phase};",
        f"as configured {given.prediction.required_bytes / GIB:.2f} GiB. Time: {times:.2f} times.",
    ]
    fields = dict(known_keys())
    for key, value in chosen.rung.all_changes.items():
        was = value_text(look_up(given.rung.settings, key))
        lines.append(f"{key}: {value_text(value)}, was {was} ({fields[key].json_schema_extra['promise']})")
        lines.append(f"  {fields[key].description}")
    if not chosen.rung.all_changes:
        lines.append("Nothing had to change.")
    return "".join(f"# {line}\n" for line in lines) + "\n" + dump_short(chosen.rung.settings)
