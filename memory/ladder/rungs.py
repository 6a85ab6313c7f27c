"""The rungs of the ladder: changes to a config that lower its memory, in the order in which to try them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memory.ladder.acting_values import acting_values
from memory.predict.prediction import Stage
from settings import ConfigError, Settings, look_up

Order = Literal["lossless-first", "guide"]
Changes = dict[str, Any]
Proposer = Callable[[Settings], Iterator["Proposal"]]
SLAB_ROWS = (32, 16, 8)
MIN_CHANNELS = 8


@dataclass(frozen=True)
class Proposal:
    """A possible change: its name, the keys it sets, and whether training computes the same result.

    lowers: the memory that it lowers, which need not be part of the peak.
    family: later proposals of a family need less memory and more compute, so the first one that fits is enough.
    """

    name: str
    changes: Changes
    same_mathematics: bool
    lowers: str
    family: str = ""


@dataclass(frozen=True)
class Rung:
    """A config on the ladder; `changes` are relative to the rung above, `all_changes` to the original config."""

    name: str
    changes: Changes
    all_changes: Changes
    same_mathematics: bool
    settings: Settings
    lowers: str = ""
    family: str = ""


def build_rungs(settings: Settings, stage: Stage, order: Order) -> list[Rung]:
    """Return the config as the first rung, then the rungs below it; each keeps the changes of those above.

    Changes that do not affect the stage's step are left out.
    """
    rungs = [Rung("as configured", {}, {}, True, settings)]
    for propose in PROPOSERS[stage, order]:
        for proposal in propose(rungs[-1].settings):
            above = rungs[-1]
            changes = {key: value for key, value in proposal.changes.items() if look_up(above.settings, key) != value}
            try:
                changed = above.settings.with_overrides(changes)
            except (ConfigError, ValueError):
                continue  # for example, a grid that the levels cannot halve
            if acting_values(changed, stage) == acting_values(above.settings, stage):
                continue
            everything = {**above.all_changes, **changes}
            is_same = above.same_mathematics and proposal.same_mathematics
            rungs.append(Rung(proposal.name, changes, everything, is_same, changed, proposal.lowers, proposal.family))
    return rungs


def _lean(settings: Settings) -> Iterator[Proposal]:
    yield Proposal(
        "SDPA and lean blocks",
        {"autoencoder.implementation": "lean"},
        True,
        "the activations that blocks and attention save",
    )


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
                yield Proposal(
                    f"micro-batch {size // divisor}", changes, True, "the activations of a micro-batch", "micro-batch"
                )

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
        yield Proposal(
            f"checkpointing, {count} of {levels} levels",
            changes,
            True,
            "the activations that blocks save for backward",
            "checkpointing",
        )


def _checkpoint_all(settings: Settings) -> Iterator[Proposal]:
    changes = {
        "autoencoder.training.use_gradient_checkpointing": True,
        "autoencoder.training.checkpoint_levels": "all",
    }
    yield Proposal("checkpointing", changes, True, "the activations that blocks save for backward")


def _nested(settings: Settings) -> Iterator[Proposal]:
    training = settings.autoencoder.training
    if not training.use_gradient_checkpointing_offload:
        changes = {"autoencoder.training.use_nested_checkpointing": True}
        yield Proposal("nested checkpointing", changes, True, "the inputs of the encoder's blocks")


def _slabs(settings: Settings) -> Iterator[Proposal]:
    for rows in _thinner_slabs(settings):
        changes = {"autoencoder.training.slab_rows": rows}
        yield Proposal(f"slabs of {rows} rows", changes, True, "temporary tensors at full resolution", "slabs")


def _thinner_slabs(settings: Settings) -> list[int]:
    current = settings.autoencoder.training.slab_rows or settings.training_grid[0]
    return [rows for rows in SLAB_ROWS if rows <= current // 2]


def _offload(settings: Settings) -> Iterator[Proposal]:
    """Propose offloading with whole blocks first, then with slabs; only thinner slabs if the config already offloads.

    Nesting is turned off, because the host keeps what nesting would recompute. A CPU is the host.
    """
    if settings.device.type == "cpu":
        return
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
        name = f"offload, slabs of {rows} rows" if rows else "offload"
        yield Proposal(name, changes, True, "block inputs, which move to the host", "offload")


def _perceptual_chunk(settings: Settings) -> Iterator[Proposal]:
    changes = {"autoencoder.training.perceptual.chunk_size": 1}
    yield Proposal("perceptual loss one slice at a time", changes, True, "the activations of the perceptual network")


def _mixed_precision(settings: Settings) -> Iterator[Proposal]:
    if settings.device.type != "cpu":  # where it would change nothing
        yield Proposal("mixed precision", {"device.mixed_precision": True}, False, "activations, which become 16-bit")


def _compressed_checkpoints(settings: Settings) -> Iterator[Proposal]:
    changes = {"autoencoder.training.checkpoint_dtype": "int8"}
    yield Proposal("block inputs in 8 bits", changes, False, "block inputs, on the device or the host")


def _no_perceptual(settings: Settings) -> Iterator[Proposal]:
    changes = {"autoencoder.training.use_perceptual_loss": False}
    yield Proposal("no perceptual loss", changes, False, "the perceptual network and its activations")


def _discriminator(settings: Settings) -> Iterator[Proposal]:
    current = settings.autoencoder.training.discriminator
    if not settings.autoencoder.training.uses_discriminator:
        return
    where = "autoencoder.training.discriminator"
    smaller = {
        f"{where}.num_layers_d": min(current.num_layers_d, max(2, current.num_layers_d - 1)),
        f"{where}.num_channels": _fewer(current.num_channels, 1, 2),
    }
    yield Proposal("smaller discriminator", smaller, False, "the discriminator and its activations")


def _attention(where: str) -> Proposer:
    def propose(settings: Settings) -> Iterator[Proposal]:
        levels = list(look_up(settings, where).attention_levels)
        # The U-Net's middle block always has attention; the autoencoder's only if a level has it or the config asks.
        keeps_middle = where == "ldm.unet" or settings.autoencoder.use_nonlocal_attention is True
        for number, attends in enumerate(tuple(levels)):
            if attends:
                levels[number] = False
                is_last = not any(levels) and not keeps_middle
                name = "no attention" if is_last else f"no attention at level {number}"
                changes = {f"{where}.attention_levels": tuple(levels)}
                yield Proposal(
                    name, changes, False, "the activations of attention, and above all its compute", "attention"
                )

    return propose


def _channels(where: str) -> Proposer:
    def propose(settings: Settings) -> Iterator[Proposal]:
        channels = look_up(settings, where).num_channels
        for numerator, divisor in ((3, 4), (1, 2), (1, 4)):
            fewer = tuple(_fewer(count, numerator, divisor, multiple=4) for count in channels)
            if fewer != channels:
                changes = {f"{where}.num_channels": fewer, f"{where}.norm_num_groups": "auto"}
                yield Proposal(f"channels {list(fewer)}", changes, False, "activations and weights", "channels")

    return propose


def _fewer(count: int, numerator: int, divisor: int, multiple: int = 1) -> int:
    """Return that fraction of `count` channels, at least MIN_CHANNELS but never more than `count`."""
    return min(count, max(MIN_CHANNELS, count * numerator // divisor // multiple * multiple))


def _grid(stage: Stage) -> Proposer:
    def propose(settings: Settings) -> Iterator[Proposal]:
        """Halve the longest axes four times; `build_rungs` drops grids that the settings refuse as too small."""
        has_patches = stage == "autoencoder" and settings.data.patch_size is not None
        key = "data.patch_size" if has_patches else "data.voxel_size"
        grid = tuple(settings.training_grid if has_patches else settings.data.voxel_size)
        for _ in range(4):
            longest = max(grid)
            grid = tuple(axis // 2 if axis == longest else axis for axis in grid)
            yield Proposal(f"grid {'x'.join(map(str, grid))}", {key: grid}, False, "everything but the weights", "grid")

    return propose


def _ldm_checkpointing(settings: Settings) -> Iterator[Proposal]:
    changes = {"ldm.training.use_gradient_checkpointing": True}
    yield Proposal(
        "checkpointing of the U-Net", changes, True, "the activations that the U-Net's blocks save for backward"
    )


def _ldm_offload(settings: Settings) -> Iterator[Proposal]:
    if settings.device.type != "cpu":
        changes = {"ldm.training.use_gradient_checkpointing_offload": True}
        yield Proposal("U-Net block inputs on the host", changes, True, "the inputs of the U-Net's blocks")


def _pixel_chunk(settings: Settings) -> Iterator[Proposal]:
    changes = {"ldm.training.pixel_loss.chunk_size": 1}
    yield Proposal("pixel loss one volume at a time", changes, True, "the activations of the decoder")


def _pixel_decoder(settings: Settings) -> Iterator[Proposal]:
    """Propose the memory knobs of stage 1 that the frozen decoder of the pixel loss uses."""
    if settings.ldm.training.pixel_loss.weight:
        yield from _lean(settings)
        yield from _checkpoint_all(settings)
        yield from _slabs(settings)


def _no_pixel_loss(settings: Settings) -> Iterator[Proposal]:
    changes = {"ldm.training.pixel_loss.weight": 0.0}
    yield Proposal("no pixel loss", changes, False, "the decoder and its activations")


def _latent_cache(settings: Settings) -> Iterator[Proposal]:
    if settings.ldm.latents.cache == "none":
        yield Proposal("latents from the cache", {"ldm.latents.cache": "disk"}, True, "the memory for encoding volumes")


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
        _compressed_checkpoints,
        _no_perceptual,
        _discriminator,
        _attention("autoencoder"),
        _channels("autoencoder"),
        _grid("autoencoder"),
    ),
    # The steps of the guide's out-of-memory scenario, then its advice for when they are not enough.
    ("autoencoder", "guide"): (
        _mixed_precision,
        _micro_batch("autoencoder.training"),
        _no_perceptual,
        _channels("autoencoder"),
        _checkpoint_all,
        _discriminator,
        _attention("autoencoder"),
        _grid("autoencoder"),
        _lean,
        _offload,
    ),
    ("ldm", "lossless-first"): (
        _latent_cache,
        _pixel_chunk,
        _micro_batch("ldm.training"),
        _pixel_decoder,
        _ldm_checkpointing,
        _ldm_offload,
        _mixed_precision,
        _no_pixel_loss,
        _attention("ldm.unet"),
        _channels("ldm.unet"),
        _grid("ldm"),
    ),
    ("ldm", "guide"): (
        _mixed_precision,
        _micro_batch("ldm.training"),
        _no_pixel_loss,
        _channels("ldm.unet"),
        _ldm_checkpointing,
        _attention("ldm.unet"),
        _grid("ldm"),
        _ldm_offload,
    ),
}
