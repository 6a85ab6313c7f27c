"""Every value that a plan sets, with its reason: from the data, and from the networks that were found to fit.

What the number and the size of the volumes allow are rules of thumb; what was measured is in docs/recipe.md. Never
imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data.header import grouped
from memory.planning.fingerprint import CT, LABEL_MAPS, SMALL_SET, Fingerprint
from memory.planning.layout import FieldOfView, Grid, Layout, layouts
from memory.predict.prediction import Stage
from runtime.files import counted, printable

Values = dict[str, Any]

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
MOST_TOKENS = 4096
"""Levels with more voxels get no attention: its time grows with their square."""
LEAST_STEPS = 100
"""No stage is cut to fewer updates, however few hours there are."""
FIRST_RATES: dict[Stage, float] = {"autoencoder": 1e-3, "ldm": 1.5e-3}
"""Learning rates at 16 channels."""
LEAST_RATE = 1e-4
FULL_PRECISION_VOXELS = 400_000
"""Volumes up to this size train in full precision: they need little memory anyway."""
CHANNELS: dict[Stage, str] = {"autoencoder": "autoencoder.num_channels", "ldm": "ldm.unet.num_channels"}
WIDTHS: dict[Stage, tuple[int, ...]] = {
    "autoencoder": (8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64),
    "ldm": (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
}
"""Channels of the first level to choose from."""
PASSES: dict[Stage, int] = {"autoencoder": 200, "ldm": 500}
STEPS_RANGES: dict[Stage, tuple[int, int]] = {"autoencoder": (4_000, 60_000), "ldm": (10_000, 150_000)}
"""How often the volumes of a set are seen, within a range of updates."""
ITEMS: dict[Stage, str] = {"autoencoder": "volume", "ldm": "latent"}
FEW_VOXELS = 2e7
"""Sets with fewer voxels in all volumes together get the smallest networks, and small batches for more updates."""
_BY_VOXELS = ((FEW_VOXELS, 16), (5e7, 32), (3e8, 48), (math.inf, 64))
_UNET_BY_NUMBER = ((SMALL_SET, 48), (200, 128), (1000, 160), (5000, 192), (math.inf, 256))
_UNET_BY_LATENTS = ((2e6, 32), (4e6, 64), (1e7, 96), (math.inf, 256))


@dataclass(frozen=True)
class Choice:
    """The value of a dotted key and why it was chosen; `is_weak`: it rests on little evidence."""

    key: str
    value: Any
    reason: str
    is_weak: bool = False


def as_values(choices: Iterable[Choice]) -> Values:
    """Return the values by key."""
    return {choice.key: choice.value for choice in choices}


@dataclass(frozen=True)
class Network:
    """One way to train a stage: its width, its micro-batch, whether it checkpoints, and the patch of stage 1."""

    width: int
    batch: int = 1
    checkpoints: bool = True
    patch: Grid | None = None


@dataclass(frozen=True)
class Limit:
    """The widest network and the largest batch that a set supports; `why_width` follows "because"."""

    width: int
    why_width: str
    batch: int


@dataclass(frozen=True)
class PlannedSet:
    """What all candidates of a plan share: the set, how it gets to a grid, what was given, and how it is split."""

    facts: Fingerprint
    view: FieldOfView
    given: Values
    num_volumes: tuple[int, int]
    name: str

    def limits(self, layout: Layout) -> dict[Stage, Limit]:
        """Return what the set supports on a grid."""
        number, is_small = self.facts.number, self.facts.is_small
        volumes, voxels, latents = counted(number, "volume"), number * layout.voxels, number * math.prod(layout.latent)
        width, why = _first(_BY_VOXELS, voxels), f"the set has {_count(voxels)} voxels on this grid ({volumes})"
        if is_small and width > 24:
            width, why = 24, f"the set is small ({volumes})"
        by_number, by_latents = _first(_UNET_BY_NUMBER, number), _first(_UNET_BY_LATENTS, latents)
        why_unet = f"the set has {volumes}"
        if by_latents < by_number:
            why_unet = f"the latents of the set have {_count(latents)} voxels"
        batch = 2 if is_small or voxels < FEW_VOXELS else 4
        unet_batch = 4 if is_small else 8 if number < 2000 else 16
        unet = Limit(min(by_number, by_latents), why_unet, unet_batch)
        return {"autoencoder": Limit(width, why, batch), "ldm": unet}


@dataclass(frozen=True)
class Candidate:
    """A grid and a network for each stage, within the limits of the set; `steps_share`: how far hours cut the steps."""

    set: PlannedSet
    layout: Layout
    limits: dict[Stage, Limit]
    networks: dict[Stage, Network]
    steps_share: float = 1.0

    def changed(self, stage: Stage, network: Network) -> Candidate:
        """Return a candidate with another network for a stage."""
        return replace(self, networks={**self.networks, stage: network})

    def choices(self) -> list[Choice]:
        """Return every value that the plan sets, with its reason; what the user gave is taken."""
        facts, given, view = self.set.facts, self.set.given, self.set.view
        is_full = self.layout.voxels <= FULL_PRECISION_VOXELS
        chosen = [
            Choice("name", self.set.name, "outputs go to runs/<name>"),
            Choice("data.source", facts.source, "given as --data"),
            *_data_choices(facts, view, self.layout, self.set.num_volumes[1]),
            *_intensity_choices(facts, given.get("data.intensity.mode")),
            *([] if any(key.startswith("data.intensity.") for key in given) else _channel_choices(facts)),
            *class_choices(facts),
            *self._autoencoder_choices(),
            *self._unet_choices(),
            Choice(
                "device.mixed_precision",
                not is_full,
                f"{'small volumes need little' if is_full else 'half the'} memory",
            ),
        ]
        by_key = {choice.key: choice for choice in chosen}
        for key, value in given.items():
            by_key[key] = Choice(key, value, "given on the command line")
        return list(by_key.values())

    def _autoencoder_choices(self) -> Iterator[Choice]:
        layout, network, given = self.layout, self.networks["autoencoder"], self.set.given
        where, is_few = "autoencoder.training", self.set.facts.number * layout.voxels < FEW_VOXELS
        channels = self._channels("autoencoder", len(layout.strides) + 1)
        yield channels
        ratio = max(layout.spacing_mm) / min(layout.spacing_mm)
        if any(len(set(stride)) > 1 for stride in layout.strides):
            reason = f"axes with long or few voxels are halved later or not at all (spacing {ratio:.1f} to 1)"
            yield Choice("autoencoder.strides", [list(stride) for stride in layout.strides], reason)
        else:
            yield Choice("autoencoder.strides", 2, f"voxels are about as long as wide ({ratio:.1f} to 1)")
        in_channels = given.get("autoencoder.in_channels") or self.set.facts.num_channels
        shrinks, tokens = math.prod(layout.factor), math.prod(layout.latent)
        latent_channels = (8 if shrinks > 64 else 4) + 2 * (in_channels - 1)
        fewer = shrinks * in_channels / latent_channels
        reason = f"a latent of {'x'.join(map(str, layout.latent))}, {fewer:.0f} times fewer values"
        yield Choice("autoencoder.latent_channels", latent_channels, reason)
        yield Choice("autoencoder.num_res_blocks", 1 if is_few else 2, "1 for sets of few voxels, else 2")
        attends = tokens <= MOST_TOKENS and network.patch is None and not given.get("data.patch_size")
        reason = f"the lowest level has {tokens:,} voxels; above {MOST_TOKENS:,} attention takes most of the time"
        yield Choice("autoencoder.attention_levels", [*[False] * (len(channels.value) - 1), attends], reason)
        whole = (
            "whole volumes fit" if network.patch is None else "whole volumes would leave room for narrow networks only"
        )
        yield Choice("data.patch_size", list(network.patch) if network.patch else None, whole)
        width, grid = channels.value[0], given.get("data.patch_size") or network.patch or layout.grid
        training = list(self._training("autoencoder", width, layout.voxels / math.prod(grid)))
        yield from training
        rate, steps = (as_values(training)[f"{where}.{name}"] for name in ("learning_rate", "max_steps"))
        yield Choice(f"{where}.discriminator_learning_rate", min(rate, 2e-4), "at most that of the autoencoder", True)
        yield Choice("autoencoder.initialisation", "haar", "docs/recipe.md")
        yield Choice(f"{where}.reconstruction_loss", "l2", "docs/recipe.md")
        yield Choice(f"{where}.edge_weight", 1.0, "docs/recipe.md")
        yield Choice(f"{where}.perceptual_weight", 0.1, "keeps the term small beside the reconstruction error", True)
        layers = max((n for n in (1, 2, 3) if min(grid) >= 3 * 2**n), default=0)
        reason = f"{layers} layers need {3 * 2**layers} voxels along the shortest axis of {min(grid)}"
        yield Choice(
            f"{where}.adversarial_weight", 0.01 if layers else 0.0, reason if layers else "too few voxels for one"
        )
        yield Choice(f"{where}.discriminator.num_layers_d", max(1, layers), reason if layers else "not used")
        yield Choice(f"{where}.discriminator.num_channels", min(32, max(8, width)), "as the autoencoder, from 8 to 32")
        start = min(2000, max(200, steps // 10), steps // 2)
        reason = f"after {start / steps:.0%} of the run, once reconstructions are plausible"
        yield Choice(f"{where}.adversarial_start_step", start, reason)
        if self.set.facts.background >= MOSTLY_EMPTY:
            reason = f"{self.set.facts.background:.1%} of a volume are background, which would decide the error alone"
            yield Choice(f"{where}.occupied_weight", OCCUPIED_WEIGHT, reason, True)

    def _unet_choices(self) -> Iterator[Choice]:
        layout, channels = self.layout, self._channels("ldm", self.layout.unet_levels)
        yield channels
        attends = [math.prod(layout.latent) // 8**level <= MOST_TOKENS for level in range(len(channels.value))]
        yield Choice("ldm.unet.attention_levels", attends, f"levels of at most {MOST_TOKENS:,} voxels")
        heads = math.gcd(32, *channels.value)
        yield Choice("ldm.unet.num_head_channels", heads, "32, or less where that does not divide the channels")
        yield from self._training("ldm", channels.value[0])

    def _channels(self, stage: Stage, levels: int) -> Choice:
        """Choose the channels that the user gave, else the width of the network, doubled twice from level to level."""
        key, limit, width = CHANNELS[stage], self.limits[stage], self.networks[stage].width
        reason = f"at most {limit.width} at the highest resolution, because {limit.why_width}"
        if width < limit.width:
            reason = f"the widest that fits; up to {limit.width} would suit, because {limit.why_width}"
        return Choice(key, list(self.set.given.get(key) or [width * min(2**n, 4) for n in range(levels)]), reason)

    def _training(self, stage: Stage, width: int, parts: float = 1.0) -> Iterator[Choice]:
        """Choose batches, steps, checkpointing and learning rate; `parts`: how many patches make a volume."""
        where, wanted, item, given = f"{stage}.training", self.limits[stage].batch, ITEMS[stage], self.set.given
        network, num_training = self.networks[stage], self.set.num_volumes[0]
        batch = given.get(f"{where}.batch_size") or network.batch
        accumulation = given.get(f"{where}.gradient_accumulation_steps") or max(1, round(wanted / batch))
        whole = "a whole update at once, which fits"
        reason = whole if batch >= wanted else f"as many as fit of the {wanted} of an update"
        yield Choice(f"{where}.batch_size", batch, reason)
        yield Choice(f"{where}.gradient_accumulation_steps", accumulation, f"about {wanted} {item}s per update")
        least, most = STEPS_RANGES[stage]
        steps = PASSES[stage] * min(parts, 8.0) * num_training / (batch * accumulation)
        steps = round(min(most, max(least, steps)) / 1000) * 1000
        if self.steps_share < 1:
            steps = max(LEAST_STEPS, int(steps * self.steps_share / 100) * 100)
        steps = int(given.get(f"{where}.max_steps") or steps)
        passes = steps * batch * accumulation / num_training / max(1.0, parts)
        reason = f"about {passes:,.0f} passes over {counted(num_training, f'training {item}')}"
        if self.steps_share < 1:
            reason += f", cut to {self.steps_share:.0%} to keep to the hours"
        yield Choice(f"{where}.max_steps", steps, reason, self.steps_share < 0.5)
        fits = (
            "needed to fit, for about a third more time" if network.checkpoints else "it fits without, which is faster"
        )
        yield Choice(f"{where}.use_gradient_checkpointing", network.checkpoints, fits)
        first = FIRST_RATES[stage]
        rate = max(LEAST_RATE, min(first, first * 16 / width))
        reason = f"{first:g} at 16 channels, measured in short runs; less for wider networks, not measured"
        yield Choice(f"{where}.learning_rate", float(f"{rate:.2g}"), reason, width != 16)
        every = max(100, steps // 20)
        for name in ("validate_every", "save_every"):
            yield Choice(f"{where}.{name}", every, f"{counted(math.ceil(steps / every), 'time')} in the run")


def _intensity_choices(facts: Fingerprint, mode: str | None) -> Iterator[Choice]:
    """Choose a window for CT and label maps, and percentiles of each volume for everything else.

    mode: what the user gave; the range then follows it.
    """
    most = facts.kinds[facts.kind] / facts.number
    has_window = facts.kind in (CT, LABEL_MAPS)
    percentile, whole = ("percentile", 0.5, 99.5), ("percentile", 0.0, 100.0)
    is_weak = True
    if mode == "window" and not has_window:
        rule = (mode, _rough(facts.low.low), _rough(facts.high.high))
        reason = "from the 1st to the 99th percentile of nearly all volumes, whose scales may differ"
    elif mode == "percentile" and has_window and not facts.num_flat:
        rule, reason = percentile, "nearly the whole range of each volume"
    elif facts.kind == LABEL_MAPS and mode != "percentile":
        rule = ("window", 0.0, max(1.0, facts.largest))
        reason = "all volumes have few whole values from 0 on, as label maps have, so all keep their meaning"
    elif facts.kind == CT and mode != "percentile":
        rule = ("window", -1000.0, _upper(facts.high.median))
        reason = (
            f"{facts.kinds[CT]} of {facts.number} volumes look like CT (lowest values about {facts.lowest.median:g}, "
            f"99th percentile {facts.high.median:g}), whose values mean the same in every volume"
        )
        is_weak = most < 0.9 or facts.number < FEW or rule[2] > BRIGHT
    elif facts.num_flat:
        number = f"{counted(facts.num_flat, 'volume')} of {facts.number}"
        rule, reason = whole, f"{number} are background up to the 99.5th percentile, so the whole range is kept"
    elif facts.background >= MOSTLY_EMPTY:
        rule = whole
        reason = f"{facts.background:.1%} of a volume are background, so percentiles would cut off what is not"
    else:
        kind = "MR or alike by their values (none negative)" if facts.lowest.low >= 0 else "not CT by their values"
        rule, reason = percentile, f"the volumes are {kind}, whose scale differs between volumes"
        is_weak = facts.lowest.low < 0 or most < 0.9
    reasons = (reason, "the lower end of that range", "the upper end of that range")
    for name, value, why in zip(("mode", "lower", "upper"), rule, reasons, strict=True):
        yield Choice(f"data.intensity.{name}", value, why, is_weak)


def _channel_choices(facts: Fingerprint) -> Iterator[Choice]:
    """Choose a rule for each channel where one does not suit all of them; only for percentiles of all channels."""
    rules: list[tuple[str, float, float]] = []
    for lower, upper in facts.ranges:
        is_whole = lower >= upper or facts.background >= MOSTLY_EMPTY
        rule = ("percentile", 0.0, 100.0) if is_whole else ("percentile", 0.5, 99.5)
        rules.append(("window", -1000.0, _upper(upper)) if lower < AIR and upper > 0 else rule)
    if len(set(rules)) > 1:
        text = "; ".join(f"{number}: {lower:g} to {upper:g}" for number, (lower, upper) in enumerate(facts.ranges))
        for name, values in zip(("mode", "lower", "upper"), zip(*rules, strict=True), strict=True):
            reason = f"the channels differ (nearly all values of {text})"
            yield Choice(f"data.intensity.{name}", list(values), reason, True)


def _upper(high: float) -> float:
    """Return the upper end of a window of CT."""
    return BRIGHT if high <= BRIGHT else 2 * BRIGHT


def _rough(value: float) -> float:
    return float(f"{value:.3g}")


def val_fraction(facts: Fingerprint) -> float:
    """Return the share of volumes to hold out."""
    return 0.2 if facts.is_small else 0.1


def _data_choices(facts: Fingerprint, view: FieldOfView, layout: Layout, num_held_out: int) -> Iterator[Choice]:
    """Choose grid, spacing, channels, split and augmentation."""
    stored = [round(mm / step) for mm, step in zip(view.size_mm, view.spacing_mm, strict=True)]
    change, text = math.prod(stored) / layout.voxels, "x".join(map(str, stored))
    divided = "the autoencoder divides" if layout.pads_latents else "both networks divide"
    reason = f"about the {text} voxels of the files, rounded to what {divided}"
    if change > 1.3 and layout.voxels < layouts(view)[-1].voxels:
        reason = f"coarser than the files' {text} ({change:.1f} times fewer voxels), the finest that fits the budget"
    yield Choice("data.voxel_size", list(layout.grid), reason, view.is_weak)
    yield Choice("data.resize", view.resize, view.reason, view.is_weak)
    if view.resize == "crop_or_pad":
        yield Choice("data.spacing", layout.stated_spacing, "the field of view divided by the grid", view.is_weak)
    else:
        reason = f"{facts.num_without_spacing} of {facts.number} files store none"
        if facts.has_spacing:
            stated = "x".join(f"{mm:.3g}" for mm in layout.spacing_mm)
            reason = f"stretching to the grid makes voxels of about {stated} mm anyway"
        yield Choice("data.spacing", None, reason)
    reason, many = "as many as the files have", facts.num_channels > MANY_CHANNELS
    reason += "; if these are points in time, set data.frame to read one volume" if many else ""
    yield Choice("autoencoder.in_channels", facts.num_channels, reason, many)
    yield Choice("data.val_fraction", val_fraction(facts), f"{num_held_out} of {facts.number} to validate with")
    reason = f"fewer than {SMALL_SET} volumes" if facts.is_small else f"{facts.number} volumes vary enough"
    yield Choice("data.use_augmentation", facts.is_small, reason)


def class_choices(facts: Fingerprint) -> Iterator[Choice]:
    """Choose conditioning by class if folders or labels are classes, and what keeps patients together."""
    sizes = sorted(facts.classes.values())
    are_patients = len(sizes) > 1 and float(np.median(sizes)) < LEAST_OF_CLASS
    if len(sizes) > 1 and not are_patients:
        singles = [printable(name) for name, count in facts.classes.items() if count == 1]
        reason = f"{len(sizes)} classes of {sizes[0]} to {sizes[-1]} volumes"
        reason += f"; a single volume in: {', '.join(singles[:5])}" if singles else ""
        yield Choice("ldm.conditioning.type", "class", reason, sizes[0] < FEW)
        yield Choice("ldm.conditioning.num_classes", len(sizes), "the classes of the data")
    else:
        reason = "the volumes have no classes"
        if are_patients:
            reason = f"{len(sizes)} names of {sizes[0]} to {sizes[-1]} volumes look like patients, not classes"
        elif sizes:
            reason = f"all volumes are of one class ({printable(next(iter(facts.classes)))})"
        yield Choice("ldm.conditioning.type", "none", reason, are_patients)
        yield Choice("ldm.conditioning.num_classes", 0, "no classes")
    group, reason = facts.group_by, "no names suggest several volumes of one patient"
    if group is not None:
        reason = "by their names some patients have several volumes, which stay together"
    elif are_patients and 1 < len({item.name.rpartition("/")[0] for item in facts.volumes}) < facts.number:
        group, reason = "folder", "volumes in one folder stay on one side of the split"
    yield Choice("data.group_by", group, reason, bool(group))


def notes(facts: Fingerprint) -> list[str]:
    """Return what the user should know besides the values."""
    lines = []
    if facts.problems:
        lines.append(
            f"{counted(len(facts.problems), 'problem')} with files that this plan does without; training refuses the "
            f"folder until they are repaired or moved away: {' | '.join(grouped(facts.problems))}"
        )
    if facts.is_small:
        lines.append(
            f"{counted(facts.number, 'volume')} are few: a diffusion model tends to memorise them. The plan augments "
            "and keeps the networks small; before you trust or publish samples, compare them with their nearest "
            "training volumes in report.html."
        )
    if facts.unusual:
        some = "; ".join(facts.unusual[:3]) + (f"; and {len(facts.unusual) - 3} more" if len(facts.unusual) > 3 else "")
        lines.append(f"Unusual, worth a look: {some}.")
    return lines


def _first(table: tuple[tuple[float, int], ...], value: float) -> int:
    return next(limit for below, limit in table if value < below)


def _count(number: int) -> str:
    if number < 1e6:
        return f"{number:,}"
    return f"{number / 1e6:.1f} million" if number < 1e7 else f"{number / 1e6:,.0f} million"
