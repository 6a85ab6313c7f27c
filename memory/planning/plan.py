"""Makes a plan: the most capable config that fits the memory and, if they are limited, the hours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memory.planning.choices import Choice, notes
from memory.planning.fingerprint import Fingerprint
from memory.planning.networks import LEAST_STEPS, Network
from memory.planning.planner import STAGES, Candidate, Planner
from memory.planning.search import Assessment, last_that_fits
from memory.predict.prediction import GIB, Stage
from settings import ConfigError, Problem, Settings

LEAST_SHARE = 0.75
"""A plan that uses less of the budget says why."""
HALVINGS = 12
"""How often the range of the steps is halved when they are cut to keep to the hours."""
SMALL_VOXELS = 1_000_000
"""Volumes below this size do not fill a GPU."""
CHANNELS: dict[Stage, str] = {"autoencoder": "autoencoder.num_channels", "ldm": "ldm.unet.num_channels"}


@dataclass(frozen=True)
class Plan:
    """A config with the reason for each value, what its stages need, and what else the user should know."""

    settings: Settings
    choices: tuple[Choice, ...]
    assessments: dict[Stage, Assessment]
    fingerprint: Fingerprint
    notes: tuple[str, ...]
    budget_bytes: int


def make_plan(planner: Planner, hours: float | None = None) -> Plan:
    """Search for the most capable config; raise `NothingFitsError` if there is none."""
    candidate = planner.settled(planner.best_of_all())
    lines = notes(planner.fingerprint)
    is_cut = False
    if hours is not None:
        candidate, cuts = _within_hours(planner, candidate, hours)
        is_cut = bool(cuts)
        lines += cuts
    assessments = planner.assess_all(candidate)
    if not all(assessment.fits for assessment in assessments.values()):
        raise planner.nothing_fits(candidate)
    for stage, assessment in assessments.items():
        if assessment.share < LEAST_SHARE:
            why = f"more would not keep to {hours:g} hours" if is_cut else _unused(planner, candidate, stage)
            used, budget = assessment.prediction.required_bytes / GIB, assessment.budget_bytes / GIB
            number = 1 + STAGES.index(stage)
            lines.append(f"Stage {number} uses {used:.1f} of {budget:g} GiB ({assessment.share:.0%}): {why}.")
    return Plan(
        planner.settings(candidate),
        tuple(planner.choices(candidate)),
        assessments,
        planner.fingerprint,
        tuple(lines),
        planner.predictions.budget_bytes,
    )


def _within_hours(planner: Planner, candidate: Candidate, hours: float) -> tuple[Candidate, list[str]]:
    """Cut the steps by up to a half, then the widths, then the steps as far as it takes; raise `ConfigError`."""

    def total(candidate: Candidate) -> float:
        return sum(assessment.longest_hours for assessment in planner.assess_all(candidate).values())

    needed = total(candidate)
    if needed <= hours:
        return candidate, []
    before = candidate.networks
    if hours / needed < 0.5:
        for stage in STAGES:
            candidate = _narrower(planner, candidate, stage, hours / needed)
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
    return candidate, [f"To keep to {hours:g} hours, at the longest that an update should take, {' and '.join(cuts)}."]


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


def _narrower(planner: Planner, candidate: Candidate, stage: Stage, share: float) -> Candidate:
    """Return the candidate with the widest network whose half number of steps takes this share of the time."""
    given = {key for key in planner.given if key.startswith(f"{stage}.")}
    if given & {f"{stage}.training.max_hours", CHANNELS[stage]}:
        return candidate
    own = candidate.networks[stage]
    widths = candidate.context.limits(stage).widths
    networks = [replace(own, width=width) for width in widths if width <= own.width]
    limit = planner.assess(candidate, stage).longest_hours * share
    part = 1.0 if f"{stage}.training.max_steps" in given else 0.5

    def need(network: Network) -> float:
        return part * planner.assess(candidate.with_network(stage, network), stage).longest_hours

    position = last_that_fits(networks, lambda network: network.width, need, limit, len(networks) // 2)
    return candidate.with_network(stage, networks[max(0, position)])


def _unused(planner: Planner, candidate: Candidate, stage: Stage) -> str:
    """Return why a stage leaves much of the budget."""
    limits, network, layout = candidate.context.limits(stage), candidate.networks[stage], candidate.context.layout
    text = ""
    if layout.voxels < SMALL_VOXELS:
        text = f"the volumes are small ({'x'.join(map(str, layout.grid))}), and "
    is_most = network.batch >= limits.batch
    fits = "no larger batch" if is_most else "a larger micro-batch does not fit with its margin"
    if CHANNELS[stage] in planner.given:
        return f"{text}the channels were given, and {'the set asks for ' if is_most else ''}{fits}"
    if network.width < limits.width:
        return f"{text}the next wider network does not fit with its margin"
    return f"{text}{limits.why_width}, which asks for no wider network, and {fits}"
