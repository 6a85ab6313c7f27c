"""What a plan takes from the fingerprint alone, each value with its reason. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.header import grouped
from memory.planning.fingerprint import CT, LABEL_MAPS, SMALL_SET, Fingerprint
from memory.planning.layout import FieldOfView, Layout, layouts
from runtime.files import counted, printable

FEW = 10
"""Below this number of volumes, what is typical of a set is a guess."""
LEAST_OF_CLASS = 4
"""Folders with fewer volumes each, in the median, are patients rather than classes."""
BRIGHT = 1000.0
MANY_CHANNELS = 4
AIR = -500.0
"""A channel with a lower range than this is CT."""
MOSTLY_EMPTY, OCCUPIED_WEIGHT = 0.95, 20.0
"""From this share of background on, occupied voxels count so many times, as in docs/condition_measurements.md."""


@dataclass(frozen=True)
class Choice:
    """The value of a dotted key and why it was chosen; `is_weak`: it rests on little evidence."""

    key: str
    value: Any
    reason: str
    is_weak: bool = False


def as_values(choices: Iterable[Choice]) -> dict[str, Any]:
    """Return the values by key."""
    return {choice.key: choice.value for choice in choices}


def intensity_choices(found: Fingerprint, mode: str | None = None) -> Iterator[Choice]:
    """Choose a window for CT and label maps, and percentiles of each volume for everything else.

    mode: what the user gave; the range then follows it.
    """
    most = found.kinds[found.kind] / found.number
    few = found.number < FEW
    has_window = found.kind in (CT, LABEL_MAPS)
    if mode == "window" and not has_window:
        reason = "from the 1st to the 99th percentile of nearly all volumes, whose scales may differ"
        yield from _range(mode, _rough(found.low.low), _rough(found.high.high), reason, True)
    elif mode == "percentile" and has_window and not found.num_flat:
        yield from _range(mode, 0.5, 99.5, "nearly the whole range of each volume", True)
    elif found.kind == LABEL_MAPS and mode != "percentile":
        reason = "all volumes have few whole values from 0 on, as label maps have, so all keep their meaning"
        yield from _range("window", 0.0, max(1.0, found.largest), reason, True)
    elif found.kind == CT and mode != "percentile":
        upper = BRIGHT if found.high.median <= BRIGHT else 2 * BRIGHT
        reason = (
            f"{found.kinds[CT]} of {found.number} volumes look like CT (lowest values about {found.lowest.median:g}, "
            f"99th percentile {found.high.median:g}), whose values mean the same in every volume"
        )
        yield from _range("window", -1000.0, upper, reason, most < 0.9 or few or upper > BRIGHT)
    elif found.num_flat:
        reason = (
            f"{counted(found.num_flat, 'volume')} of {found.number} are background up to the 99.5th percentile, so the "
            "whole range is kept"
        )
        yield from _range("percentile", 0.0, 100.0, reason, True)
    elif found.background >= MOSTLY_EMPTY:
        reason = f"{found.background:.1%} of a volume are background, so percentiles would cut off what is not"
        yield from _range("percentile", 0.0, 100.0, reason, True)
    else:
        kind = "MR or alike by their values (none negative)" if found.lowest.low >= 0 else "not CT by their values"
        reason = f"the volumes are {kind}, whose scale differs between volumes"
        yield from _range("percentile", 0.5, 99.5, reason, found.lowest.low < 0 or most < 0.9)


def channel_choices(found: Fingerprint) -> Iterator[Choice]:
    """Choose a rule for each channel where one does not suit all of them; only for percentiles of all channels."""
    rules = [_rule(lower, upper, found.background >= MOSTLY_EMPTY) for lower, upper in found.ranges]
    text = "; ".join(f"{number}: {lower:g} to {upper:g}" for number, (lower, upper) in enumerate(found.ranges))
    reason = f"the channels differ (nearly all values of {text})" if len(set(rules)) > 1 else ""
    for number, most in enumerate(found.signed):
        if most and rules[number][0] == "percentile":
            rules[number] = ("window", -_rough(most), _rough(most))
    if any(found.signed):
        reason += f"{'; ' if reason else ''}a window keeps 0 in place where values have both signs"
    if reason:
        for key, values in zip(("mode", "lower", "upper"), zip(*rules, strict=True), strict=True):
            yield Choice(f"data.intensity.{key}", list(values) if len(values) > 1 else values[0], reason, True)


def _rule(lower: float, upper: float, is_mostly_empty: bool) -> tuple[str, float, float]:
    if lower < AIR and upper > 0:
        return "window", -1000.0, BRIGHT if upper <= BRIGHT else 2 * BRIGHT
    return ("percentile", 0.5, 99.5) if lower < upper and not is_mostly_empty else ("percentile", 0.0, 100.0)


def occupancy_choices(found: Fingerprint) -> Iterator[Choice]:
    """Let the occupied voxels of mostly empty volumes count more."""
    if found.background >= MOSTLY_EMPTY:
        reason = f"{found.background:.1%} of a volume are background, which would decide the error alone"
        yield Choice("autoencoder.training.occupied_weight", OCCUPIED_WEIGHT, reason, True)


def _rough(value: float) -> float:
    return float(f"{value:.3g}")


def _range(mode: str, lower: float, upper: float, reason: str, is_weak: bool) -> Iterator[Choice]:
    yield Choice("data.intensity.mode", mode, reason, is_weak)
    yield Choice("data.intensity.lower", lower, "the lower end of that range", is_weak)
    yield Choice("data.intensity.upper", upper, "the upper end of that range", is_weak)


def val_fraction(found: Fingerprint) -> float:
    """Return the share of volumes to hold out."""
    return 0.2 if found.is_small else 0.1


def data_choices(found: Fingerprint, view: FieldOfView, layout: Layout, num_held_out: int) -> Iterator[Choice]:
    """Choose grid, spacing, channels, split and augmentation."""
    finer = view.stored
    change = math.prod(finer) / layout.voxels
    text = "x".join(map(str, finer))
    divided = "the autoencoder divides" if layout.pads_latents else "both networks divide"
    reason = f"about the {text} voxels of the files, rounded to what {divided}"
    if change > 1.3 and layout.voxels < layouts(view)[-1].voxels:
        reason = f"coarser than the files' {text} ({change:.1f} times fewer voxels), the finest that fits the budget"
    yield Choice("data.voxel_size", list(layout.grid), reason, view.is_weak)
    yield Choice("data.resize", view.resize, view.reason, view.is_weak)
    if view.resize == "crop_or_pad":
        yield Choice("data.spacing", layout.stated_spacing, "the field of view divided by the grid", view.is_weak)
    else:
        stated = "x".join(f"{mm:.3g}" for mm in layout.spacing_mm)
        reason = (
            f"stretching to the grid makes voxels of about {stated} mm anyway"
            if found.has_spacing
            else (f"{found.num_without_spacing} of {found.number} files store none")
        )
        yield Choice("data.spacing", None, reason)
    many = found.num_channels > MANY_CHANNELS
    reason = "as many as the files have" + (
        "; if these are points in time, set data.frame to read one volume" if many else ""
    )
    yield Choice("autoencoder.in_channels", found.num_channels, reason, many)
    reason = f"{num_held_out} of {found.number} to validate with"
    yield Choice("data.val_fraction", val_fraction(found), reason)
    reason = f"fewer than {SMALL_SET} volumes" if found.is_small else f"{found.number} volumes vary enough"
    yield Choice("data.use_augmentation", found.is_small, reason)


def class_choices(found: Fingerprint) -> Iterator[Choice]:
    """Choose conditioning by class if folders or labels are classes, and what keeps patients together."""
    sizes = sorted(found.classes.values())
    several = len(sizes) > 1
    are_patients = several and float(np.median(sizes)) < LEAST_OF_CLASS
    if several and not are_patients:
        alone = [printable(name) for name, count in found.classes.items() if count == 1]
        reason = f"{len(sizes)} classes of {sizes[0]} to {sizes[-1]} volumes"
        reason += f"; a single volume in: {', '.join(alone[:5])}" if alone else ""
        yield Choice("ldm.conditioning.type", "class", reason, sizes[0] < FEW)
        yield Choice("ldm.conditioning.num_classes", len(sizes), "the classes of the data")
    else:
        reason = "the volumes have no classes"
        if are_patients:
            reason = f"{len(sizes)} names of {sizes[0]} to {sizes[-1]} volumes look like patients, not classes"
        elif len(sizes) == 1:
            reason = f"all volumes are of one class ({printable(next(iter(found.classes)))})"
        yield Choice("ldm.conditioning.type", "none", reason, are_patients)
        yield Choice("ldm.conditioning.num_classes", 0, "no classes")
    group, reason = found.group_by, "by their names some patients have several volumes, which stay together"
    folders = {item.name.rpartition("/")[0] for item in found.found}
    if group is None and are_patients and 1 < len(folders) < found.number:
        group, reason = "folder", "volumes in one folder stay on one side of the split"
    yield Choice(
        "data.group_by", group, reason if group else "no names suggest several volumes of one patient", bool(group)
    )


def notes(found: Fingerprint) -> list[str]:
    """Return what the user should know besides the values."""
    lines = []
    if found.problems:
        shown = [*grouped(found.problems)]
        lines.append(
            f"{counted(len(found.problems), 'problem')} with files that this plan does without; training refuses the "
            f"folder until they are repaired or moved away: {' | '.join(shown)}"
        )
    if found.is_small:
        lines.append(
            f"{counted(found.number, 'volume')} are few: a diffusion model tends to memorise them. The plan augments "
            "and keeps the networks small; before you trust or publish samples, compare them with their nearest "
            "training volumes in report.html."
        )
    singles = [printable(name) for name, count in found.classes.items() if count == 1]
    if singles and len(found.classes) > 1:
        lines.append(
            f"{counted(len(singles), 'class')} with a single volume ({', '.join(singles[:5])}"
            f"{' ...' if len(singles) > 5 else ''}): samples of such a class can only be copies of it."
        )
    if len(found.kinds) > 1:
        kinds = ", ".join(f"{count} look like {kind}" for kind, count in found.kinds.items())
        lines.append(f"Several kinds of volumes in one set: {kinds}.")
    if found.unusual:
        some = "; ".join(found.unusual[:3]) + (f"; and {len(found.unusual) - 3} more" if len(found.unusual) > 3 else "")
        lines.append(f"Unusual, worth a look: {some}.")
    return lines
