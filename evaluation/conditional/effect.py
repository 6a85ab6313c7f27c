"""Measures how much a condition matters: errors of samples with it, with another case's and without any."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from data import DataSplit, VolumeFile, from_unit, load_file, to_unit
from data.pairs.label_maps import mask_on_grid
from data.pairs.numbers import TABULAR, NumberCode
from data.pairs.pairs import Pairs
from diffusion.conditioning import Condition, check_conditions, held_out_with_hole, hidden
from diffusion.conditioning.conditions import Conditions, prepare_conditions
from diffusion.conditioning.volumes import hole_mask, lowered
from diffusion.latents import stage_two_data
from diffusion.normalisation import Normalisation
from diffusion.sampling import draw_volumes
from evaluation.trained_run import check_finite
from models.volume_codec import VolumeCodec
from runtime.files.names import printable
from runtime.processes import Process
from settings import DataError, DataSettings, Settings
from settings.conditioning import VolumeSettings
from training.validation.known_voxels import with_known
from training.validation.pair_metrics import OCCUPANCY, occupancy

RIGHT, SHUFFLED, HIDDEN = "right", "shuffled", "hidden"
INTERPOLATED, INTERPOLATED_KEPT = "interpolated", "interpolated_kept"


def evaluate_conditions(
    network: nn.Module,
    codec: VolumeCodec,
    settings: Settings,
    normalisation: Normalisation,
    of_conditions: Normalisation,
    code: NumberCode | None,
    volumes: DataSplit,
    seed: int,
    num: int,
    batch_size: int,
) -> tuple[Callable[[Sequence[int]], Condition] | None, dict[str, Any] | None]:
    """Return the conditions of samples, those of held-out volumes in turn, and what they are worth.

    `of_conditions`, the normalisation of condition volumes, and `code` are those that the network was trained with; the
    training volumes may have changed since. Both results are None if the run was trained without such conditions, and
    the second if they do not say what a volume looks like.
    """
    pairs = check_conditions(settings, volumes)
    conditions = prepare_conditions(settings, pairs, volumes, Process(codec.precision.device), codec, of_conditions)
    if conditions is None:
        return None, None
    conditions = as_trained(conditions, of_conditions, code, pairs)
    condition_of = partial(conditions.of_held_out, volumes.val, settings.ldm.conditioning)
    if not settings.ldm.conditioning.has_targets:
        return condition_of, None
    files = held_out_with_hole(pairs, volumes, settings.data)[:num]
    compared = (files, stage_two_data(settings.data), seed, batch_size)
    effect = condition_effect(network, codec, settings, normalisation, conditions, pairs, *compared)
    return condition_of, effect


def as_trained(
    conditions: Conditions, normalisation: Normalisation, code: NumberCode | None, pairs: Pairs
) -> Conditions:
    """Return the conditions with the normalisation and the code of numbers that a network was trained with.

    Raises DataError, naming the volume, for a word that is not in the code.
    """
    conditions = replace(conditions, normalisation=normalisation)
    if code is None or not pairs.numbers:
        return conditions
    vectors = []
    for name, row in zip(conditions.numbers, pairs.numbers, strict=True):
        try:
            vectors.append(code.encode(row))
        except ValueError as error:
            raise DataError(
                f"{printable(name)}: {error}, which the run was trained with; correct {TABULAR}.table, or train again"
            ) from None
    return replace(conditions, code=code, vectors=torch.tensor(vectors))


def condition_effect(
    network: nn.Module,
    codec: VolumeCodec,
    settings: Settings,
    normalisation: Normalisation,
    conditions: Conditions,
    pairs: Pairs,
    files: Sequence[VolumeFile],
    data: DataSettings,
    seed: int,
    batch_size: int,
) -> dict[str, Any]:
    """Return L1 (of intensities in [0, 1]) and PSNR of one sample for each held-out volume, against that volume.

    If the autoencoder was trained to weigh occupied voxels, also their IoU and Chamfer distance.
    `right` has the condition of the volume, `shuffled` that of the next one, `hidden` none, all from the same noise.
    What the right condition knows of the target is kept in all of them: around a hole, so that only the hole counts,
    and as means of blocks. In the latter case `interpolated` is the condition itself, and `interpolated_kept` has these
    means too. No mask is empty.
    """
    s = settings.ldm.conditioning
    masks = {file.name: _mask(pairs, conditions, file, data) for file in files}
    right = conditions.of_files(files, s)
    told = {RIGHT: right, SHUFFLED: conditions.of_files([*files[1:], files[0]], s)}
    if s.dropout:
        told[HIDDEN] = hidden(right, s)
    targets = [to_unit(load_file(file, data).image) for file in files]
    known = [_Known(s.volume, settings.seed, file, masks[file.name]) for file in files]
    results: dict[str, Any] = {"num": len(files), "region": "hole" if s.volume.fills else "volume"}
    threshold = settings.autoencoder.training.occupancy_threshold
    for name, condition in told.items():
        volumes = draw_volumes(
            network,
            codec,
            settings,
            normalisation,
            seed,
            range(len(files)),
            lambda positions, condition=condition: _rows(condition, positions),  # type: ignore[misc]
            batch_size,
        )
        drawn = [to_unit(check_finite(volume, f"sample {n}, {name}")).cpu() for n, volume in enumerate(volumes)]
        results[name] = _errors(known, drawn, targets, threshold)
    if s.volume.is_from_target and not s.volume.fills:
        smooth = [lowered(target, s.volume.degrade.downsample) for target in targets]
        nothing = [_Known(VolumeSettings(), settings.seed, file, None) for file in files]
        results[INTERPOLATED] = _errors(nothing, smooth, targets, threshold)
        results[INTERPOLATED_KEPT] = _errors(known, smooth, targets, threshold)
    return results


class _Known:
    """What the condition of one case knows of its target."""

    def __init__(self, s: VolumeSettings, seed: int, file: VolumeFile, mask: Tensor | None) -> None:
        self.settings, self.seed, self.file, self.mask = s, seed, file, mask

    def pair(self, sample: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of the sample and the target that are compared."""
        s = self.settings
        if s.fills:
            unknown = self._unknown(target)
            return sample[:, unknown], target[:, unknown]
        return with_known(sample, target, s, None), target

    def grids(self, sample: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is compared as volumes (C, D, H, W): of a hole the box around it, with nothing but the hole."""
        if not self.settings.fills:
            return self.pair(sample, target)
        unknown = self._unknown(target)
        box = (slice(None), *(slice(int(axis.min()), int(axis.max()) + 1) for axis in unknown.nonzero(as_tuple=True)))
        return (sample * unknown)[box], (target * unknown)[box]

    def _unknown(self, target: Tensor) -> Tensor:
        if self.mask is not None:
            return self.mask
        return hole_mask(target.shape[1:], self.settings.degrade.box, self.seed, self.file.digest, 0)


def _mask(pairs: Pairs, conditions: Conditions, file: VolumeFile, data: DataSettings) -> Tensor | None:
    if not pairs.masks:
        return None
    return torch.from_numpy(mask_on_grid(pairs.masks[conditions.numbers[file.name]].path, data))


def _rows(condition: Condition, positions: Sequence[int]) -> Condition:
    return condition.map(lambda part: part[list(positions)])


def _errors(
    known: Sequence[_Known], found: Sequence[Tensor], targets: Sequence[Tensor], threshold: float | None
) -> dict[str, Any]:
    """Return the mean errors of volumes in [0, 1]."""
    pairs = [k.pair(volume, target) for k, volume, target in zip(known, found, targets, strict=True)]
    grids = (k.grids(volume, target) for k, volume, target in zip(known, found, targets, strict=True))
    of_occupied = [occupancy(from_unit(one), from_unit(other), threshold) for one, other in grids]
    l1 = [float((found - true).abs().mean()) for found, true in pairs]
    squared = [max(float((found - true).square().mean()), 1e-10) for found, true in pairs]
    psnr = [float(-10 * torch.tensor(value).log10()) for value in squared]
    means = {name: statistics.fmean(row[name] for row in of_occupied) for name in of_occupied[0]}
    return {"l1": statistics.fmean(l1), "psnr": statistics.fmean(psnr), **means, "l1_of_volumes": l1}


def effect_lines(values: dict[str, Any]) -> list[str]:
    """Return the results as a table of text."""
    where = "in the hole" if values["region"] == "hole" else "of the whole volume"
    words = {
        RIGHT: "with its own condition",
        SHUFFLED: "with that of another volume",
        HIDDEN: "with none",
        INTERPOLATED: "condition, interpolated",
        INTERPOLATED_KEPT: "the same with its means kept",
    }
    of_occupied = [name for name in OCCUPANCY if name in values[RIGHT]]
    head = f"{'':<30}     L1   PSNR dB" + ("      IoU  Chamfer" if of_occupied else "")
    lines = [f"{values['num']} samples against their held-out volumes, error {where}", head]
    lines += [
        f"  {text:<28} {values[n]['l1']:8.4f} {values[n]['psnr']:8.2f}"
        + "".join(f" {values[n][name]:8.3f}" for name in of_occupied)
        for n, text in words.items()
        if n in values
    ]
    gain = 1 - values[RIGHT]["l1"] / max(values[SHUFFLED]["l1"], 1e-12)
    change = f"{100 * abs(gain):.1f} % {'lower' if gain >= 0 else 'higher'}"
    return [*lines, f"  L1 with the right condition is {change} than with another's"]
