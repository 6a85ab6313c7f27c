"""Makes a plan: the finest grid and the most capable networks that fit the memory and, if limited, the hours."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from memory.planning.choices import (
    Choice,
    as_values,
    channel_choices,
    class_choices,
    data_choices,
    intensity_choices,
    notes,
    occupancy_choices,
    val_fraction,
)
from memory.planning.fingerprint import Fingerprint
from memory.planning.layout import FieldOfView, Grid, Layout, covered_field_of_view, fixed_layout, layouts
from memory.planning.networks import (
    LEAST_STEPS,
    LEAST_WIDTH,
    Network,
    SearchContext,
    Values,
    autoencoder_choices,
    search_context,
    unet_choices,
)
from memory.planning.search import Assessment, PredictionCache, last_that_fits
from memory.predict.prediction import CONTEXT_BYTES, GIB, TRAINING_STEP, Stage
from runtime.cli import OUT_OF_MEMORY
from settings import ConfigError, DataSettings, Problem, Settings, UserError, validate
from settings.section import assign

SMALLEST_PATCH, LARGEST_PATCH, PATCH_STEP = 64, 256, 16
PLAIN_PATCH, CHECKPOINTED_PATCH = 96, 128
"""Patches of the first size without checkpoints are better than larger ones with; the second size is large enough."""
DEFAULT_SEED: int = Settings.model_fields["seed"].default
STAGES: tuple[Stage, Stage] = ("autoencoder", "ldm")
LEAST_SHARE = 0.75
"""A plan that uses less of the budget says why."""
HALVINGS = 12
"""How often the range of the steps is halved when they are cut to keep to the hours."""
SMALL_VOXELS = 1_000_000
"""Volumes below this size do not fill a GPU."""
CHANNELS: dict[Stage, str] = {"autoencoder": "autoencoder.num_channels", "ldm": "ldm.unet.num_channels"}


class NothingFitsError(UserError):
    """Not even the smallest network on the coarsest grid fits; the text says what it needs."""

    exit_code = OUT_OF_MEMORY


@dataclass(frozen=True)
class Candidate:
    """A network for each stage on one grid."""

    context: SearchContext
    networks: dict[Stage, Network]

    def changed(self, stage: Stage, **values: Any) -> Candidate:
        """Return a candidate whose network of a stage has other values."""
        return self.with_network(stage, replace(self.networks[stage], **values))

    def with_network(self, stage: Stage, network: Network) -> Candidate:
        """Return a candidate with another network for a stage."""
        return replace(self, networks={**self.networks, stage: network})


@dataclass(frozen=True)
class Plan:
    """A config with the reason for each value, what its stages need, and what else the user should know."""

    settings: Settings
    choices: tuple[Choice, ...]
    assessments: dict[Stage, Assessment]
    fingerprint: Fingerprint
    notes: tuple[str, ...]
    budget_bytes: int


class Planner:
    """Everything that stays the same while a plan is searched."""

    def __init__(self, fingerprint: Fingerprint, given: Values, predictions: PredictionCache, name: str) -> None:
        self.fingerprint, self.given, self.predictions, self.name = fingerprint, given, predictions, name
        self.view = self._field_of_view()

    @functools.cached_property
    def num_volumes(self) -> tuple[int, int]:
        """Return how many volumes train and how many are held out, as training will split them."""
        found = self.fingerprint
        values = {"data.val_fraction": val_fraction(found)} | as_values(class_choices(found)) | self.given
        s = DataSettings(
            source=found.source,
            val_fraction=values["data.val_fraction"],
            group_by=values["data.group_by"],
            class_labels=values.get("data.class_labels"),
        )
        return found.split(s, values.get("seed", DEFAULT_SEED))

    def _field_of_view(self) -> FieldOfView:
        view = covered_field_of_view(self.fingerprint)
        if spacing := self.given.get("data.spacing"):
            view = replace(view, spacing_mm=tuple(spacing))
        if resize := self.given.get("data.resize"):
            view = replace(view, resize=resize)
        depth, unet = self._given_levels("autoencoder"), self._given_levels("ldm.unet")
        view = replace(view, depth=depth and depth - 1, unet_levels=unet)
        # MONAI's blocks halve all axes.
        default = 2 if self.given.get("autoencoder.implementation") == "monai" else None
        strides = self.given.get("autoencoder.strides", default)
        return replace(view, strides=tuple(map(tuple, strides)) if isinstance(strides, list) else strides)

    def _given_levels(self, network: str) -> int | None:
        """Return how many levels the lists that the user gave have, None if there are none."""
        names = ("num_channels", "attention_levels", "num_res_blocks", "num_head_channels")
        lists = [self.given.get(f"{network}.{name}") for name in names]
        return next((len(values) for values in lists if isinstance(values, list | tuple)), None)

    def layouts(self) -> list[Layout]:
        """Return the grids to choose from, the coarsest first; one if the user gave it."""
        if grid := self.given.get("data.voxel_size"):
            return [fixed_layout(tuple(grid), self.view)]
        found = layouts(self.view)
        return found[-1:] if self.given.get("data.spacing") else found

    def context(self, layout: Layout) -> SearchContext:
        """Return what networks on a grid have in common."""
        return search_context(self.fingerprint, layout, self.num_volumes[0], self.given)

    def choices(self, candidate: Candidate) -> list[Choice]:
        """Return every value that the plan sets, with its reason; what the user gave is taken."""
        found, context = self.fingerprint, candidate.context
        precision = "small volumes need little memory" if context.full_precision else "half the memory"
        chosen = [
            Choice("name", self.name, "outputs go to runs/<name>"),
            Choice("data.source", found.source, "given as --data"),
            *data_choices(found, self.view, context.layout, self.num_volumes[1]),
            *intensity_choices(found, self.given.get("data.intensity.mode")),
            *([] if any(key.startswith("data.intensity.") for key in self.given) else channel_choices(found)),
            *class_choices(found),
            *autoencoder_choices(candidate.networks["autoencoder"], context),
            *occupancy_choices(found),
            *unet_choices(candidate.networks["ldm"], context),
            Choice("device.mixed_precision", not context.full_precision, precision),
        ]
        by_key = {choice.key: choice for choice in chosen}
        for key, value in self.given.items():
            by_key[key] = Choice(key, value, "given on the command line")
        return list(by_key.values())

    def settings(self, candidate: Candidate) -> Settings:
        """Return the validated config of a candidate; raise `ConfigError` if given values do not go together."""
        values: dict[str, Any] = {}
        for choice in self.choices(candidate):
            assign(values, choice.key, choice.value)
        return validate(values)

    def assess(self, candidate: Candidate, stage: Stage) -> Assessment:
        """Return what a stage of a candidate needs."""
        return self.predictions.assess(self.settings(candidate), stage, self.num_volumes)

    def assess_all(self, candidate: Candidate) -> dict[Stage, Assessment]:
        """Return what both stages need, predicted at the same time."""
        for stage in STAGES:
            self.predictions.start(self.settings(candidate), stage)
        return {stage: self.assess(candidate, stage) for stage in STAGES}

    def best(self, context: SearchContext) -> Candidate | None:
        """Return the most capable networks on a grid that fit, None if none does; searches both stages at once."""
        limits = context.limits
        top = Candidate(context, {stage: Network(s.width, s.batch, False) for stage, s in limits.items()})
        # Sampling decodes, so the second stage needs an autoencoder before the first has found one.
        narrow = top.with_network("autoencoder", self.least(context).networks["autoencoder"])
        with ThreadPoolExecutor(len(STAGES)) as threads:
            first, second = threads.map(self._climb, (top, narrow), STAGES)
        return None if first is None or second is None else Candidate(context, {"autoencoder": first, "ldm": second})

    def _climb(self, top: Candidate, stage: Stage) -> Network | None:
        """Return the most capable network of a stage that fits; `top` has the most that the set supports."""
        best = top.networks[stage]
        if self.assess(top, stage).fits:
            return best
        widths = top.context.limits[stage].searched_widths
        steps = [replace(best, width=width, batch=1, checkpoints=True) for width in widths]
        found = self._last(top, stage, steps)
        if found is not None and found.width == best.width:
            return self._relax(top, stage, found, best.batch)
        if stage == "autoencoder":
            # A wide network on patches is better than a narrow one on whole volumes.
            patched = self._patches(top, widths, best.batch)
            return patched if patched and (found is None or patched.width > found.width) else found
        return found

    def _relax(self, top: Candidate, stage: Stage, found: Network, batch: int) -> Network:
        """Spend what is left at the greatest width: no checkpoints, and a larger micro-batch."""
        plain = self._last(top, stage, [replace(found, batch=n, checkpoints=False) for n in range(1, batch + 1)])
        return plain or self._last(top, stage, [replace(found, batch=n) for n in range(1, batch + 1)]) or found

    def _patches(self, top: Candidate, widths: list[int], batch: int) -> Network | None:
        """Return the widest network that can train on patches, on the largest patches that fit.

        Checkpoints only if the network becomes wider by them, which validating whole volumes may prevent.
        """
        if self.given.get("data.patch_size"):
            return None
        grids = self._patch_grids(top.context.layout)
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
        """Return the last of some networks that fits, None if none does; what the top needs says where to begin."""
        if not networks:
            return None
        grid, limit = top.context.layout.grid, self.predictions.budget_bytes

        def need(network: Network) -> float:
            return self.assess(top.with_network(stage, network), stage).prediction.required_with_margin

        costs = [network.cost(grid) for network in networks]
        slope = (need(top.networks[stage]) - CONTEXT_BYTES) / top.networks[stage].cost(grid)
        start = max((n for n, cost in enumerate(costs) if CONTEXT_BYTES + slope * cost <= limit), default=0)
        position = last_that_fits(networks, lambda network: network.cost(grid), need, limit, start, CONTEXT_BYTES)
        return networks[position] if position >= 0 else None

    def best_of_all(self) -> Candidate:
        """Return the most capable networks on the finest grid that leaves room for any; raise `NothingFitsError`."""
        choices, limit = self.layouts(), self.predictions.budget_bytes
        candidate = self.best(self.context(choices[-1]))

        def need(layout: Layout) -> float:
            return self._needed_bytes(self.least(self.context(layout)))

        if candidate is None and len(choices) > 1:
            coarser = choices[:-1]
            position = last_that_fits(coarser, lambda layout: layout.voxels, need, limit, len(coarser), CONTEXT_BYTES)
            candidate = self.best(self.context(coarser[position])) if position >= 0 else None
        if candidate is None:
            raise self.nothing_fits(self.least(self.context(choices[0])))
        return candidate

    def nothing_fits(self, least: Candidate) -> NothingFitsError:
        """Return the error that says what the smallest plan needs."""
        needed = self._needed_bytes(least) / GIB
        return NothingFitsError(
            f"--budget-gb: nothing fits {self.predictions.budget_bytes / GIB:g} GiB; the smallest plan, "
            f"{'x'.join(map(str, least.context.layout.grid))}, needs {needed:.2f} GiB with its margin; give a larger "
            "budget, or a coarser data.voxel_size"
        )

    def _needed_bytes(self, candidate: Candidate) -> int:
        return max(assessment.prediction.required_with_margin for assessment in self.assess_all(candidate).values())

    def settled(self, candidate: Candidate) -> Candidate:
        """Return the candidate with a second stage that fits beside its autoencoder, which the search did not know."""
        while not (assessment := self.assess(candidate, "ldm")).fits:
            first, unet = candidate.networks["autoencoder"], candidate.networks["ldm"]
            limits = candidate.context.limits
            if assessment.prediction.needing_phase == TRAINING_STEP and unet.batch > 1:
                candidate = candidate.changed("ldm", batch=unet.batch - 1)
            elif width := limits["ldm"].narrower(unet.width):
                candidate = candidate.changed("ldm", width=width)
            elif width := limits["autoencoder"].narrower(first.width):
                candidate = candidate.changed("autoencoder", width=width)
            else:
                break
        return candidate

    def least(self, context: SearchContext) -> Candidate:
        """Return the smallest networks that are worth training on a grid."""
        patch = self._patch_grids(context.layout)[0]
        is_whole = patch == context.layout.grid or self.given.get("data.patch_size")
        first = Network(min(LEAST_WIDTH, context.limits["autoencoder"].width), patch=None if is_whole else patch)
        return Candidate(context, {"autoencoder": first, "ldm": Network(min(64, context.limits["ldm"].width))})

    def plan(self, hours: float | None = None) -> Plan:
        """Search for the most capable config; raise `NothingFitsError` if there is none."""
        candidate = self.settled(self.best_of_all())
        lines = notes(self.fingerprint)
        is_cut = False
        if hours is not None:
            candidate, cuts = self._within_hours(candidate, hours)
            is_cut = bool(cuts)
            lines += cuts
        assessments = self.assess_all(candidate)
        if not all(assessment.fits for assessment in assessments.values()):
            raise self.nothing_fits(candidate)
        for stage, assessment in assessments.items():
            if assessment.share < LEAST_SHARE:
                why = f"more would not keep to {hours:g} hours" if is_cut else self._unused(candidate, stage)
                used, budget = assessment.prediction.required_bytes / GIB, assessment.budget_bytes / GIB
                number = 1 + STAGES.index(stage)
                lines.append(f"Stage {number} uses {used:.1f} of {budget:g} GiB ({assessment.share:.0%}): {why}.")
        return Plan(
            self.settings(candidate),
            tuple(self.choices(candidate)),
            assessments,
            self.fingerprint,
            tuple(lines),
            self.predictions.budget_bytes,
        )

    def _within_hours(self, candidate: Candidate, hours: float) -> tuple[Candidate, list[str]]:
        """Cut the steps by up to a half, then the widths, then the steps as far as it takes; raise `ConfigError`."""

        def total(candidate: Candidate) -> float:
            return sum(assessment.longest_hours for assessment in self.assess_all(candidate).values())

        needed = total(candidate)
        if needed <= hours:
            return candidate, []
        before = candidate.networks
        if hours / needed < 0.5:
            for stage in STAGES:
                candidate = self._narrower(candidate, stage, hours / needed)
        if total(candidate) > hours:
            candidate = _shorter(candidate, total, hours)
        narrower = [
            f"{stage} {candidate.networks[stage].width} instead of {before[stage].width}"
            for stage in STAGES
            if candidate.networks[stage] != before[stage]
        ]
        share = candidate.context.steps_share
        cuts = [f"steps are cut to {share:.2g} of what suits the set"] if share < 1 else []
        cuts += [f"channels are fewer ({', '.join(narrower)})"] if narrower else []
        return candidate, [
            f"To keep to {hours:g} hours, at the longest that an update should take, {' and '.join(cuts)}."
        ]

    def _narrower(self, candidate: Candidate, stage: Stage, share: float) -> Candidate:
        """Return the candidate with the widest network whose half number of steps takes this share of the time."""
        given = {key for key in self.given if key.startswith(f"{stage}.")}
        if given & {f"{stage}.training.max_hours", CHANNELS[stage]}:
            return candidate
        own = candidate.networks[stage]
        widths = candidate.context.limits[stage].widths
        networks = [replace(own, width=width) for width in widths if width <= own.width]
        limit = self.assess(candidate, stage).longest_hours * share
        part = 1.0 if f"{stage}.training.max_steps" in given else 0.5

        def need(network: Network) -> float:
            return part * self.assess(candidate.with_network(stage, network), stage).longest_hours

        position = last_that_fits(networks, lambda network: network.width, need, limit, len(networks) // 2)
        return candidate.with_network(stage, networks[max(0, position)])

    def _unused(self, candidate: Candidate, stage: Stage) -> str:
        """Return why a stage leaves much of the budget."""
        limits, network, layout = candidate.context.limits[stage], candidate.networks[stage], candidate.context.layout
        text = ""
        if layout.voxels < SMALL_VOXELS:
            text = f"the volumes are small ({'x'.join(map(str, layout.grid))}), and "
        is_most = network.batch >= limits.batch
        fits = "no larger batch" if is_most else "a larger micro-batch does not fit with its margin"
        if CHANNELS[stage] in self.given:
            return f"{text}the channels were given, and {'the set asks for ' if is_most else ''}{fits}"
        if network.width < limits.width:
            return f"{text}the next wider network does not fit with its margin"
        return f"{text}{limits.why_width}, which asks for no wider network, and {fits}"


def _shorter(candidate: Candidate, total: Callable[[Candidate], float], hours: float) -> Candidate:
    """Return the candidate with the most steps that keep to the hours.

    Validations do not become fewer in proportion to the steps, so their share is searched.
    """

    def cut(share: float) -> Candidate:
        return replace(candidate, context=replace(candidate.context, steps_share=share))

    least = total(cut(0.0))
    if least > hours:
        allowed = f"allowed: at least {1.1 * least:.2g}, what {LEAST_STEPS} updates or given steps take in both stages"
        raise ConfigError([Problem("--hours", f"found {hours:g}", allowed, "give more, or a coarser data.voxel_size")])
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if total(cut(middle)) <= hours else (low, middle)
    return cut(low)
