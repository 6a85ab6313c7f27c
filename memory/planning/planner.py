"""Makes a plan: the finest grid and the most capable networks that fit the memory and, if limited, the hours."""

from __future__ import annotations

import math
import os
import shlex
import textwrap
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.volumes import split
from memory.kernels.gpus import Gpu, hours_range_text, time_range
from memory.planning.choices import (
    CHANNELS,
    LEAST_STEPS,
    WIDTHS,
    Candidate,
    Choice,
    Network,
    PlannedSet,
    Values,
    as_values,
    class_choices,
    notes,
    val_fraction,
)
from memory.planning.fingerprint import Fingerprint, found_lines
from memory.planning.layout import FieldOfView, Grid, Layout, covered_field_of_view, fixed_layout, layouts
from memory.predict.prediction import GIB, TRAINING_STEP, Prediction, Predictor, Stage
from runtime.cli import OUT_OF_MEMORY
from runtime.files import printable
from settings import ConfigError, DataSettings, Problem, Settings, UserError, dump_short, validate
from settings.section import assign, value_text

LEAST_WIDTH = 16
"""Narrower networks are chosen only for sets that support no more, or to keep to the hours."""
SMALLEST_PATCH, LARGEST_PATCH, PATCH_STEP = 64, 256, 16
PLAIN_PATCH, CHECKPOINTED_PATCH = 96, 128
"""Patches of the first size without checkpoints are better than larger ones with; the second size is large enough."""
DEFAULT_SEED: int = Settings.model_fields["seed"].default
STAGES: tuple[Stage, Stage] = ("autoencoder", "ldm")
SHARES = 4096
"""How finely the steps are cut to keep to the hours."""
SCHEMA = Path(__file__).resolve().parents[2] / "configs" / "schema.json"
WEAK = "(?)"
WIDTH = 118


class NothingFitsError(UserError):
    """Not even the smallest network on the coarsest grid fits; the text says what it needs."""

    exit_code = OUT_OF_MEMORY


@dataclass(frozen=True)
class Plan:
    """A config with the reason for each value, what its stages need, and what else the user should know."""

    settings: Settings
    choices: tuple[Choice, ...]
    predictions: dict[Stage, Prediction]
    fingerprint: Fingerprint
    notes: tuple[str, ...]
    budget_bytes: int
    gpu: Gpu


