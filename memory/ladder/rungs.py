"""The rungs of the ladder: which changes to a config lower its memory, and in which order to try them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memory.predict.prediction import Stage
from settings import ConfigError, Settings, look_up

Order = Literal["lossless-first", "guide"]
Changes = dict[str, Any]
Proposer = Callable[[Settings], Iterator["Proposal"]]
SLAB_ROWS = (32, 16, 8)
MIN_CHANNELS = 8


@dataclass(frozen=True)
class Proposal:
    """One change: what it is called, what it sets, and whether the result of training stays the same.

    family: within one family later proposals need less memory and more compute, so the first that fits is enough.
    """

    name: str
    changes: Changes
    same_mathematics: bool
    family: str = ""


@dataclass(frozen=True)
class Rung:
    """A config on the ladder: `changes` against the rung above, `all_changes` against the config that was given."""

    name: str
    changes: Changes
    all_changes: Changes
    same_mathematics: bool
    settings: Settings
    family: str = ""


def build_rungs(settings: Settings, stage: Stage, order: Order) -> list[Rung]:
    """Return the ladder below a config, the config itself first; each rung keeps the changes of those above it."""
    rungs = [Rung("as configured", {}, {}, True, settings)]
    for propose in PROPOSERS[stage, order]:
        for proposal in propose(rungs[-1].settings):
            above = rungs[-1]
            changes = {key: value for key, value in proposal.changes.items() if look_up(above.settings, key) != value}
            if not changes:
                continue
            try:
                changed = above.settings.with_overrides(changes, stage)
            except (ConfigError, ValueError):
                continue  # for instance a grid that the levels do not divide
            everything = {**above.all_changes, **changes}
            is_same = above.same_mathematics and proposal.same_mathematics
            rungs.append(Rung(proposal.name, changes, everything, is_same, changed, proposal.family))
    return rungs


def _lean(settings: Settings) -> Iterator[Proposal]:
    yield Proposal("SDPA and lean blocks", {"autoencoder.implementation": "lean"}, True)


def _micro_batch(where: str) -> Proposer:
    def propose(settings: Settings) -> Iterator[Proposal]:
        training = look_up(settings, where)
        size, accumulation = training.batch_size, training.gradient_accumulation_steps
        for divisor in range(2, size + 1):
            if size % divisor == 0:
                changes = {
                    f"{where}.batch_size": size // divisor,
                    f"{where}.gradient_accumulation_steps": accumulation * divisor,
                }
                yield Proposal(f"micro-batch {size // divisor}", changes, True, "micro-batch")

    return propose


def _checkpoint_levels(settings: Settings) -> Iterator[Proposal]:
    training = settings.autoencoder.training
    levels = len(settings.autoencoder.num_channels)
    if training.checkpoints_blocks and training.checkpoint_levels == "all":
        return
    first = training.checkpoint_levels + 1 if training.checkpoints_blocks else 1  # type: ignore[operator]
    for count in range(first, levels + 1):
        value = "all" if count == levels else count
        changes = {
            "autoencoder.training.use_gradient_checkpointing": True,
            "autoencoder.training.checkpoint_levels": value,
        }
        yield Proposal(f"checkpointing, {count} of {levels} levels", changes, True, "checkpointing")


def _checkpoint_all(settings: Settings) -> Iterator[Proposal]:
    changes = {
        "autoencoder.training.use_gradient_checkpointing": True,
        "autoencoder.training.checkpoint_levels": "all",
    }
    yield Proposal("checkpointing", changes, True)


def _nested(settings: Settings) -> Iterator[Proposal]:
    training = settings.autoencoder.training
    if not training.use_gradient_checkpointing_offload:
        yield Proposal("nested checkpointing", {"autoencoder.training.use_nested_checkpointing": True}, True)


def _slabs(settings: Settings) -> Iterator[Proposal]:
    for rows in _thinner_slabs(settings):
        yield Proposal(f"slabs of {rows} rows", {"autoencoder.training.slab_rows": rows}, True, "slabs")


def _thinner_slabs(settings: Settings) -> list[int]:
    current = settings.autoencoder.training.slab_rows or settings.training_grid[0]
    return [rows for rows in SLAB_ROWS if rows <= current // 2]


def _offload(settings: Settings) -> Iterator[Proposal]:
    """Begin again with whole blocks and thicken no slabs of a config that already offloads.

    The host keeps what nesting would compute again, so nesting is off here.
    """
    training = settings.autoencoder.training
    if training.use_gradient_checkpointing_offload:
        choices = _thinner_slabs(settings)
    else:
        choices = [0, *(rows for rows in SLAB_ROWS if rows <= settings.training_grid[0] // 2)]
    for rows in choices:
        changes = {
            "autoencoder.training.use_gradient_checkpointing_offload": True,
            "autoencoder.training.use_nested_checkpointing": False,
            "autoencoder.training.slab_rows": rows,
        }
        yield Proposal(f"offload, slabs of {rows} rows" if rows else "offload", changes, True, "offload")


def _perceptual_chunk(settings: Settings) -> Iterator[Proposal]:
    training = settings.autoencoder.training
    if training.use_perceptual_loss and training.perceptual.chunk_size > 1:
        changes = {"autoencoder.training.perceptual.chunk_size": 1}
        yield Proposal("perceptual loss one slice at a time", changes, True)


def _mixed_precision(settings: Settings) -> Iterator[Proposal]:
    yield Proposal("mixed precision", {"device.mixed_precision": True}, False)


def _no_perceptual(settings: Settings) -> Iterator[Proposal]:
    yield Proposal("no perceptual loss", {"autoencoder.training.use_perceptual_loss": False}, False)


def _discriminator(settings: Settings) -> Iterator[Proposal]:
    current = settings.autoencoder.training.discriminator
    if not settings.autoencoder.training.uses_discriminator:
        return
    where = "autoencoder.training.discriminator"
    smaller = {
        f"{where}.num_layers_d": max(2, current.num_layers_d - 1),
        f"{where}.num_channels": max(MIN_CHANNELS, current.num_channels // 2),
    }
    yield Proposal("smaller discriminator", smaller, False)


def _attention(where: str) -> Proposer:
    def propose(settings: Settings) -> Iterator[Proposal]:
        levels = list(look_up(settings, where).attention_levels)
        for number, attends in enumerate(tuple(levels)):
            if attends:
                levels[number] = False
                name = f"no attention at level {number}" if any(levels) else "no attention"
                yield Proposal(name, {f"{where}.attention_levels": tuple(levels)}, False, "attention")

    return propose


def _channels(where: str) -> Proposer:
    def propose(settings: Settings) -> Iterator[Proposal]:
        channels = look_up(settings, where).num_channels
        for numerator, divisor in ((3, 4), (1, 2), (1, 4)):
            fewer = tuple(max(MIN_CHANNELS, count * numerator // divisor // 4 * 4) for count in channels)
            changes = {f"{where}.num_channels": fewer, f"{where}.norm_num_groups": "auto"}
            yield Proposal(f"channels {list(fewer)}", changes, False, "channels")

    return propose


def _grid(settings: Settings) -> Iterator[Proposal]:
    """Halve the longest axes, then the next longest, four times; the settings refuse what becomes too small."""
    key = "data.patch_size" if settings.data.patch_size is not None else "data.voxel_size"
    grid = tuple(settings.training_grid)
    for _ in range(4):
        longest = max(grid)
        grid = tuple(axis // 2 if axis == longest else axis for axis in grid)
        yield Proposal(f"grid {'x'.join(map(str, grid))}", {key: grid}, False, "grid")


def _ldm_checkpointing(settings: Settings) -> Iterator[Proposal]:
    yield Proposal("checkpointing of the U-Net", {"ldm.training.use_gradient_checkpointing": True}, True)


def _ldm_offload(settings: Settings) -> Iterator[Proposal]:
    changes = {"ldm.training.use_gradient_checkpointing_offload": True}
    yield Proposal("U-Net block inputs on the host", changes, True)


def _pixel_loss(settings: Settings) -> Iterator[Proposal]:
    """The frozen decoder of the pixel loss runs with the memory knobs of stage 1."""
    if settings.ldm.training.pixel_loss.weight == 0:
        return
    yield Proposal("pixel loss one volume at a time", {"ldm.training.pixel_loss.chunk_size": 1}, True)
    yield from _lean(settings)
    yield from _checkpoint_all(settings)
    yield from _slabs(settings)


def _no_pixel_loss(settings: Settings) -> Iterator[Proposal]:
    yield Proposal("no pixel loss", {"ldm.training.pixel_loss.weight": 0.0}, False)


def _latent_cache(settings: Settings) -> Iterator[Proposal]:
    if settings.ldm.latents.cache == "none":
        yield Proposal("latents from the cache", {"ldm.latents.cache": "disk"}, True)


PROPOSERS: dict[tuple[Stage, Order], Sequence[Proposer]] = {
    ("autoencoder", "lossless-first"): (
        _lean,
        _micro_batch("autoencoder.training"),
        _checkpoint_levels,
        _nested,
        _slabs,
        _offload,
        _perceptual_chunk,
        _mixed_precision,
        _no_perceptual,
        _discriminator,
        _attention("autoencoder"),
        _channels("autoencoder"),
        _grid,
    ),
    # The steps of the guide's out-of-memory scenario, then what it advises when they are not enough.
    ("autoencoder", "guide"): (
        _mixed_precision,
        _micro_batch("autoencoder.training"),
        _no_perceptual,
        _channels("autoencoder"),
        _checkpoint_all,
        _discriminator,
        _attention("autoencoder"),
        _grid,
        _lean,
        _offload,
    ),
    ("ldm", "lossless-first"): (
        _latent_cache,
        _micro_batch("ldm.training"),
        _pixel_loss,
        _ldm_checkpointing,
        _ldm_offload,
        _mixed_precision,
        _no_pixel_loss,
        _attention("ldm.unet"),
        _channels("ldm.unet"),
        _grid,
    ),
    ("ldm", "guide"): (
        _mixed_precision,
        _micro_batch("ldm.training"),
        _no_pixel_loss,
        _channels("ldm.unet"),
        _ldm_checkpointing,
        _attention("ldm.unet"),
        _grid,
        _ldm_offload,
    ),
}
