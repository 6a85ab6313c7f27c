"""Both networks and their training as values of a config, each with its reason. Never imports torch.

What the number and the size of the volumes allow are rules of thumb; what was measured is in docs/recipe.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memory.planning.choices import Choice
from memory.planning.fingerprint import SMALL_SET, Fingerprint
from memory.planning.layout import Grid, Layout
from memory.predict.prediction import Stage
from runtime.files import counted

MOST_TOKENS = 4096
"""Levels with more voxels get no attention: its time grows with their square."""

LEAST_STEPS = 100
"""No stage is cut to fewer updates, however few hours there are."""

FIRST_RATES: dict[Stage, float] = {"autoencoder": 1e-3, "ldm": 1.5e-3}
"""Learning rates at 16 channels."""
LEAST_RATE = 1e-4
ITEMS: dict[Stage, str] = {"autoencoder": "volume", "ldm": "latent"}

Values = dict[str, Any]

FULL_PRECISION_VOXELS = 400_000
"""Volumes up to this size train in full precision: they need little memory anyway."""

WIDTHS = (8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64)
"""Channels of the autoencoder's highest resolution."""
UNET_WIDTHS = (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)
LEAST_WIDTH = 16
"""Narrower networks are chosen only for sets that support no more, or to keep to the hours."""

FEW_VOXELS = 2e7
"""Sets with fewer voxels in all volumes together get the smallest networks, and small batches for more updates."""

_BY_VOXELS = ((FEW_VOXELS, 16), (5e7, 32), (3e8, 48), (math.inf, 64))
_UNET_BY_NUMBER = ((SMALL_SET, 48), (200, 128), (1000, 160), (5000, 192), (math.inf, 256))
_UNET_BY_LATENTS = ((2e6, 32), (4e6, 64), (1e7, 96), (math.inf, 256))


@dataclass(frozen=True)
class Network:
    """One way to train a stage: its width, its micro-batch, whether it checkpoints, and the patch of stage 1."""

    width: int
    batch: int = 1
    checkpoints: bool = True
    patch: Grid | None = None

    def cost(self, grid: Grid) -> float:
        """Return a number that the memory of a stage grows with on a grid."""
        return self.width * self.batch * (1.0 if self.checkpoints else 2.5) * math.prod(self.patch or grid)


@dataclass(frozen=True)
class StageSizing:
    """Limits for the network of a stage, and its length: passes over the set, and the range of its steps.

    `why_width` says what sets the limit, in words that follow "because"; `widths`: those to choose from.
    """

    width: int
    why_width: str
    batch: int
    passes: int
    steps_range: tuple[int, int]
    widths: tuple[int, ...]

    @property
    def searched_widths(self) -> list[int]:
        """Return the widths to choose from by memory."""
        return [width for width in self.widths if min(LEAST_WIDTH, self.width) <= width <= self.width]

    def narrower(self, width: int) -> int | None:
        """Return the next width below another, None if there is none."""
        return max((other for other in self.widths if other < width), default=None)

    def steps(self, number: int, per_update: int, parts: float = 1.0) -> int:
        """Return the updates for so many volumes; `parts`: how many patches make a volume."""
        least, most = self.steps_range
        steps = min(most, max(least, self.passes * min(parts, 8.0) * number / per_update))
        return round(steps / 1000) * 1000


@dataclass(frozen=True)
class SearchContext:
    """What the networks of a plan have in common: grid, limits, number of training volumes, and what the user gave."""

    layout: Layout
    limits: dict[Stage, StageSizing]
    res_blocks: int
    full_precision: bool
    num_training: int
    in_channels: int
    given: Values
    steps_share: float = 1.0
    """By how much the steps are cut to keep to the hours."""


def search_context(fingerprint: Fingerprint, layout: Layout, num_training: int, given: Values) -> SearchContext:
    """Return what a set on a grid allows."""
    number = fingerprint.number
    is_small = fingerprint.is_small
    voxels, latents = number * layout.voxels, number * math.prod(layout.latent)
    width = _limit(_BY_VOXELS, voxels)
    why = f"the set has {_count(voxels)} voxels on this grid ({counted(number, 'volume')})"
    if is_small and width > 24:
        width, why = 24, f"the set is small ({counted(number, 'volume')})"
    by_number, by_latents = _limit(_UNET_BY_NUMBER, number), _limit(_UNET_BY_LATENTS, latents)
    why_unet = f"the set has {counted(number, 'volume')}"
    if by_latents < by_number:
        why_unet = f"the latents of the set have {_count(latents)} voxels"
    batch = 2 if is_small or voxels < FEW_VOXELS else 4
    unet_width, unet_batch = min(by_number, by_latents), 4 if is_small else 8 if number < 2000 else 16
    return SearchContext(
        layout,
        {
            "autoencoder": StageSizing(width, why, batch, 200, (4_000, 60_000), WIDTHS),
            "ldm": StageSizing(unet_width, why_unet, unet_batch, 500, (10_000, 150_000), UNET_WIDTHS),
        },
        res_blocks=1 if voxels < FEW_VOXELS else 2,
        full_precision=layout.voxels <= FULL_PRECISION_VOXELS,
        num_training=num_training,
        in_channels=given.get("autoencoder.in_channels") or fingerprint.num_channels,
        given=given,
    )


