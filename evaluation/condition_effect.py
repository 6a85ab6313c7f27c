"""Measures how much a condition matters: errors of samples with it, with another case's and without any."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from data import from_unit, load_file, to_unit
from diffusion.conditioning import hidden
from diffusion.conditioning.kind import NOTHING_KNOWN, KnownVoxels
from diffusion.conditioning.volume import lowered
from diffusion.latents import Latents
from diffusion.sampling import VolumeSampler
from evaluation.trained_run import check_finite
from training.validation.metrics import OCCUPANCY, occupancy

RIGHT, SHUFFLED, HIDDEN = "right", "shuffled", "hidden"
INTERPOLATED, INTERPOLATED_KEPT = "interpolated", "interpolated_kept"


def condition_effect(sampler: VolumeSampler, latents: Latents, held_out: Sequence[int]) -> dict[str, Any]:
    """Return L1 (of intensities in [0, 1]) and PSNR of one sample for each held-out volume, against that volume.

    `held_out` are the places of the volumes among the held-out ones; none has an empty mask. If the autoencoder was
    trained to weigh occupied voxels, also their IoU and Chamfer distance.
    `right` has the condition of the volume, `shuffled` that of the next one, `hidden` none, all from the same noise.
    What the right condition knows of the target is kept in all of them: around a hole, so that only the hole counts,
    and as means of blocks. In the latter case `interpolated` is the condition itself, and `interpolated_kept` has these
    means too.
    """
    settings, store = sampler.settings, latents.conditions
    assert store is not None, "without conditions there is no effect"
    s = settings.ldm.conditioning
    right = latents.held_out_condition(held_out)
    conditions = {RIGHT: right, SHUFFLED: right.rows([*range(1, len(held_out)), 0])}
    if s.dropout:
        conditions[HIDDEN] = hidden(right, s)
    targets = [to_unit(load_file(latents.volumes.val[place], latents.settings).image) for place in held_out]
    known = [store.known(latents.held_out_index(place)) or NOTHING_KNOWN for place in held_out]
    results: dict[str, Any] = {"num": len(held_out), "region": "hole" if s.volume.has_hole else "volume"}
    threshold = settings.autoencoder.training.occupancy_threshold
    for name, condition in conditions.items():
        volumes = sampler.draw(range(len(held_out)), condition.rows)
        drawn = [to_unit(check_finite(volume, f"sample {n}, {name}")).cpu() for n, volume in enumerate(volumes)]
        results[name] = _errors(known, drawn, targets, threshold)
    if s.volume.is_from_target and not s.volume.has_hole:
        smooth = [lowered(target, s.volume.degrade.downsample) for target in targets]
        results[INTERPOLATED] = _errors([NOTHING_KNOWN] * len(targets), smooth, targets, threshold)
        results[INTERPOLATED_KEPT] = _errors(known, smooth, targets, threshold)
    return results


def _errors(
    known: Sequence[KnownVoxels], found: Sequence[Tensor], targets: Sequence[Tensor], threshold: float | None
) -> dict[str, Any]:
    """Return the mean errors of volumes (C, D, H, W) in [0, 1], only in the hole if there is one."""
    l1, psnr, of_occupied = [], [], []
    for what, volume, target in zip(known, found, targets, strict=True):
        corrected = what.kept_in(volume, target)
        difference, grids = corrected - target, (corrected, target)
        if what.unknown is not None:
            corrected = corrected.clamp(0, 1)
            difference = (corrected - target)[:, what.unknown]
            places = what.unknown.nonzero(as_tuple=True)
            box = (slice(None), *(slice(int(axis.min()), int(axis.max()) + 1) for axis in places))
            grids = ((corrected * what.unknown)[box], (target * what.unknown)[box])
        l1.append(float(difference.abs().mean()))
        psnr.append(float(-10 * torch.tensor(max(float(difference.square().mean()), 1e-10)).log10()))
        of_occupied.append(occupancy(from_unit(grids[0]), from_unit(grids[1]), threshold))
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
