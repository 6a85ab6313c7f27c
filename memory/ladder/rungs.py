"""The rungs of the ladder: changes to a config that lower its memory, in the order in which to try them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from memory.predict.prediction import Stage
from settings import ConfigError, Settings, look_up

Order = Literal["lossless-first", "guide"]
Changes = dict[str, Any]
SLAB_ROWS = (32, 16)
"""Slabs of 8 rows need as much memory as those of 16 in nearly all presets, and more time: more, smaller kernels."""
HOST_ROWS = 8
"""Levels in host memory have only their slabs on the device, so thinner ones are worth it."""
MIN_CHANNELS = 8
FIRST = "autoencoder.training"


@dataclass(frozen=True)
class Rung:
    """A config on the ladder; `changes` are relative to the rung above, `all_changes` to the original config.

    family: later rungs of a family need less memory and more compute, so the first one that fits is enough.
    """

    name: str
    changes: Changes
    all_changes: Changes
    same_mathematics: bool
    settings: Settings
    family: str = ""


def build_rungs(settings: Settings, stage: Stage, order: Order) -> list[Rung]:
    """Return the config as the first rung, then the rungs below it; each keeps the changes of those above."""
    b = _Builder(settings, stage)
    orders = {
        ("autoencoder", "lossless-first"): (
            *(b.lean, b.micro_batch, b.checkpoint_levels, b.nested, b.slabs, b.offload, b.offload_levels),
            *(b.perceptual_chunk, b.mixed_precision, b.no_perceptual, b.discriminator, b.attention, b.channels, b.grid),
        ),
        # The steps of the guide's out-of-memory scenario, then its advice for when they are not enough.
        ("autoencoder", "guide"): (
            *(b.mixed_precision, b.micro_batch, b.no_perceptual, b.channels, b.checkpoint_all, b.discriminator),
            *(b.attention, b.grid, b.lean, b.offload, b.offload_levels),
        ),
        ("ldm", "lossless-first"): (
            *(b.latent_cache, b.pixel_loss, b.unet_checkpointing, b.unet_offload),
            *(b.mixed_precision, b.no_pixel_loss, b.attention, b.channels, b.grid),
        ),
        ("ldm", "guide"): (
            *(b.mixed_precision, b.micro_batch, b.no_pixel_loss, b.channels, b.unet_checkpointing),
            *(b.attention, b.grid, b.unet_offload),
        ),
    }
    for add in orders[stage, order]:
        add()
    return b.rungs


class _Builder:
    """The rungs so far; each method adds the rungs of one kind, if they change anything."""

    def __init__(self, settings: Settings, stage: Stage) -> None:
        self.stage = stage
        self.network = "autoencoder" if stage == "autoencoder" else "ldm.unet"
        self.rungs = [Rung("as configured", {}, {}, True, settings)]

    @property
    def settings(self) -> Settings:
        return self.rungs[-1].settings

    @property
    def is_for_gpu(self) -> bool:
        """Return whether 16 bits help and something can move to the host: a CPU is the host."""
        return self.settings.device.type != "cpu"

    def add(self, name: str, changes: Changes, same: bool = True, family: str = "") -> None:
        above = self.rungs[-1]
        changes = {key: value for key, value in changes.items() if look_up(above.settings, key) != value}
        try:
            settings = above.settings.with_overrides(changes)
        except (ConfigError, ValueError):
            return  # for example, a grid that the levels cannot halve
        if changes:
            same = same and above.same_mathematics
            self.rungs.append(Rung(name, changes, {**above.all_changes, **changes}, same, settings, family))

    def lean(self) -> None:
        self.add("SDPA and lean blocks", {"autoencoder.implementation": "lean"})

    def micro_batch(self) -> None:
        training, where = self.settings.training_of(self.stage), f"{self.stage}.training"
        size, accumulation = training.batch_size, training.gradient_accumulation_steps
        for divisor in (number for number in range(2, size + 1) if size % number == 0):
            changes = {
                f"{where}.batch_size": size // divisor,
                f"{where}.gradient_accumulation_steps": accumulation * divisor,
            }
            self.add(f"micro-batch {size // divisor}", changes, family="micro-batch")

    def _checkpointed_levels(self) -> int:
        """Return how many levels of the autoencoder are checkpointed; the frozen decoder of stage 2 always is."""
        training, levels = self.settings.autoencoder.training, len(self.settings.autoencoder.num_channels)
        if not training.checkpoints_blocks:
            return levels if self.stage == "ldm" else 0
        return levels if training.checkpoint_levels == "all" else training.checkpoint_levels

    def checkpoint_all(self) -> None:
        if self._checkpointed_levels() < len(self.settings.autoencoder.num_channels):
            changes = {f"{FIRST}.use_gradient_checkpointing": True, f"{FIRST}.checkpoint_levels": "all"}
            self.add("checkpointing", changes)

    def checkpoint_levels(self) -> None:
        levels = len(self.settings.autoencoder.num_channels)
        for count in range(self._checkpointed_levels() + 1, levels + 1):
            all_or_count = "all" if count == levels else count
            changes = {f"{FIRST}.use_gradient_checkpointing": True, f"{FIRST}.checkpoint_levels": all_or_count}
            self.add(f"checkpointing, {count} of {levels} levels", changes, family="checkpointing")

    def nested(self) -> None:
        training = self.settings.autoencoder.training
        if not training.use_gradient_checkpointing_offload and not training.nests_checkpoints:
            self.add("nested checkpointing", {f"{FIRST}.use_nested_checkpointing": True})

    def slabs(self) -> None:
        for rows in self._thinner_slabs():
            self.add(f"slabs of {rows} rows", {f"{FIRST}.slab_rows": rows}, family="slabs")

    def _thinner_slabs(self, current: int = 0) -> list[int]:
        current = current or self.settings.autoencoder.training.slab_rows or self.settings.training_grid[0]
        return [rows for rows in SLAB_ROWS if rows <= current // 2]

    def offload(self) -> None:
        """Offload with whole blocks first, then with slabs; only thinner slabs if the config already offloads.

        Nesting is turned off, because the host keeps what nesting would recompute.
        """
        choices = [0, *self._thinner_slabs(self.settings.training_grid[0])]
        if self.settings.autoencoder.training.use_gradient_checkpointing_offload:
            choices = self._thinner_slabs()
        for rows in choices if self.is_for_gpu else ():
            changes = {
                f"{FIRST}.use_gradient_checkpointing_offload": True,
                f"{FIRST}.use_nested_checkpointing": False,
                f"{FIRST}.slab_rows": rows,
            }
            self.add(f"offload, slabs of {rows} rows" if rows else "offload", changes, family="offload")

    def offload_levels(self) -> None:
        """Put levels into host memory and offload what is left on the device; nesting takes less of the host."""
        s = self.settings.autoencoder
        for count in range(s.training.offload_levels + 1, s.most_offload_levels + 1) if self.is_for_gpu else ():
            changes = {
                f"{FIRST}.offload_levels": count,
                f"{FIRST}.slab_rows": min(s.training.slab_rows or HOST_ROWS, HOST_ROWS),
                f"{FIRST}.use_gradient_checkpointing_offload": True,
                f"{FIRST}.use_nested_checkpointing": True,
            }
            name = f"{count} of {len(s.num_channels)} levels in host memory"
            self.add(name, changes, family="levels in host memory")

    def perceptual_chunk(self) -> None:
        training = self.settings.autoencoder.training
        if training.use_perceptual_loss and training.perceptual.network.startswith("lpips-"):
            self.add("perceptual loss one slice at a time", {f"{FIRST}.perceptual.chunk_size": 1})

    def latent_cache(self) -> None:
        if self.settings.ldm.latents.cache == "none":
            self.add("latents from the cache", {"ldm.latents.cache": "disk"})

    def pixel_loss(self) -> None:
        """Lower what the pixel loss needs: fewer volumes at a time, and the knobs of stage 1 for its frozen decoder."""
        training = self.settings.ldm.training
        if training.pixel_loss.weight and min(training.pixel_loss.chunk_size, training.batch_size) > 1:
            self.add("pixel loss one volume at a time", {"ldm.training.pixel_loss.chunk_size": 1})
        self.micro_batch()
        if training.pixel_loss.weight:
            for add in (self.lean, self.checkpoint_all, self.slabs, self.offload_levels):
                add()

    def unet_checkpointing(self) -> None:
        self.add("checkpointing of the U-Net", {"ldm.training.use_gradient_checkpointing": True})

    def unet_offload(self) -> None:
        if self.is_for_gpu:
            self.add("U-Net block inputs on the host", {"ldm.training.use_gradient_checkpointing_offload": True})

    def mixed_precision(self) -> None:
        if self.is_for_gpu:
            self.add("mixed precision", {"device.mixed_precision": True}, same=False)

    def no_perceptual(self) -> None:
        self.add("no perceptual loss", {f"{FIRST}.use_perceptual_loss": False}, same=False)

    def no_pixel_loss(self) -> None:
        self.add("no pixel loss", {"ldm.training.pixel_loss.weight": 0.0}, same=False)

    def discriminator(self) -> None:
        if self.settings.autoencoder.training.uses_discriminator:
            now = self.settings.autoencoder.training.discriminator
            smaller = {
                f"{FIRST}.discriminator.num_layers_d": min(now.num_layers_d, max(2, now.num_layers_d - 1)),
                f"{FIRST}.discriminator.num_channels": _fewer(now.num_channels, 0.5),
            }
            self.add("smaller discriminator", smaller, same=False)

    def attention(self) -> None:
        levels = list(look_up(self.settings, self.network).attention_levels)
        # The U-Net's middle block always has attention; the autoencoder's only if a level has it or the config asks.
        keeps_middle = self.stage == "ldm" or self.settings.autoencoder.use_nonlocal_attention is True
        for number in [number for number, attends in enumerate(levels) if attends]:
            levels[number] = False
            name = f"no attention at level {number}" if any(levels) or keeps_middle else "no attention"
            self.add(name, {f"{self.network}.attention_levels": tuple(levels)}, same=False, family="attention")

    def channels(self) -> None:
        channels = look_up(self.settings, self.network).num_channels
        for share in (0.75, 0.5, 0.25):
            fewer = tuple(_fewer(count, share, multiple=4) for count in channels)
            if fewer != channels:
                changes = {f"{self.network}.num_channels": fewer, f"{self.network}.norm_num_groups": "auto"}
                self.add(f"channels {list(fewer)}", changes, same=False, family="channels")

    def grid(self) -> None:
        """Halve the longest axes four times; grids that the settings refuse as too small are left out."""
        has_patches = self.stage == "autoencoder" and self.settings.data.patch_size is not None
        key = "data.patch_size" if has_patches else "data.voxel_size"
        grid = look_up(self.settings, key)
        for _ in range(4):
            longest = max(grid)
            grid = tuple(axis // 2 if axis == longest else axis for axis in grid)
            self.add(f"grid {'x'.join(map(str, grid))}", {key: grid}, same=False, family="grid")


def _fewer(count: int, share: float, multiple: int = 1) -> int:
    """Return that share of `count` channels, at least MIN_CHANNELS but never more than `count`."""
    return min(count, max(MIN_CHANNELS, int(count * share) // multiple * multiple))