def autoencoder_choices(network: Network, context: SearchContext) -> Iterator[Choice]:
    """Yield the values of stage 1."""
    layout, given = context.layout, context.given
    channels = _channels("autoencoder.num_channels", network, len(layout.strides) + 1, given)
    yield Choice("autoencoder.num_channels", channels, _width_text(network, context.limits["autoencoder"]))
    ratio = max(layout.spacing_mm) / min(layout.spacing_mm)
    reason = f"axes with long or few voxels are halved later or not at all (spacing {ratio:.1f} to 1)"
    even = f"voxels are about as long as wide ({ratio:.1f} to 1)"
    uneven = [list(stride) for stride in layout.strides] if layout.is_uneven else 2
    yield Choice("autoencoder.strides", uneven, reason if layout.is_uneven else even)
    shrinks = math.prod(layout.factor)
    latent_channels = (8 if shrinks > 64 else 4) + 2 * (context.in_channels - 1)
    latent = "x".join(map(str, layout.latent))
    reason = f"a latent of {latent}, {shrinks * context.in_channels / latent_channels:.0f} times fewer values"
    yield Choice("autoencoder.latent_channels", latent_channels, reason)
    yield Choice("autoencoder.num_res_blocks", context.res_blocks, "1 for sets of few voxels, else 2")
    tokens = math.prod(layout.latent)
    attends = tokens <= MOST_TOKENS and network.patch is None and not given.get("data.patch_size")
    reason = f"the lowest level has {tokens:,} voxels; above {MOST_TOKENS:,} attention takes most of the time"
    yield Choice("autoencoder.attention_levels", [*[False] * (len(channels) - 1), attends], reason)
    whole = "whole volumes fit" if network.patch is None else "whole volumes would leave room for narrow networks only"
    yield Choice("data.patch_size", list(network.patch) if network.patch else None, whole)
    yield from _autoencoder_training(network, context)