class Planner:
    """Searches a plan for a set: a grid first, then the networks of both stages, then what the hours allow."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        given: Values,
        name: str,
        predictor: Predictor,
        budget_bytes: int,
        gpu: Gpu,
        correct: Callable[[Prediction], Prediction] = lambda prediction: prediction,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        self.given, self.budget_bytes, self.gpu = given, budget_bytes, gpu
        self._predictor, self._correct, self._progress = predictor, correct, progress
        self._futures: dict[Any, Future[Prediction]] = {}
        self._lock = threading.Lock()
        values = {"data.val_fraction": val_fraction(fingerprint)} | as_values(class_choices(fingerprint)) | given
        names = ("val_fraction", "group_by", "class_labels")
        splits = {"source": fingerprint.source, **{name: values.get(f"data.{name}") for name in names}}
        s = DataSettings.model_validate(splits)
        train, held_out = split(fingerprint.volumes, s, given.get("seed", DEFAULT_SEED))
        view = self._field_of_view(fingerprint)
        self.set = PlannedSet(fingerprint, view, given, (len(train), len(held_out)), name)

    def _field_of_view(self, fingerprint: Fingerprint) -> FieldOfView:
        """Return what the grid covers, with what the user gave about grid, strides and levels."""
        view = covered_field_of_view(fingerprint)
        # MONAI's blocks halve all axes.
        strides = self.given.get(
            "autoencoder.strides", 2 if self.given.get("autoencoder.implementation") == "monai" else None
        )
        depth = self._given_levels("autoencoder")
        return replace(
            view,
            spacing_mm=tuple(self.given.get("data.spacing") or view.spacing_mm),
            resize=self.given.get("data.resize") or view.resize,
            strides=tuple(map(tuple, strides)) if isinstance(strides, list) else strides,
            depth=depth and depth - 1,
            unet_levels=self._given_levels("ldm.unet"),
        )

    def _given_levels(self, network: str) -> int | None:
        """Return how many levels the lists that the user gave have, None if there are none."""
        names = ("num_channels", "attention_levels", "num_res_blocks", "num_head_channels")
        lists = [self.given.get(f"{network}.{name}") for name in names]
        return next((len(values) for values in lists if isinstance(values, list | tuple)), None)

    def plan(self, hours: float | None = None) -> Plan:
        """Search for the most capable config; raise `NothingFitsError` if there is none."""
        candidate = self._settled(self._best_of_all())
        cuts: list[str] = []
        if hours is not None:
            candidate, cuts = self._within_hours(candidate, hours)
        predictions = self._predict_all(candidate)
        if not all(map(self._fits, predictions.values())):
            raise self._nothing_fits(candidate)
        facts = self.set.facts
        lines = (*notes(facts), *cuts)
        choices = tuple(candidate.choices())
        return Plan(self._settings(candidate), choices, predictions, facts, lines, self.budget_bytes, self.gpu)

    def _settings(self, candidate: Candidate) -> Settings:
        """Return the validated config of a candidate; raise `ConfigError` if given values do not go together."""
        values: dict[str, Any] = {}
        for choice in candidate.choices():
            assign(values, choice.key, choice.value)
        return validate(values)

    def _start(self, candidate: Candidate, stage: Stage) -> tuple[Settings, Future[Prediction]]:
        """Start a prediction unless it was asked for before; candidates that differ only in their steps share one."""
        settings, networks = self._settings(candidate), candidate.networks
        key = (stage, candidate.layout.grid, networks["autoencoder"], stage == "ldm" and networks["ldm"])
        with self._lock:
            if key not in self._futures:
                self._futures[key] = self._predictor.submit(settings, stage)
                self._progress()
            return settings, self._futures[key]

    def _predict(self, candidate: Candidate, stage: Stage) -> Prediction:
        settings, future = self._start(candidate, stage)
        return of_run(self._correct(future.result()), settings, stage, self.set.num_volumes)

    def _predict_all(self, candidate: Candidate) -> dict[Stage, Prediction]:
        """Return what both stages need, predicted at the same time."""
        for stage in STAGES:
            self._start(candidate, stage)
        return {stage: self._predict(candidate, stage) for stage in STAGES}

    def _fits(self, prediction: Prediction) -> bool:
        return prediction.required_with_margin <= self.budget_bytes

    def _longest_hours(self, candidate: Candidate, stage: Stage) -> float:
        """Return the upper end of the predicted hours; `max_hours` if the user set it."""
        p, max_hours = self._predict(candidate, stage), self.given.get(f"{stage}.training.max_hours")
        return max_hours or time_range(p.hours(self.gpu), p.is_time_measured)[1]

    def _best_of_all(self) -> Candidate:
        """Return the most capable networks on the finest grid that leaves room for any; raise `NothingFitsError`."""
        if grid := self.given.get("data.voxel_size"):
            choices = [fixed_layout(tuple(grid), self.set.view)]
        else:
            choices = layouts(self.set.view)[-1 if self.given.get("data.spacing") else 0 :]
        *coarser, finest = choices
        candidate = self._best(finest)
        if candidate is None and coarser:
            leasts = [self._least(layout) for layout in coarser]
            number = bisect_right(leasts, self.budget_bytes, key=self._needed_bytes)
            candidate = self._best(coarser[number - 1]) if number else None
        if candidate is None:
            raise self._nothing_fits(self._least(choices[0]))
        return candidate

    def _nothing_fits(self, least: Candidate) -> NothingFitsError:
        """Return the error that says what the smallest plan needs."""
        needed = self._needed_bytes(least) / GIB
        return NothingFitsError(
            f"--budget-gb: nothing fits {self.budget_bytes / GIB:g} GiB; the smallest plan, "
            f"{'x'.join(map(str, least.layout.grid))}, needs {needed:.2f} GiB with its margin; give a larger "
            "budget, or a coarser data.voxel_size"
        )

    def _needed_bytes(self, candidate: Candidate) -> int:
        return max(prediction.required_with_margin for prediction in self._predict_all(candidate).values())

    def _least(self, layout: Layout) -> Candidate:
        """Return the smallest networks that are worth training on a grid."""
        limits, patch = self.set.limits(layout), self._patch_grids(layout)[0]
        is_whole = patch == layout.grid or self.given.get("data.patch_size")
        first = Network(min(LEAST_WIDTH, limits["autoencoder"].width), patch=None if is_whole else patch)
        unet = Network(min(64, limits["ldm"].width))
        return Candidate(self.set, layout, limits, {"autoencoder": first, "ldm": unet})

    def _best(self, layout: Layout) -> Candidate | None:
        """Return the most capable networks on a grid that fit, None if none does; searches both stages at once."""
        least = self._least(layout)
        # Sampling decodes, so the second stage needs an autoencoder before the first has found one.
        tops = [
            least.changed(stage, Network(least.limits[stage].width, least.limits[stage].batch, False))
            for stage in STAGES
        ]
        with ThreadPoolExecutor(len(STAGES)) as threads:
            found = dict(zip(STAGES, threads.map(self._climb, tops, STAGES), strict=True))
        networks = {stage: network for stage, network in found.items() if network is not None}
        return replace(least, networks=networks) if len(networks) == len(STAGES) else None

    def _climb(self, top: Candidate, stage: Stage) -> Network | None:
        """Return the most capable network of a stage that fits; `top` has the most that the set supports."""
        best = top.networks[stage]
        if self._fits(self._predict(top, stage)):
            return best
        widths = [width for width in WIDTHS[stage] if min(LEAST_WIDTH, best.width) <= width <= best.width]
        found = self._last(top, stage, [Network(width) for width in widths])
        if found is not None and found.width == best.width:
            # Spend what is left at the greatest width: no checkpoints, and a larger micro-batch.
            batches = [replace(found, batch=number) for number in range(1, best.batch + 1)]
            plain = self._last(top, stage, [replace(network, checkpoints=False) for network in batches])
            return plain or self._last(top, stage, batches) or found
        if stage == "autoencoder":
            # A wide network on patches is better than a narrow one on whole volumes.
            patched = self._patches(top, widths, best.batch)
            return patched if patched and (found is None or patched.width > found.width) else found
        return found

    def _patches(self, top: Candidate, widths: list[int], batch: int) -> Network | None:
        """Return the widest network that can train on patches, on the largest patches that fit.

        Checkpoints only if the network becomes wider by them, which validating whole volumes may prevent.
        """
        if self.given.get("data.patch_size"):
            return None
        grids = self._patch_grids(top.layout)
        large = [grid for grid in grids if math.prod(grid) >= PLAIN_PATCH**3] or grids[-1:]
        small = [grid for grid in grids if math.prod(grid) <= CHECKPOINTED_PATCH**3]

        def widest(checkpoints: bool, grid: Grid) -> Network | None:
            return self._last(top, "autoencoder", [Network(width, 1, checkpoints, grid) for width in widths])

        found = widest(False, large[0])
        if found is None or 2 * found.width < widths[-1]:
            checkpointed = widest(True, small[0])
            if checkpointed and (found is None or checkpointed.width > found.width):
                found = checkpointed
        if found is None:
            return None
        grown = [replace(found, patch=grid) for grid in (small if found.checkpoints else large)]
        grown += [replace(grown[-1], batch=number) for number in range(2, batch + 1)]
        return self._last(top, "autoencoder", grown) or found

    @staticmethod
    def _patch_grids(layout: Layout) -> list[Grid]:
        """Return patches within a grid, the smallest first; each has one axis longer than the one before."""
        grids = []
        for number in range(3 * (LARGEST_PATCH - SMALLEST_PATCH) // PATCH_STEP + 1):
            axes = [SMALLEST_PATCH + (number + 2 - axis) // 3 * PATCH_STEP for axis in range(3)]
            even = [max(f, n - n % f) for n, f in zip(axes, layout.factor, strict=True)]
            grids.append(tuple(map(min, layout.grid, even)))
        return list(dict.fromkeys(grids))

    def _last(self, top: Candidate, stage: Stage, networks: Sequence[Network]) -> Network | None:
        """Return the last of some networks that fits, None if none does; they are in the order of their needs."""

        def need(network: Network) -> int:
            return self._predict(top.changed(stage, network), stage).required_with_margin

        number = bisect_right(networks, self.budget_bytes, key=need)
        return networks[number - 1] if number else None

    def _settled(self, candidate: Candidate) -> Candidate:
        """Return the candidate with a second stage that fits beside its autoencoder, which the search did not know."""
        while not self._fits(prediction := self._predict(candidate, "ldm")):
            networks, unet = candidate.networks, candidate.networks["ldm"]
            smaller: list[tuple[Stage, Network]] = [
                (stage, replace(networks[stage], width=max(widths)))
                for stage in STAGES[::-1]
                if (widths := [width for width in WIDTHS[stage] if width < networks[stage].width])
            ]
            if prediction.needing_phase == TRAINING_STEP and unet.batch > 1:
                smaller.insert(0, ("ldm", replace(unet, batch=unet.batch - 1)))
            if not smaller:
                break
            candidate = candidate.changed(*smaller[0])
        return candidate

    def _within_hours(self, candidate: Candidate, hours: float) -> tuple[Candidate, list[str]]:
        """Cut the steps by up to a half, then the widths, then the steps as far as it takes; raise `ConfigError`."""

        def total(share: float) -> float:
            """Return the hours of both stages; validations do not become fewer in proportion to the steps."""
            cut = replace(candidate, steps_share=share)
            self._predict_all(cut)
            return sum(self._longest_hours(cut, stage) for stage in STAGES)

        needed, before = total(1.0), candidate.networks
        if needed <= hours:
            return candidate, []
        if hours / needed < 0.5:
            for stage in STAGES:
                candidate = self._narrower(candidate, stage, hours / needed)
        number = bisect_right(range(SHARES + 1), hours, key=lambda number: total(number / SHARES))
        if not number:
            least = f"{1.1 * total(0.0):.2g}"
            allowed = f"allowed: at least {least}, what {LEAST_STEPS} updates or given steps take in both stages"
            remedy = "give more, or a coarser data.voxel_size"
            raise ConfigError([Problem("--hours", f"found {hours:g}", allowed, remedy)])
        share = (number - 1) / SHARES
        networks = candidate.networks
        narrower = [f"{s} {networks[s].width} instead of {before[s].width}" for s in STAGES if networks[s] != before[s]]
        cuts = [f"steps are cut to {share:.2g} of what suits the set"] if share < 1 else []
        cuts += [f"channels are fewer ({', '.join(narrower)})"] if narrower else []
        text = f"To keep to {hours:g} hours, at the longest that an update should take, {' and '.join(cuts)}."
        return replace(candidate, steps_share=share), [text]

    def _narrower(self, candidate: Candidate, stage: Stage, share: float) -> Candidate:
        """Return the candidate with the widest network whose half number of steps takes this share of the time."""
        if f"{stage}.training.max_hours" in self.given or CHANNELS[stage] in self.given:
            return candidate
        own = candidate.networks[stage]
        networks = [replace(own, width=width) for width in WIDTHS[stage] if width <= own.width]
        limit = self._longest_hours(candidate, stage) * share
        part = 1.0 if f"{stage}.training.max_steps" in self.given else 0.5

        def need(network: Network) -> float:
            return part * self._longest_hours(candidate.changed(stage, network), stage)

        number = bisect_right(networks, limit, key=need)
        return candidate.changed(stage, networks[max(0, number - 1)])


def of_run(prediction: Prediction, settings: Settings, stage: Stage, num_volumes: tuple[int, int]) -> Prediction:
    """Return the prediction for the run of a config on so many training and held-out volumes."""
    training = settings.training_of(stage)
    num_validations = math.ceil(training.max_steps / training.validate_every)
    volumes = list(num_volumes)
    return replace(prediction, max_steps=training.max_steps, num_validations=num_validations, num_volumes=volumes)


def describe_plan(plan: Plan) -> str:
    """Return what the plan needs, what was found in the data, and why each value was chosen."""
    return "\n".join(line for text in _paragraphs(plan) for line in _wrapped(text, WIDTH))


def as_yaml(plan: Plan, command: str, out: Path) -> str:
    """Return the config with the keys of a preset, below the text of `describe_plan` and the commands to run."""
    schema = printable(os.path.relpath(SCHEMA, out.absolute().parent))
    head = [
        f"Planned for {plan.budget_bytes / GIB:g} GiB by: {command}",
        f"Start: python train_autoencoder.py --config {shlex.quote(printable(out))}",
        f"Then:  python train_ldm.py --config {shlex.quote(printable(out))}",
        *_paragraphs(plan),
    ]
    lines = [f"# {line}".rstrip() for text in head for line in _wrapped(text, WIDTH - 2)]
    weak = {choice.key for choice in plan.choices if choice.is_weak}

    def comment(dotted: str, field: Any) -> str:
        return f"{WEAK} {field.description}" if dotted in weak else str(field.description)

    return "\n".join([f"# yaml-language-server: $schema={schema}", *lines, "", dump_short(plan.settings, comment)])


def _paragraphs(plan: Plan) -> list[str]:
    needs, times = [], []
    for number, (stage, p) in enumerate(plan.predictions.items(), start=1):
        margin = f"with its margin {p.required_with_margin / GIB:.1f} GiB"
        share = p.required_bytes / plan.budget_bytes
        needs.append(f"stage {number} {p.required_bytes / GIB:.1f} GiB ({share:.0%} of the budget), {margin}")
        limit = plan.settings.training_of(stage).max_hours
        predicted = hours_range_text(p.hours(plan.gpu), p.is_time_measured)
        times.append(predicted if limit is None else f"{limit:g} h")
    texts = [
        f"Memory, with the CUDA context: {'; '.join(needs)}.",
        f"Time on {plan.gpu.name}: {' + '.join(times)}, from operations, bytes moved and kernels.",
        *plan.notes,
        "",
        "What was found",
        *(f"  {line}" for line in found_lines(plan.fingerprint)),
        "",
        f"Why each value was chosen; {WEAK} marks what was inferred from little, so look at it again",
    ]
    for choice in plan.choices:
        mark = f" {WEAK}" if choice.is_weak else ""
        texts.append(f"  {choice.key}: {value_text(choice.value)}{mark}: {choice.reason}")
    return texts


def _wrapped(text: str, width: int) -> list[str]:
    indent = "    " if text.startswith("  ") else "  "
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False) or [""]
