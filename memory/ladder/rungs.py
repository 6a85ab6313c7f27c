"""The rungs of the ladder: changes to a config that lower its memory, in the order in which to try them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from memory.predict.prediction import Stage
from settings import ConfigError, Settings, look_up

Order = Literal["lossless-first", "guide"]
Changes = dict[str, Any]
Proposer = Callable[[Settings], Iterator["Proposal"]]
SLAB_ROWS = (32, 16, 8)
MIN_CHANNELS = 8
STAGE_1, STAGE_2 = "autoencoder.training", "ldm.training"
SAVED = "the activations that blocks save for backward"


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


def acting_values(settings: Settings, stage: Stage) -> dict[str, Any]:
    """Return all settings as the stage's step uses them, with those it ignores set to None.

    Two configs for which this returns the same values run the same step.
    """
    values = settings.model_dump()
    if stage == "autoencoder":
        values["ldm"] = None
        _resolve_autoencoder(values["autoencoder"], settings)
        return values
    pixel_loss, training = settings.ldm.training.pixel_loss, settings.autoencoder.training
    values["data"]["patch_size"] = None  # stage 2 trains on whole volumes
    knobs: dict[str, Any] = {}
    if not pixel_loss.weight:
        values["ldm"]["training"]["pixel_loss"] = None
        # The autoencoder only encodes, without a backward pass.
        knobs["slab_rows"] = training.slab_rows if settings.ldm.latents.cache == "none" else None
    else:
        chunk = min(pixel_loss.chunk_size, settings.ldm.training.batch_size)
        values["ldm"]["training"]["pixel_loss"]["chunk_size"] = chunk
        # The frozen decoder is always checkpointed.
        levels = training.checkpoint_levels if training.checkpoints_blocks else "all"
        offload = training.use_gradient_checkpointing_offload
        knobs = {"slab_rows": training.slab_rows, "levels": levels, "offload": offload}
        knobs["offload_levels"] = training.offload_levels
    values["autoencoder"] = {**values["autoencoder"], "training": knobs, "norm_num_groups": None}
    if not pixel_loss.weight and settings.ldm.latents.cache != "none":
        values["autoencoder"]["implementation"] = None
    return values


def _resolve_autoencoder(values: dict[str, Any], settings: Settings) -> None:
    training, acting = settings.autoencoder.training, values["training"]
    values["norm_num_groups"] = settings.autoencoder.num_groups
    values["use_nonlocal_attention"] = settings.autoencoder.has_middle_attention
    acting["use_gradient_checkpointing"] = training.checkpoints_blocks
    acting["use_nested_checkpointing"] = training.nests_checkpoints
    levels = len(settings.autoencoder.num_channels)
    count = levels if training.checkpoint_levels == "all" else training.checkpoint_levels
    acting["checkpoint_levels"] = count if training.checkpoints_blocks else None
    if not training.uses_discriminator:
        acting["discriminator"] = None
    if not training.use_perceptual_loss:
        acting["perceptual"] = None
    else:
        acting["perceptual"]["chunk_size"] = _slices_at_once(settings)


def _slices_at_once(settings: Settings) -> int | None:
    """Return how many slices pass through the perceptual network at once; None if it takes no slices."""
    training = settings.autoencoder.training
    if not training.perceptual.network.startswith("lpips-"):
        return None
    per_volume = max(max(1, round(training.perceptual.slice_fraction * axis)) for axis in settings.training_grid)
    return min(training.perceptual.chunk_size, per_volume * training.batch_size * settings.autoencoder.in_channels)


def _always(name: str, changes: Changes, same: bool, lowers: str, on_cpu: bool = True) -> Proposer:
    """Return a proposer of one change, which `build_rungs` drops where it has no effect; on_cpu: also on a CPU."""
    proposal = Proposal(name, changes, same, lowers)
    return lambda settings: iter((proposal,) if on_cpu or settings.device.type != "cpu" else ())


_lean = _always(
    "SDPA and lean blocks",
    {"autoencoder.implementation": "lean"},
    True,
    "the activations that blocks and attention save",
)
_checkpoint_all = _always(
    "checkpointing", {f"{STAGE_1}.use_gradient_checkpointing": True, f"{STAGE_1}.checkpoint_levels": "all"}, True, SAVED
)
_perceptual_chunk = _always(
    "perceptual loss one slice at a time",
    {f"{STAGE_1}.perceptual.chunk_size": 1},
    True,
    "the activations of the perceptual network",
)
_mixed_precision = _always(
    "mixed precision", {"device.mixed_precision": True}, False, "activations, which become 16-bit", on_cpu=False
)
_no_perceptual = _always(
    "no perceptual loss", {f"{STAGE_1}.use_perceptual_loss": False}, False, "the perceptual network and its activations"
)
_ldm_checkpointing = _always(
    "checkpointing of the U-Net",
    {f"{STAGE_2}.use_gradient_checkpointing": True},
    True,
    "the activations that the U-Net's blocks save for backward",
)
_ldm_offload = _always(
    "U-Net block inputs on the host",
    {f"{STAGE_2}.use_gradient_checkpointing_offload": True},
    True,
    "the inputs of the U-Net's blocks",
    on_cpu=False,
)
_pixel_chunk = _always(
    "pixel loss one volume at a time", {f"{STAGE_2}.pixel_loss.chunk_size": 1}, True, "the activations of the decoder"
)
_no_pixel_loss = _always(
    "no pixel loss", {f"{STAGE_2}.pixel_loss.weight": 0.0}, False, "the decoder and its activations"
)


def _latent_cache(settings: Settings) -> Iterator[Proposal]:
    if settings.ldm.latents.cache == "none":
        yield Proposal("latents from the cache", {"ldm.latents.cache": "disk"}, True, "the memory for encoding volumes")


def _micro_batch(where: str, settings: Settings) -> Iterator[Proposal]:
    training = look_up(settings, where)
    size, accumulation = training.batch_size, training.gradient_accumulation_steps
    for divisor in range(2, size + 1):
        if size % divisor == 0:
            changes = {
                f"{where}.batch_size": size // divisor,
                f"{where}.gradient_accumulation_steps": accumulation * divisor,
            }
            lowers = "the activations of a micro-batch"
            yield Proposal(f"micro-batch {size // divisor}", changes, True, lowers, "micro-batch")


def _checkpoint_levels(settings: Settings) -> Iterator[Proposal]:
    training, levels = settings.autoencoder.training, len(settings.autoencoder.num_channels)
    done = (levels if training.checkpoint_levels == "all" else training.checkpoint_levels) * training.checkpoints_blocks
    for count in range(done + 1, levels + 1):
        changes = {
            f"{STAGE_1}.use_gradient_checkpointing": True,
            f"{STAGE_1}.checkpoint_levels": "all" if count == levels else count,
        }
        yield Proposal(f"checkpointing, {count} of {levels} levels", changes, True, SAVED, "checkpointing")


def _nested(settings: Settings) -> Iterator[Proposal]:
    if not settings.autoencoder.training.use_gradient_checkpointing_offload:
        changes = {f"{STAGE_1}.use_nested_checkpointing": True}
        yield Proposal("nested checkpointing", changes, True, "the inputs of the encoder's blocks")


def _slabs(settings: Settings) -> Iterator[Proposal]:
    for rows in _thinner_slabs(settings):
        changes = {f"{STAGE_1}.slab_rows": rows}
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
    if settings.autoencoder.training.use_gradient_checkpointing_offload:
        choices = _thinner_slabs(settings)
    else:
        choices = [0, *(rows for rows in SLAB_ROWS if rows <= settings.training_grid[0] // 2)]
    for rows in choices:
        changes = {
            f"{STAGE_1}.use_gradient_checkpointing_offload": True,
            f"{STAGE_1}.use_nested_checkpointing": False,
            f"{STAGE_1}.slab_rows": rows,
        }
        name = f"offload, slabs of {rows} rows" if rows else "offload"
        yield Proposal(name, changes, True, "block inputs, which move to the host", "offload")


def _offload_levels(settings: Settings) -> Iterator[Proposal]:
    """Propose levels in host memory, with what is left on the device offloaded too; nesting takes less of the host."""
    s = settings.autoencoder
    if settings.device.type == "cpu":
        return
    most = s.most_offload_levels
    for count in range(s.training.offload_levels + 1, most + 1):
        changes = {
            f"{STAGE_1}.offload_levels": count,
            f"{STAGE_1}.slab_rows": min(s.training.slab_rows or SLAB_ROWS[-1], SLAB_ROWS[-1]),
            f"{STAGE_1}.use_gradient_checkpointing_offload": True,
            f"{STAGE_1}.use_nested_checkpointing": True,
        }
        name = f"{count} of {len(s.num_channels)} levels in host memory"
        yield Proposal(name, changes, True, "volumes and gradients of the highest levels", "levels in host memory")


def _discriminator(settings: Settings) -> Iterator[Proposal]:
    if settings.autoencoder.training.uses_discriminator:
        current = settings.autoencoder.training.discriminator
        smaller = {
            f"{STAGE_1}.discriminator.num_layers_d": min(current.num_layers_d, max(2, current.num_layers_d - 1)),
            f"{STAGE_1}.discriminator.num_channels": _fewer(current.num_channels, 1, 2),
        }
        yield Proposal("smaller discriminator", smaller, False, "the discriminator and its activations")


def _attention(where: str, settings: Settings) -> Iterator[Proposal]:
    levels = list(look_up(settings, where).attention_levels)
    # The U-Net's middle block always has attention; the autoencoder's only if a level has it or the config asks.
    keeps_middle = where == "ldm.unet" or settings.autoencoder.use_nonlocal_attention is True
    for number, attends in enumerate(tuple(levels)):
        if attends:
            levels[number] = False
            is_last = not any(levels) and not keeps_middle
            name = "no attention" if is_last else f"no attention at level {number}"
            changes = {f"{where}.attention_levels": tuple(levels)}
            lowers = "the activations of attention, and above all its compute"
            yield Proposal(name, changes, False, lowers, "attention")


def _channels(where: str, settings: Settings) -> Iterator[Proposal]:
    channels = look_up(settings, where).num_channels
    for numerator, divisor in ((3, 4), (1, 2), (1, 4)):
        fewer = tuple(_fewer(count, numerator, divisor, multiple=4) for count in channels)
        if fewer != channels:
            changes = {f"{where}.num_channels": fewer, f"{where}.norm_num_groups": "auto"}
            yield Proposal(f"channels {list(fewer)}", changes, False, "activations and weights", "channels")


def _fewer(count: int, numerator: int, divisor: int, multiple: int = 1) -> int:
    """Return that fraction of `count` channels, at least MIN_CHANNELS but never more than `count`."""
    return min(count, max(MIN_CHANNELS, count * numerator // divisor // multiple * multiple))


def _grid(stage: Stage, settings: Settings) -> Iterator[Proposal]:
    """Halve the longest axes four times; `build_rungs` drops grids that the settings refuse as too small."""
    has_patches = stage == "autoencoder" and settings.data.patch_size is not None
    key = "data.patch_size" if has_patches else "data.voxel_size"
    grid = tuple(settings.training_grid if has_patches else settings.data.voxel_size)
    for _ in range(4):
        longest = max(grid)
        grid = tuple(axis // 2 if axis == longest else axis for axis in grid)
        yield Proposal(f"grid {'x'.join(map(str, grid))}", {key: grid}, False, "everything but the weights", "grid")


def _pixel_decoder(settings: Settings) -> Iterator[Proposal]:
    """Propose the memory knobs of stage 1 that the frozen decoder of the pixel loss uses."""
    if settings.ldm.training.pixel_loss.weight:
        yield from _lean(settings)
        yield from _checkpoint_all(settings)
        yield from _slabs(settings)
        yield from _offload_levels(settings)


PROPOSERS: dict[tuple[Stage, Order], Sequence[Proposer]] = {
    ("autoencoder", "lossless-first"): (
        _lean,
        partial(_micro_batch, STAGE_1),
        _checkpoint_levels,
        _nested,
        _slabs,
        _offload,
        _offload_levels,
        _perceptual_chunk,
        _mixed_precision,
        _no_perceptual,
        _discriminator,
        partial(_attention, "autoencoder"),
        partial(_channels, "autoencoder"),
        partial(_grid, "autoencoder"),
    ),
    # The steps of the guide's out-of-memory scenario, then its advice for when they are not enough.
    ("autoencoder", "guide"): (
        _mixed_precision,
        partial(_micro_batch, STAGE_1),
        _no_perceptual,
        partial(_channels, "autoencoder"),
        _checkpoint_all,
        _discriminator,
        partial(_attention, "autoencoder"),
        partial(_grid, "autoencoder"),
        _lean,
        _offload,
        _offload_levels,
    ),
    ("ldm", "lossless-first"): (
        _latent_cache,
        _pixel_chunk,
        partial(_micro_batch, STAGE_2),
        _pixel_decoder,
        _ldm_checkpointing,
        _ldm_offload,
        _mixed_precision,
        _no_pixel_loss,
        partial(_attention, "ldm.unet"),
        partial(_channels, "ldm.unet"),
        partial(_grid, "ldm"),
    ),
    ("ldm", "guide"): (
        _mixed_precision,
        partial(_micro_batch, STAGE_2),
        _no_pixel_loss,
        partial(_channels, "ldm.unet"),
        _ldm_checkpointing,
        partial(_attention, "ldm.unet"),
        partial(_grid, "ldm"),
        _ldm_offload,
    ),
}