def _autoencoder_training(network: Network, context: SearchContext) -> Iterator[Choice]:
    where, layout = "autoencoder.training", context.layout
    width = (context.given.get("autoencoder.num_channels") or [network.width])[0]
    grid = context.given.get("data.patch_size") or network.patch or layout.grid
    parts = layout.voxels / math.prod(grid)
    yield from _training("autoencoder", network, context, width, parts)
    rate = learning_rate(width, FIRST_RATES["autoencoder"], LEAST_RATE)
    yield Choice(f"{where}.discriminator_learning_rate", min(rate, 2e-4), "at most that of the autoencoder", True)
    yield Choice("autoencoder.initialisation", "haar", "docs/recipe.md")
    yield Choice(f"{where}.reconstruction_loss", "l2", "docs/recipe.md")
    yield Choice(f"{where}.edge_weight", 1.0, "docs/recipe.md")
    yield Choice(f"{where}.perceptual_weight", 0.1, "keeps the term small beside the reconstruction error", True)
    layers = max((n for n in (1, 2, 3) if min(grid) >= 3 * 2**n), default=0)
    reason = f"{layers} layers need {3 * 2**layers} voxels along the shortest axis of {min(grid)}"
    yield Choice(f"{where}.adversarial_weight", 0.01 if layers else 0.0, reason if layers else "too few voxels for one")
    yield Choice(f"{where}.discriminator.num_layers_d", max(1, layers), reason if layers else "not used")
    yield Choice(f"{where}.discriminator.num_channels", min(32, max(8, width)), "as the autoencoder, from 8 to 32")
    steps = _num_steps("autoencoder", network, context, parts)
    start = min(2000, max(200, steps // 10), steps // 2)
    reason = f"after {start / steps:.0%} of the run, once reconstructions are plausible"
    yield Choice(f"{where}.adversarial_start_step", start, reason)


def unet_choices(network: Network, context: SearchContext) -> Iterator[Choice]:
    """Yield the values of stage 2."""
    layout = context.layout
    channels = _channels("ldm.unet.num_channels", network, layout.unet_levels, context.given)
    yield Choice("ldm.unet.num_channels", channels, _width_text(network, context.limits["ldm"]))
    attends = [math.prod(layout.latent) // 8**level <= MOST_TOKENS for level in range(len(channels))]
    yield Choice("ldm.unet.attention_levels", attends, f"levels of at most {MOST_TOKENS:,} voxels")
    heads = math.gcd(32, *channels)
    yield Choice("ldm.unet.num_head_channels", heads, "32, or less where that does not divide the channels")
    yield from _training("ldm", network, context, channels[0])


def _training(
    stage: Stage, network: Network, context: SearchContext, width: int, parts: float = 1.0
) -> Iterator[Choice]:
    """Yield what both stages have: batches, steps, checkpointing and learning rate; `parts`: patches of a volume."""
    where, wanted, item = f"{stage}.training", context.limits[stage].batch, ITEMS[stage]
    batch, accumulation = _batches(stage, network, context)
    whole = "a whole update at once, which fits"
    yield Choice(
        f"{where}.batch_size", batch, whole if batch >= wanted else f"as many as fit of the {wanted} of an update"
    )
    yield Choice(f"{where}.gradient_accumulation_steps", accumulation, f"about {wanted} {item}s per update")
    steps = _num_steps(stage, network, context, parts)
    passes = steps * batch * accumulation / context.num_training / max(1.0, parts)
    reason = f"about {passes:,.0f} passes over {counted(context.num_training, f'training {item}')}"
    if context.steps_share < 1:
        reason += f", cut to {context.steps_share:.0%} to keep to the hours"
    yield Choice(f"{where}.max_steps", steps, reason, context.steps_share < 0.5)
    reason = "needed to fit, for about a third more time" if network.checkpoints else "it fits without, which is faster"
    yield Choice(f"{where}.use_gradient_checkpointing", network.checkpoints, reason)
    first = FIRST_RATES[stage]
    reason = f"{first:g} at 16 channels, measured in short runs; less for wider networks, not measured"
    yield Choice(f"{where}.learning_rate", learning_rate(width, first, LEAST_RATE), reason, width != 16)
    every = max(100, steps // 20)
    reason = f"{counted(math.ceil(steps / every), 'time')} in the run"
    yield Choice(f"{where}.validate_every", every, reason)
    yield Choice(f"{where}.save_every", every, reason)


def _channels(key: str, network: Network, levels: int, given: Values) -> list[int]:
    """Return the channels that the user gave, else the width of the network, doubled twice from level to level."""
    return list(given.get(key) or [network.width * min(2**level, 4) for level in range(levels)])


def _width_text(network: Network, sizing: StageSizing) -> str:
    if network.width < sizing.width:
        return f"the widest that fits; up to {sizing.width} would suit, because {sizing.why_width}"
    return f"at most {sizing.width} at the highest resolution, because {sizing.why_width}"


def _batches(stage: Stage, network: Network, context: SearchContext) -> tuple[int, int]:
    """Return the size of a micro-batch and how many make an update."""
    where = f"{stage}.training"
    batch = context.given.get(f"{where}.batch_size") or network.batch
    wanted = max(1, round(context.limits[stage].batch / batch))
    return batch, context.given.get(f"{where}.gradient_accumulation_steps") or wanted


def _num_steps(stage: Stage, network: Network, context: SearchContext, parts: float) -> int:
    """Return the steps that the user gave, else those that the set asks for, cut to keep to the hours."""
    if given := context.given.get(f"{stage}.training.max_steps"):
        return int(given)
    steps = context.limits[stage].steps(context.num_training, math.prod(_batches(stage, network, context)), parts)
    share = context.steps_share
    return steps if share == 1.0 else max(LEAST_STEPS, int(steps * share / 100) * 100)


def learning_rate(width: int, first: float, least: float) -> float:
    """Return a rate inversely proportional to the width, to one digit; `first` is that of 16 channels."""
    rate = max(least, min(first, first * 16 / width))
    digits = -math.floor(math.log10(rate))
    return round(rate, digits + 1)


def _limit(table: tuple[tuple[float, int], ...], value: float) -> int:
    return next(limit for below, limit in table if value < below)


def _count(number: int) -> str:
    if number < 1e6:
        return f"{number:,}"
    return f"{number / 1e6:.1f} million" if number < 1e7 else f"{number / 1e6:,.0f} million"
