"""Makes a plan: the recommended config within memory and hours, and a faster and a larger one beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from memory.predict.prediction import GIB, Stage
from planning.choice import Choice
from planning.choices import notes
from planning.fingerprint import Fingerprint
from planning.networks import Network
from planning.planner import STAGES, Draft, Planner
from planning.search import Verdict, last_that_fits
from planning.sizing import UNET_WIDTHS, WIDTHS
from settings import Settings

LEAST_SHARE = 0.75
"""A plan that uses less of the budget says why."""
SLOWER = 2.0
"""How many times their least time updates are taken to need, because nothing real has checked the predicted hours."""
SMALL_VOXELS = 1_000_000
"""Volumes below this size do not fill a GPU."""
RECOMMENDED = "recommended"


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
    if hours is not None:
        draft, more = _within_hours(planner, draft, hours)
        lines += more
    alternatives = {"faster": _faster(draft), "larger": _larger(planner, draft)} if has_alternatives else {}
    for _, other in alternatives.values():
        settings = planner.settings(other)
        for stage in STAGES:
            planner.ask.start(settings, stage)
    rows = {name: Row(name, *planner.verdicts(other), why) for name, (why, other) in alternatives.items()}
    chosen = Row(RECOMMENDED, *planner.verdicts(draft), _why(draft, planner))
    verdicts = zip(STAGES, (chosen.first, chosen.second), strict=True)
    unused = [_unused(draft, stage, verdict, hours) for stage, verdict in verdicts]
    return Plan(
        planner.fingerprint,
        tuple(planner.choices(draft)),
        (rows["faster"], chosen, _judged(rows["larger"])) if has_alternatives else (chosen,),
        tuple(lines),
        tuple(line for line in unused if line),
        planner.ask.budget_bytes,
        hours,
    )


def expected_hours(verdict: Verdict) -> float:
    """Return the hours to reckon with: twice the least, or what measured steps make of it."""
    return verdict.hours * (SLOWER if verdict.prediction.time_correction == 1.0 else 1.0)


def _within_hours(planner: Planner, draft: Draft, hours: float) -> tuple[Draft, list[str]]:
    """Cut the steps by up to a half, then the widths, then the steps as far as it takes."""
    total = sum(expected_hours(verdict) for verdict in planner.verdicts(draft))
    if total <= hours:
        return draft, []
    before = draft
    if hours / total < 0.5:
        for stage in STAGES:
            draft = _narrower(planner, draft, stage, hours / total)
        total = sum(expected_hours(verdict) for verdict in planner.verdicts(draft))
    share = min(1.0, int(100 * hours / total) / 100)
    draft = replace(draft, scene=replace(draft.scene, shortened=max(0.01, share)))
    narrower = [
        f"{stage} {draft.network(stage).width} instead of {before.network(stage).width}"
        for stage in STAGES
        if draft.network(stage) != before.network(stage)
    ]
    text = f"To keep to {hours:g} hours, at twice the least time of an update, steps are cut to {share:.0%}"
    return draft, [text + (f" and channels are fewer ({', '.join(narrower)})" if narrower else "") + "."]


def _narrower(planner: Planner, draft: Draft, stage: Stage, share: float) -> Draft:
    """Return the draft with the widest network whose half number of steps takes this share of the time."""
    own = draft.network(stage)
    every = WIDTHS if stage == "autoencoder" else UNET_WIDTHS
    networks = [replace(own, width=width) for width in every if width <= own.width]
    limit = expected_hours(planner.verdict(draft, stage)) * share

    def need(network: Network) -> float:
        return 0.5 * expected_hours(planner.verdict(draft.with_network(stage, network), stage))

    position = last_that_fits(networks, lambda network: network.width, need, limit, len(networks) // 2)
    return draft.with_network(stage, networks[max(0, position)])


def _faster(draft: Draft) -> tuple[str, Draft]:
    def halved(width: int, every: tuple[int, ...]) -> int:
        return max((w for w in every if w <= width / 2), default=every[0])

    first = replace(draft.first, width=halved(draft.first.width, WIDTHS))
    second = replace(draft.second, width=halved(draft.second.width, UNET_WIDTHS))
    return "half the channels: less detail, sooner", replace(draft, first=first, second=second)


def _larger(planner: Planner, draft: Draft) -> tuple[str, Draft]:
    """Return the next grid if there is a finer one, else wider networks."""
    finer = [layout for layout in planner.layouts() if layout.voxels > draft.scene.layout.voxels]
    if finer:
        return "finer voxels", replace(draft, scene=planner.scene(finer[0], draft.scene.shortened))
    first = replace(draft.first, width=_half_more(draft.first.width, 4))
    second = replace(draft.second, width=_half_more(draft.second.width, 16))
    return "half as many channels again", replace(draft, first=first, second=second)


def _half_more(width: int, step: int) -> int:
    return -(-3 * width // (2 * step)) * step


def _judged(row: Row) -> Row:
    """Return a row whose text says whether it fits."""
    needed = max(row.first.needed_bytes, row.second.needed_bytes) / GIB
    text = "fits too, but takes longer and asks for more volumes"
    return replace(row, why=f"{row.why}: {text if row.fits else f'needs {needed:.1f} GiB with its margin'}")


def _why(draft: Draft, planner: Planner) -> str:
    sizing = draft.scene.sizing
    finest = planner.layouts()[-1].voxels == draft.scene.layout.voxels
    grid = "the voxels of the files" if finest else "the finest grid that fits"
    wide = "as wide as the set supports" if draft.first.width >= sizing.width else "the widest that fits"
    return f"{grid}, {wide}" + (", in patches" if draft.first.patch else "")


def _unused(draft: Draft, stage: Stage, verdict: Verdict, hours: float | None) -> str:
    if verdict.share >= LEAST_SHARE:
        return ""
    number = 1 + STAGES.index(stage)
    sizing, network, grid = draft.scene.sizing, draft.network(stage), draft.scene.layout.grid
    width, batch = (sizing.width, sizing.batch) if stage == "autoencoder" else (sizing.unet_width, sizing.unet_batch)
    why = sizing.why_width if stage == "autoencoder" else sizing.why_unet_width
    used = verdict.prediction.required_bytes / GIB
    text = f"stage {number} uses {used:.1f} of {verdict.budget_bytes / GIB:g} GiB ({verdict.share:.0%}): "
    if hours is not None and draft.scene.shortened < 1:
        return f"{text}more would not keep to {hours:g} hours"
    small = "x".join(map(str, grid))
    text += f"the volumes are small ({small}), and " if draft.scene.layout.voxels < SMALL_VOXELS else ""
    if network.width < width:
        return f"{text}the next wider network does not fit with its margin"
    fits = "no larger batch" if network.batch >= batch else "a larger micro-batch does not fit with its margin"
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
