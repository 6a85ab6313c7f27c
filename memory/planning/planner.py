"""Searches upward: the finest grid and the most capable networks that fit a budget. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from memory.planning.choice import Choice
from memory.planning.choices import (
    as_values,
    channel_choices,
    class_choices,
    data_choices,
    intensity_choices,
    occupancy_choices,
)
from memory.planning.fingerprint import Fingerprint
from memory.planning.layout import Extent, Grid, Layout, covered_extent, fixed_layout, layouts
from memory.planning.networks import Network, Scene, Values, autoencoder_choices, unet_choices
from memory.planning.search import Asker, Verdict, last_that_fits
from memory.planning.sizing import LEAST_WIDTH, UNET_WIDTHS, WIDTHS, sizing_of
from memory.predict.prediction import CONTEXT_BYTES, GIB, TRAINING_STEP, Stage
from runtime.cli import OUT_OF_MEMORY
from settings import DataSettings, Settings, UserError, validate
from settings.dotted import assign

SMALLEST_PATCH, LARGEST_PATCH, PATCH_STEP = 64, 256, 16
PLAIN_PATCH, CHECKPOINTED_PATCH = 96, 128
"""Patches of the first size without checkpoints are better than larger ones with; the second size is large enough."""
DEFAULT_SEED: int = Settings.model_fields["seed"].default
STAGES: tuple[Stage, Stage] = ("autoencoder", "ldm")


class NothingFitsError(UserError):
    """Not even the smallest network on the coarsest grid fits; the text says what it needs."""

    exit_code = OUT_OF_MEMORY


@dataclass(frozen=True)
class Draft:
    """A network for each stage on one grid."""

    scene: Scene
    first: Network
    second: Network

    def network(self, stage: Stage) -> Network:
        """Return the network of a stage."""
        return self.first if stage == "autoencoder" else self.second

    def with_network(self, stage: Stage, network: Network) -> Draft:
        """Return a draft with another network for a stage."""
        return replace(self, first=network) if stage == "autoencoder" else replace(self, second=network)


class Planner:
    """Everything that stays the same while a plan is searched."""

    def __init__(self, fingerprint: Fingerprint, given: Values, asker: Asker, name: str) -> None:
        self.fingerprint, self.given, self.ask, self.name = fingerprint, given, asker, name
        self.extent = self._extent()
        self._splits: dict[tuple[Any, ...], tuple[int, int]] = {}

    def _extent(self) -> Extent:
        extent = covered_extent(self.fingerprint)
        if spacing := self.given.get("data.spacing"):
            extent = replace(extent, spacing_mm=tuple(spacing))
        if resize := self.given.get("data.resize"):
            extent = replace(extent, resize=resize)
        depth, unet = self._given_levels("autoencoder"), self._given_levels("ldm.unet")
        extent = replace(extent, depth=depth and depth - 1, unet_levels=unet)
        # MONAI's blocks halve all axes.
        default = 2 if self.given.get("autoencoder.implementation") == "monai" else None
        strides = self.given.get("autoencoder.strides", default)
        return replace(extent, strides=tuple(map(tuple, strides)) if isinstance(strides, list) else strides)

    def _given_levels(self, network: str) -> int | None:
        """Return how many levels the lists that the user gave have, None if there are none."""
        names = ("num_channels", "attention_levels", "num_res_blocks", "num_head_channels")
        lists = [self.given.get(f"{network}.{name}") for name in names]
        return next((len(values) for values in lists if isinstance(values, list | tuple)), None)

    def layouts(self) -> list[Layout]:
        """Return the grids to choose from, the coarsest first; one if the user gave it."""
        if grid := self.given.get("data.voxel_size"):
            return [fixed_layout(tuple(grid), self.extent)]
        found = layouts(self.extent)
        return found[-1:] if self.given.get("data.spacing") else found

    def scene(self, layout: Layout, shortened: float = 1.0) -> Scene:
        """Return what networks on a grid have in common."""
        found = self.fingerprint
        channels = self.given.get("autoencoder.in_channels") or found.num_channels
        sizing = sizing_of(found, layout)
        values = as_values([*data_choices(found, self.extent, layout, sizing), *class_choices(found)]) | self.given
        num_training, _ = self._split_by(values)
        return Scene(layout, sizing, num_training, channels, self.given, shortened)

    def choices(self, draft: Draft) -> list[Choice]:
        """Return every value that the plan sets, with its reason; what the user gave is taken."""
        found, scene = self.fingerprint, draft.scene
        precision = "small volumes need little memory" if scene.sizing.full_precision else "half the memory"
        chosen = [
            Choice("name", self.name, "outputs go to runs/<name>"),
            Choice("data.source", found.source, "given as --data"),
            *data_choices(found, self.extent, scene.layout, scene.sizing),
            *intensity_choices(found, self.given.get("data.intensity.mode")),
            *([] if any(key.startswith("data.intensity.") for key in self.given) else channel_choices(found)),
            *class_choices(found),
            *autoencoder_choices(draft.first, scene),
            *occupancy_choices(found),
            *unet_choices(draft.second, scene),
            Choice("device.mixed_precision", not scene.sizing.full_precision, precision),
        ]
        by_key = {choice.key: choice for choice in chosen}
        for key, value in self.given.items():
            by_key[key] = Choice(key, value, "given on the command line")
        if "data.val_fraction" not in self.given:
            values = {key: choice.value for key, choice in by_key.items()}
            _, held_out = self._split_by(values)
            reason = f"{held_out} of {found.number} to validate with"
            by_key["data.val_fraction"] = replace(by_key["data.val_fraction"], reason=reason)
        return list(by_key.values())

    def _split_by(self, values: Values) -> tuple[int, int]:
        """Return how many volumes train and how many are held out by the values of some keys."""
        fraction, group_by = values["data.val_fraction"], values["data.group_by"]
        return self._split(fraction, group_by, values.get("data.class_labels"), values.get("seed", DEFAULT_SEED))

    def _split(self, val_fraction: float, group_by: str | None, labels: str | None, seed: int) -> tuple[int, int]:
        """Return how many volumes train and how many are held out, as training will split them."""
        key = (val_fraction, group_by, labels, seed)
        if key not in self._splits:
            found = self.fingerprint
            s = DataSettings(source=found.source, val_fraction=val_fraction, group_by=group_by, class_labels=labels)
            self._splits[key] = found.split(s, seed)
        return self._splits[key]

    def settings(self, draft: Draft) -> Settings:
        """Return the validated config of a draft; raise `ConfigError` if what the user gave does not fit together."""
        values: dict[str, Any] = {}
        for choice in self.choices(draft):
            assign(values, choice.key, choice.value)
        return validate(values)

    def verdict(self, draft: Draft, stage: Stage) -> Verdict:
        """Return what a stage of a draft needs."""
        return self._ask(self.settings(draft), stage)

    def _ask(self, settings: Settings, stage: Stage) -> Verdict:
        s = settings.data
        return self.ask(settings, stage, self._split(s.val_fraction, s.group_by, s.class_labels, settings.seed))

    def verdicts(self, draft: Draft) -> tuple[Verdict, Verdict]:
        """Return what both stages need, predicted at the same time."""
        settings = self.settings(draft)
        for stage in STAGES:
            self.ask.start(settings, stage)
        return self._ask(settings, "autoencoder"), self._ask(settings, "ldm")

    def best(self, scene: Scene) -> Draft | None:
        """Return the most capable networks on a grid that fit, None if none does; searches both stages at once."""
        top = self.top(scene)
        # Sampling decodes, so the second stage needs an autoencoder before the first has found one.
        narrow = replace(top, first=self.least(scene).first)
        with ThreadPoolExecutor(len(STAGES)) as threads:
            first, second = threads.map(self._climb, (top, narrow), STAGES)
        return None if first is None or second is None else Draft(scene, first, second)

    @staticmethod
    def top(scene: Scene) -> Draft:
        """Return the most that a set supports: the greatest widths and batches, without checkpoints."""
        s = scene.sizing
        return Draft(scene, Network(s.width, s.batch, False), Network(s.unet_width, s.unet_batch, False))

    def _climb(self, top: Draft, stage: Stage) -> Network | None:
        best = top.network(stage)
        if self.verdict(top, stage).fits:
            return best
        steps = [replace(best, width=width, batch=1, checkpoints=True) for width in self._widths(stage, best.width)]
        found = self._last(top, stage, steps)
        if found is not None and found.width == best.width:
            return self._relax(top, stage, found, best.batch)
        if stage == "autoencoder":
            # A wide network on patches is better than a narrow one on whole volumes.
            patched = self._patches(top, best.width, best.batch)
            return patched if patched and (found is None or patched.width > found.width) else found
        return found

    def _relax(self, top: Draft, stage: Stage, found: Network, batch: int) -> Network:
        """Spend what is left at the greatest width: no checkpoints, and a larger micro-batch."""
        plain = self._last(top, stage, [replace(found, batch=n, checkpoints=False) for n in range(1, batch + 1)])
        return plain or self._last(top, stage, [replace(found, batch=n) for n in range(1, batch + 1)]) or found

    def _patches(self, top: Draft, width: int, batch: int) -> Network | None:
        """Return the widest network that can train on patches, on the largest patches that fit.

        Checkpoints only if the network becomes wider by them, which validating whole volumes may prevent.
        """
        if self.given.get("data.patch_size"):
            return None
        grids, widths = self._patch_grids(top.scene.layout), self._widths("autoencoder", width)
        large = [grid for grid in grids if math.prod(grid) >= PLAIN_PATCH**3] or grids[-1:]
        small = [grid for grid in grids if math.prod(grid) <= CHECKPOINTED_PATCH**3]

        def widest(checkpoints: bool, grid: Grid) -> Network | None:
            return self._last(top, "autoencoder", [Network(width, 1, checkpoints, grid) for width in widths])

        found = widest(False, large[0])
        if found is None or 2 * found.width < width:
            checkpointed = widest(True, small[0])
            if checkpointed and (found is None or checkpointed.width > found.width):
                found = checkpointed
        if found is None:
            return None
        grown = [replace(found, patch=grid) for grid in (small if found.checkpoints else large)]
        grown += [replace(grown[-1], batch=number) for number in range(2, batch + 1)]
        return self._last(top, "autoencoder", grown) or found

    def nearest_patch(self, layout: Layout, patch: Grid) -> Grid:
        """Return the patch of a layout that has about as many voxels as another."""
        return min(self._patch_grids(layout), key=lambda grid: abs(math.prod(grid) - math.prod(patch)))

    @staticmethod
    def _patch_grids(layout: Layout) -> list[Grid]:
        """Return patches within a grid, the smallest first; each has one axis longer than the one before."""
        grids = []
        for number in range(3 * (LARGEST_PATCH - SMALLEST_PATCH) // PATCH_STEP + 1):
            axes = [SMALLEST_PATCH + (number + 2 - axis) // 3 * PATCH_STEP for axis in range(3)]
            even = [max(f, n - n % f) for n, f in zip(axes, layout.factor, strict=True)]
            grids.append(tuple(map(min, layout.grid, even)))
        return list(dict.fromkeys(grids))

    def _widths(self, stage: Stage, most: int) -> list[int]:
        widths = WIDTHS if stage == "autoencoder" else UNET_WIDTHS
        least = min(LEAST_WIDTH if stage == "autoencoder" else UNET_WIDTHS[0], most)
        return [width for width in widths if least <= width <= most]

    def _last(self, top: Draft, stage: Stage, networks: Sequence[Network]) -> Network | None:
        """Return the last of some networks that fits, None if none does; what the top needs says where to begin."""
        if not networks:
            return None
        grid, limit = top.scene.layout.grid, self.ask.budget_bytes

        def need(network: Network) -> float:
            return self.verdict(top.with_network(stage, network), stage).needed_bytes

        costs = [network.cost(grid) for network in networks]
        slope = (need(top.network(stage)) - CONTEXT_BYTES) / top.network(stage).cost(grid)
        start = max((n for n, cost in enumerate(costs) if CONTEXT_BYTES + slope * cost <= limit), default=0)
        position = last_that_fits(networks, lambda network: network.cost(grid), need, limit, start, CONTEXT_BYTES)
        return networks[position] if position >= 0 else None

    def best_of_all(self) -> Draft:
        """Return the most capable networks on the finest grid that leaves room for any; raise `NothingFitsError`."""
        choices, limit = self.layouts(), self.ask.budget_bytes
        draft = self.best(self.scene(choices[-1]))

        def need(layout: Layout) -> float:
            return max(verdict.needed_bytes for verdict in self.verdicts(self.least(self.scene(layout))))

        if draft is None and len(choices) > 1:
            coarser = choices[:-1]
            position = last_that_fits(coarser, lambda layout: layout.voxels, need, limit, len(coarser), CONTEXT_BYTES)
            draft = self.best(self.scene(coarser[position])) if position >= 0 else None
        if draft is None:
            raise self.nothing_fits(self.least(self.scene(choices[0])))
        return draft

    def nothing_fits(self, least: Draft) -> NothingFitsError:
        """Return the error that says what the smallest plan needs."""
        needed = max(verdict.needed_bytes for verdict in self.verdicts(least)) / GIB
        return NothingFitsError(
            f"--budget-gb: nothing fits {self.ask.budget_bytes / GIB:g} GiB; the smallest plan, "
            f"{_times(least.scene.layout.grid)}, needs {needed:.2f} GiB with its margin; give a larger budget, or a "
            "coarser data.voxel_size"
        )

    def settled(self, draft: Draft) -> Draft:
        """Return the draft with a second stage that fits beside its autoencoder, which the search did not know."""
        while not (verdict := self.verdict(draft, "ldm")).fits:
            narrower = [width for width in UNET_WIDTHS if width < draft.second.width]
            if verdict.prediction.needing_phase == TRAINING_STEP and draft.second.batch > 1:
                draft = replace(draft, second=replace(draft.second, batch=draft.second.batch - 1))
            elif narrower:
                draft = replace(draft, second=replace(draft.second, width=narrower[-1]))
            else:
                less = [width for width in WIDTHS if width < draft.first.width]
                if not less:
                    return draft
                draft = replace(draft, first=replace(draft.first, width=less[-1]))
        return draft

    def least(self, scene: Scene) -> Draft:
        """Return the smallest networks that are worth training on a grid."""
        patch = self._patch_grids(scene.layout)[0]
        is_whole = patch == scene.layout.grid or self.given.get("data.patch_size")
        width, unet = min(LEAST_WIDTH, scene.sizing.width), min(64, scene.sizing.unet_width)
        return Draft(scene, Network(width, 1, True, None if is_whole else patch), Network(unet, 1, True))


def _times(grid: Grid) -> str:
    return "x".join(map(str, grid))
