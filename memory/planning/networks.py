"""Both networks and their training as values of a config, each with its reason. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memory.planning.choice import Choice
from memory.planning.layout import Grid, Layout
from memory.planning.sizing import Sizing, learning_rate
from runtime.files.names import counted

MOST_TOKENS = 4096
"""Levels with more voxels get no attention: its time grows with their square."""

LEAST_STEPS = 100
"""No stage is cut to fewer updates, however few hours there are."""

Values = dict[str, Any]


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
class Scene:
    """What the networks of a plan have in common: grid, limits, number of training volumes, and what the user gave."""

    layout: Layout
    sizing: Sizing
    number: int
    in_channels: int
    given: Values
    shortened: float = 1.0
    """By how much the steps are cut to keep to the hours."""


def autoencoder_choices(network: Network, scene: Scene) -> Iterator[Choice]:
    """Yield the values of stage 1."""
    layout, sizing = scene.layout, scene.sizing
    given = scene.given
    multiples = [min(2**level, 4) for level in range(len(layout.strides) + 1)]
    channels = given.get("autoencoder.num_channels") or [network.width * multiple for multiple in multiples]
    reason = f"at most {sizing.width} at the highest resolution, because {sizing.why_width}"
    if network.width < sizing.width:
        reason = f"the widest that fits; up to {sizing.width} would suit, because {sizing.why_width}"
    yield Choice("autoencoder.num_channels", list(channels), reason)
    ratio = max(layout.spacing_mm) / min(layout.spacing_mm)
    reason = f"axes with long or few voxels are halved later or not at all (spacing {ratio:.1f} to 1)"
    even = f"voxels are about as long as wide ({ratio:.1f} to 1)"
    uneven = [list(stride) for stride in layout.strides] if layout.is_uneven else 2
    yield Choice("autoencoder.strides", uneven, reason if layout.is_uneven else even)
    shrinks = math.prod(layout.factor)
    latent_channels = (8 if shrinks > 64 else 4) + 2 * (scene.in_channels - 1)
    latent = "x".join(map(str, layout.latent))
    reason = f"a latent of {latent}, {shrinks * scene.in_channels / latent_channels:.0f} times fewer values"
    yield Choice("autoencoder.latent_channels", latent_channels, reason)
    yield Choice("autoencoder.num_res_blocks", sizing.res_blocks, "1 for sets of few voxels, else 2")
    tokens = math.prod(layout.latent)
    attends = tokens <= MOST_TOKENS and network.patch is None and not given.get("data.patch_size")
    reason = f"the lowest level has {tokens:,} voxels; above {MOST_TOKENS:,} attention takes most of the time"
    yield Choice("autoencoder.attention_levels", [*[False] * (len(channels) - 1), attends], reason)
    whole = "whole volumes fit" if network.patch is None else "whole volumes would leave room for narrow networks only"
    yield Choice("data.patch_size", list(network.patch) if network.patch else None, whole)
    yield from _autoencoder_training(network, scene)


def _autoencoder_training(network: Network, scene: Scene) -> Iterator[Choice]:
    where, layout, sizing = "autoencoder.training", scene.layout, scene.sizing
    width = (scene.given.get("autoencoder.num_channels") or [network.width])[0]
    batch, accumulation = _batches(where, network, sizing.batch, scene.given)
    grid = scene.given.get("data.patch_size") or network.patch or layout.grid
    parts = layout.voxels / math.prod(grid)
    yield Choice(f"{where}.batch_size", batch, _batch_text(batch, sizing.batch))
    yield Choice(f"{where}.gradient_accumulation_steps", accumulation, f"about {sizing.batch} volumes per update")
    steps = _length(where, sizing.steps(scene.number, batch * accumulation, parts), scene)
    passes = steps * batch * accumulation / scene.number / max(1.0, parts)
    reason = f"about {passes:,.0f} passes over {counted(scene.number, 'training volume')}"
    yield Choice(f"{where}.max_steps", steps, reason + _short_text(scene), scene.shortened < 0.5)
    yield Choice(f"{where}.use_gradient_checkpointing", network.checkpoints, _knob(network))
    rate = learning_rate(width, 1e-3, 1e-4)
    reason = "1e-3 at 16 channels, measured in short runs; less for wider networks, not measured"
    yield Choice(f"{where}.learning_rate", rate, reason, width != 16)
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
    start = min(2000, max(200, steps // 10), steps // 2)
    reason = f"after {start / steps:.0%} of the run, once reconstructions are plausible"
    yield Choice(f"{where}.adversarial_start_step", start, reason)
    yield from _intervals(where, steps)


def unet_choices(network: Network, scene: Scene) -> Iterator[Choice]:
    """Yield the values of stage 2."""
    layout, sizing, where = scene.layout, scene.sizing, "ldm.training"
    multiples = [min(2**level, 4) for level in range(layout.unet_levels)]
    channels = scene.given.get("ldm.unet.num_channels") or [network.width * multiple for multiple in multiples]
    reason = f"at most {sizing.unet_width} at the highest resolution, because {sizing.why_unet_width}"
    if network.width < sizing.unet_width:
        reason = f"the widest that fits; up to {sizing.unet_width} would suit, because {sizing.why_unet_width}"
    yield Choice("ldm.unet.num_channels", list(channels), reason)
    tokens = [math.prod(layout.latent) // 8**level for level in range(len(channels))]
    attends = [count <= MOST_TOKENS for count in tokens]
    yield Choice("ldm.unet.attention_levels", attends, f"levels of at most {MOST_TOKENS:,} voxels")
    heads = math.gcd(32, *channels)
    yield Choice("ldm.unet.num_head_channels", heads, "32, or less where that does not divide the channels")
    batch, accumulation = _batches(where, network, sizing.unet_batch, scene.given)
    yield Choice(f"{where}.batch_size", batch, _batch_text(batch, sizing.unet_batch))
    yield Choice(f"{where}.gradient_accumulation_steps", accumulation, f"about {sizing.unet_batch} latents per update")
    steps = _length(where, sizing.unet_steps(scene.number, batch * accumulation), scene)
    passes = steps * batch * accumulation / scene.number
    reason = f"about {passes:,.0f} passes over {counted(scene.number, 'training latent')}"
    yield Choice(f"{where}.max_steps", steps, reason + _short_text(scene), scene.shortened < 0.5)
    yield Choice(f"{where}.use_gradient_checkpointing", network.checkpoints, _knob(network))
    rate = learning_rate(channels[0], 1.5e-3, 1e-4)
    reason = "1.5e-3 at 16 channels, measured in short runs; less for wider networks, not measured"
    yield Choice(f"{where}.learning_rate", rate, reason, True)
    yield from _intervals(where, steps)


def _batches(where: str, network: Network, wanted: int, given: Values) -> tuple[int, int]:
    batch = given.get(f"{where}.batch_size") or network.batch
    return batch, given.get(f"{where}.gradient_accumulation_steps") or max(1, round(wanted / batch))


def _batch_text(batch: int, wanted: int) -> str:
    return "a whole update at once, which fits" if batch >= wanted else f"as many as fit of the {wanted} of an update"


def _intervals(where: str, steps: int) -> Iterator[Choice]:
    every = max(100, steps // 20)
    reason = f"{counted(math.ceil(steps / every), 'time')} in the run"
    yield Choice(f"{where}.validate_every", every, reason)
    yield Choice(f"{where}.save_every", every, reason)


def _knob(network: Network) -> str:
    return "needed to fit, for about a third more time" if network.checkpoints else "it fits without, which is faster"


def _length(where: str, steps: int, scene: Scene) -> int:
    """Return the steps that the user gave, else those that the set asks for, cut to keep to the hours."""
    if given := scene.given.get(f"{where}.max_steps"):
        return int(given)
    return steps if scene.shortened == 1.0 else max(LEAST_STEPS, int(steps * scene.shortened / 100) * 100)


def _short_text(scene: Scene) -> str:
    return f", cut to {scene.shortened:.0%} to keep to the hours" if scene.shortened < 1 else ""
