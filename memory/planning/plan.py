"""Makes a plan: the recommended config within memory and hours, and a faster and a larger one beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from memory.planning.choice import Choice
from memory.planning.choices import notes
from memory.planning.fingerprint import Fingerprint
from memory.planning.networks import LEAST_STEPS, Network
from memory.planning.planner import STAGES, Draft, Planner
from memory.planning.search import Verdict, last_that_fits
from memory.planning.sizing import UNET_WIDTHS, WIDTHS
from memory.predict.prediction import GIB, Stage
from settings import ConfigError, Problem, Settings

LEAST_SHARE = 0.75
"""A plan that uses less of the budget says why."""
HALVINGS = 12
"""How often the range of the steps is halved when they are cut to keep to the hours."""
SMALL_VOXELS = 1_000_000
"""Volumes below this size do not fill a GPU."""
RECOMMENDED = "recommended"
CHANNELS = {"autoencoder": "autoencoder.num_channels", "ldm": "ldm.unet.num_channels"}


@dataclass(frozen=True)
class Row:
    """One of the alternatives: its name, the verdicts on both stages, and what speaks for or against it."""

    name: str
    first: Verdict
    second: Verdict
    why: str

    @property
    def settings(self) -> Settings:
        """Return the config."""
        return self.first.settings

    @property
    def fits(self) -> bool:
        """Return whether both stages fit with their margins."""
        return self.first.fits and self.second.fits


@dataclass(frozen=True)
class Plan:
    """The recommended config with its reasons, and the alternatives beside it.

    `unused` says for each stage that leaves much of the budget why it does. `hours` is the limit that was given.
    """

    fingerprint: Fingerprint
    choices: tuple[Choice, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    unused: tuple[str, ...]
    budget_bytes: int
    hours: float | None

    @property
    def recommended(self) -> Row:
        """Return the row that the config is written from."""
        return next(row for row in self.rows if row.name == RECOMMENDED)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {
            "fingerprint": self.fingerprint.to_json(),
            "budget_bytes": self.budget_bytes,
            "gpu": self.recommended.first.gpu.name,
            "rows": [_row_json(row) for row in self.rows],
            "unused": list(self.unused),
            "notes": list(self.notes),
            "choices": {choice.key: choice.to_json() for choice in self.choices},
        }


def make_plan(planner: Planner, hours: float | None = None, has_alternatives: bool = True) -> Plan:
    """Search upward for the most capable config; raise `NothingFitsError` if there is none.

    has_alternatives: also predict a faster and a larger one, which takes a third of the time.
    """
    draft = planner.best_of_all()
    lines = notes(planner.fingerprint, draft.scene.sizing)
    draft = planner.settled(draft)
    within = None
    if hours is not None:
        draft, cuts = _within_hours(planner, draft, hours)
        within = hours if cuts else None
        lines += cuts
    alternatives = {"faster": _faster(planner, draft), "larger": _larger(planner, draft)} if has_alternatives else {}
    for _, other in alternatives.values():
        settings = planner.settings(other)
        for stage in STAGES:
            planner.ask.start(settings, stage)
    rows = {name: Row(name, *planner.verdicts(other), why) for name, (why, other) in alternatives.items()}
    chosen = Row(RECOMMENDED, *planner.verdicts(draft), _why(draft, planner, within is not None))
    if not chosen.fits:
        raise planner.nothing_fits(draft)
    verdicts = zip(STAGES, (chosen.first, chosen.second), strict=True)
    unused = [_unused(planner, draft, stage, verdict, within) for stage, verdict in verdicts]
    return Plan(
        planner.fingerprint,
        tuple(planner.choices(draft)),
        (rows["faster"], chosen, _judged(rows["larger"])) if has_alternatives else (chosen,),
        tuple(lines),
        tuple(line for line in unused if line),
        planner.ask.budget_bytes,
        hours,
    )


def _within_hours(planner: Planner, draft: Draft, hours: float) -> tuple[Draft, list[str]]:
    """Cut the steps by up to a half, then the widths, then the steps as far as it takes; raise `ConfigError`."""

    def total(draft: Draft) -> float:
        return sum(verdict.expected_hours for verdict in planner.verdicts(draft))

    needed = total(draft)
    if needed <= hours:
        return draft, []
    before = draft
    if hours / needed < 0.5:
        for stage in STAGES:
            draft = _narrower(planner, draft, stage, hours / needed)
    if total(draft) > hours:
        draft = _shorter(draft, total, hours)
    narrower = [
        f"{stage} {draft.network(stage).width} instead of {before.network(stage).width}"
        for stage in STAGES
        if draft.network(stage) != before.network(stage)
    ]
    share = draft.scene.shortened
    cuts = [f"steps are cut to {share:.2g} of what suits the set"] if share < 1 else []
    cuts += [f"channels are fewer ({', '.join(narrower)})"] if narrower else []
    return draft, [f"To keep to {hours:g} hours, at twice the least time of an update, {' and '.join(cuts)}."]


def _shorter(draft: Draft, total: Callable[[Draft], float], hours: float) -> Draft:
    """Return the draft with the most steps that keep to the hours.

    Validations do not become fewer in proportion to the steps, so their share is searched.
    """

    def cut(share: float) -> Draft:
        return replace(draft, scene=replace(draft.scene, shortened=share))

    least = total(cut(0.0))
    if least > hours:
        allowed = f"allowed: at least {1.1 * least:.2g}, what {LEAST_STEPS} updates or given steps take in both stages"
        raise ConfigError([Problem("--hours", f"found {hours:g}", allowed, "give more, or a coarser data.voxel_size")])
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if total(cut(middle)) <= hours else (low, middle)
    return cut(low)


def _narrower(planner: Planner, draft: Draft, stage: Stage, share: float) -> Draft:
    """Return the draft with the widest network whose half number of steps takes this share of the time."""
    given = {key for key in planner.given if key.startswith(f"{stage}.")}
    if given & {f"{stage}.training.max_hours", CHANNELS[stage]}:
        return draft
    own = draft.network(stage)
    every = WIDTHS if stage == "autoencoder" else UNET_WIDTHS
    networks = [replace(own, width=width) for width in every if width <= own.width]
    limit = planner.verdict(draft, stage).expected_hours * share
    part = 1.0 if f"{stage}.training.max_steps" in given else 0.5

    def need(network: Network) -> float:
        return part * planner.verdict(draft.with_network(stage, network), stage).expected_hours

    position = last_that_fits(networks, lambda network: network.width, need, limit, len(networks) // 2)
    return draft.with_network(stage, networks[max(0, position)])


def _faster(planner: Planner, draft: Draft) -> tuple[str, Draft]:
    """Return narrower networks, or fewer steps if the widths are given or already the smallest."""

    def halved(width: int, every: tuple[int, ...]) -> int:
        return max((w for w in every if w <= width / 2), default=min(width, every[0]))

    first = replace(draft.first, width=halved(draft.first.width, WIDTHS))
    second = replace(draft.second, width=halved(draft.second.width, UNET_WIDTHS))
    narrow = replace(draft, first=first, second=second)
    if where := _where_channels_differ(planner, draft, narrow):
        return f"fewer channels{where}: less detail, sooner", narrow
    short = replace(draft, scene=replace(draft.scene, shortened=draft.scene.shortened / 2))
    if planner.settings(short) != planner.settings(draft):
        return "half the steps: less trained, sooner", short
    return "the same, because channels and steps were given", draft


def _larger(planner: Planner, draft: Draft) -> tuple[str, Draft]:
    """Return the next grid if there is a finer one, else wider networks."""
    finer = [layout for layout in planner.layouts() if layout.voxels > draft.scene.layout.voxels]
    if finer:
        patch = draft.first.patch and planner.nearest_patch(finer[0], draft.first.patch)
        scene = planner.scene(finer[0], draft.scene.shortened)
        larger = replace(draft, scene=scene, first=replace(draft.first, patch=patch))
        # What the user gave may suit the recommended grid only.
        with suppress(ConfigError):
            planner.settings(larger)
            return "finer voxels", larger
    first = replace(draft.first, width=_half_more(draft.first.width, 4))
    second = replace(draft.second, width=_half_more(draft.second.width, 16))
    wide = replace(draft, first=first, second=second)
    where = _where_channels_differ(planner, draft, wide)
    return (f"more channels{where}", wide) if where else ("the same, because the channels were given", draft)


def _where_channels_differ(planner: Planner, one: Draft, other: Draft) -> str:
    """Return in which stages two drafts have different channels, as text after "channels"; empty if in none."""
    a, b = planner.settings(one), planner.settings(other)
    first = a.autoencoder.num_channels != b.autoencoder.num_channels
    second = a.ldm.unet.num_channels != b.ldm.unet.num_channels
    return {(True, True): " in both stages", (True, False): " in stage 1", (False, True): " in stage 2"}.get(
        (first, second), ""
    )


def _half_more(width: int, step: int) -> int:
    return -(-3 * width // (2 * step)) * step


def _judged(row: Row) -> Row:
    """Return a row whose text says whether it fits."""
    needed = max(row.first.needed_bytes, row.second.needed_bytes) / GIB
    if row.why.startswith("the same"):
        return row
    text = "fits too, but takes longer and asks for more volumes"
    return replace(row, why=f"{row.why}: {text if row.fits else f'needs {needed:.1f} GiB with its margin'}")


def _why(draft: Draft, planner: Planner, is_narrowed: bool) -> str:
    sizing = draft.scene.sizing
    finest = planner.layouts()[-1].voxels == draft.scene.layout.voxels
    grid = "the voxels of the files" if finest else "the finest grid that fits"
    grid = "the grid that was given" if "data.voxel_size" in planner.given else grid
    wide = "as wide as the set supports" if draft.first.width >= sizing.width else "the widest that fits"
    wide = "the widest within the hours" if is_narrowed and draft.first.width < sizing.width else wide
    wide = "channels as given" if CHANNELS["autoencoder"] in planner.given else wide
    return f"{grid}, {wide}" + (", in patches" if draft.first.patch else "")


def _unused(planner: Planner, draft: Draft, stage: Stage, verdict: Verdict, within: float | None) -> str:
    """Return why a stage leaves much of the budget; `within`: the hours that the draft was cut to."""
    if verdict.share >= LEAST_SHARE:
        return ""
    number = 1 + STAGES.index(stage)
    sizing, network, grid = draft.scene.sizing, draft.network(stage), draft.scene.layout.grid
    width, batch = (sizing.width, sizing.batch) if stage == "autoencoder" else (sizing.unet_width, sizing.unet_batch)
    why = sizing.why_width if stage == "autoencoder" else sizing.why_unet_width
    used = verdict.prediction.required_bytes / GIB
    text = f"stage {number} uses {used:.1f} of {verdict.budget_bytes / GIB:g} GiB ({verdict.share:.0%}): "
    if within is not None:
        return f"{text}more would not keep to {within:g} hours"
    small = "x".join(map(str, grid))
    text += f"the volumes are small ({small}), and " if draft.scene.layout.voxels < SMALL_VOXELS else ""
    is_most = network.batch >= batch
    fits = "no larger batch" if is_most else "a larger micro-batch does not fit with its margin"
    if CHANNELS[stage] in planner.given:
        return f"{text}the channels were given, and {'the set asks for ' if is_most else ''}{fits}"
    if network.width < width:
        return f"{text}the next wider network does not fit with its margin"
    return f"{text}{why}, which asks for no wider network, and {fits}"


def _row_json(row: Row) -> dict[str, Any]:
    settings = row.settings
    values: dict[str, Any] = {
        "name": row.name,
        "why": row.why,
        "fits": row.fits,
        "grid": list(settings.data.voxel_size),
    }
    for stage, verdict in zip(STAGES, (row.first, row.second), strict=True):
        values[stage] = {
            "required_bytes": verdict.prediction.required_bytes,
            "needed_bytes": verdict.needed_bytes,
            "share": round(verdict.share, 4),
            "seconds_per_step": verdict.prediction.seconds_per_step(verdict.gpu),
            "least_hours": verdict.hours,
            "fits": verdict.fits,
        }
    return values
