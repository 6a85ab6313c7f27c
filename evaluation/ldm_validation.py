"""Validation of stage 2: the diffusion loss on held-out latents, and samples from fixed seeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from data import VolumeFile, from_unit, load_file, to_unit
from diffusion.conditioning.conditions import VOLUME
from diffusion.latent_batches import LatentBatch
from diffusion.latents import Latents
from diffusion.noise_process import predict
from diffusion.sampling import draw_volumes
from evaluation.conditional.known import with_known
from evaluation.pictures import Row, picture_of
from evaluation.previews import MAX_COPIES, Preview, ViewerVolume
from evaluation.real_volumes import RealVolumes
from training.ldm_step import LatentDiffusionStep

NOISE_LEVELS = (0.125, 0.375, 0.625, 0.875)
"""Diffusion times at which the held-out loss is measured, as fractions of the whole range."""


def validate_ldm(
    step: LatentDiffusionStep, latents: Latents, real: RealVolumes | None = None
) -> tuple[dict[str, float], Preview | None]:
    """Return the held-out diffusion loss over all processes and, in the first process, a preview of samples.

    `real` gives the real volumes that the preview puts beside the samples.
    Use the averaged weights if there are any. Every call uses the same latents, times, noise and seeds.
    """
    with _inference_weights(step):
        metrics = _held_out_loss(step, latents)
        has_preview = step.process.is_first and step.settings.ldm.sampling.num_previews
        preview = sample_preview(step, latents, real) if has_preview else None
    return metrics, preview


@torch.no_grad()
def _held_out_loss(step: LatentDiffusionStep, latents: Latents) -> dict[str, float]:
    totals = torch.zeros(len(NOISE_LEVELS) + 1, dtype=torch.float64)
    for batch in latents.validation_batches(step.codec.encode, step.process):
        totals[:-1] += held_out_losses(step, batch).cpu()
        totals[-1] += 1
    *losses, count = step.process.sum(totals).tolist()
    if not count:  # a data set of one volume has no held-out volumes
        return {}
    by_level = {f"val_diffusion_{level:g}": loss / count for level, loss in zip(NOISE_LEVELS, losses, strict=True)}
    return {"val_diffusion": sum(by_level.values()) / len(by_level), **by_level}


@torch.no_grad()
def held_out_losses(step: LatentDiffusionStep, batch: LatentBatch) -> Tensor:
    """Return the diffusion loss of a batch of one latent at each noise level."""
    # The mean of the latent distribution, so that the only noise is the fixed noise below.
    clean = step.normalisation.apply(batch.mean.to(step.process.device))
    condition = step.condition_of(batch)
    losses = []
    for level in NOISE_LEVELS:
        noise = step.noise.normal(f"validation {level}", batch.positions, clean.shape[1:])
        times = step.noise_process.times(torch.full((1,), level, device=step.process.device))
        noisy = step.noise_process.add_noise(clean, noise, times)
        with step.precision.autocast():
            prediction = predict(step.unet, noisy, times, condition, step.settings.ldm.unet.downsampling)
        target = step.noise_process.target(clean, noise, times)
        losses.append(F.mse_loss(prediction.float(), target).double())
    return torch.stack(losses)


def sample_preview(step: LatentDiffusionStep, latents: Latents, real: RealVolumes | None = None) -> Preview:
    """Draw the preview samples, always from the same seeds; the picture has one row per sample."""
    settings, number = step.settings, step.settings.ldm.sampling.num_previews
    volumes = draw_volumes(
        step.unet,
        step.codec,
        settings,
        step.normalisation,
        settings.seed,
        range(number),
        None
        if latents.conditions is None
        else partial(latents.conditions.of_held_out, latents.volumes.val, settings.ldm.conditioning),
        batch_size=step.training.batch_size,
    )
    rows, samples = [], []
    shown: dict[str, ViewerVolume] = {}
    for place, drawn in enumerate(volumes):
        volume = _as_written(drawn, step, latents, place)
        condition = _condition(step, latents, place)
        name = f"sample {place + 1}"
        label = ", ".join(part for part in (name, condition) if part)
        rows.append(Row.of(label, to_unit(volume[0]).cpu(), latents.spacing_mm))
        if settings.ldm.conditioning.has_targets:
            accompanying = _condition_and_target(latents, place)
            rows += [Row.of(name, one, spacing_mm) for _, name, one, spacing_mm in accompanying]
            if place < MAX_COPIES:
                shown |= {
                    f"{role}_{place}": ViewerVolume.of(from_unit(one[None]), place).described(
                        spacing_mm, settings.data.orientation, name
                    )
                    for role, name, one, spacing_mm in accompanying
                }
        if place < MAX_COPIES:
            kept = ViewerVolume.of(volume, place)
            shown[f"sample_{place}"] = kept.described(latents.spacing_mm, settings.data.orientation, name, condition)
            samples.append(to_unit(volume).cpu())
    if real is not None:
        shown |= {f"nearest_{place}": volume for place, volume in enumerate(real.nearest_to(samples))}
        shown |= {f"real_{place}": volume for place, volume in enumerate(real.held_out())}
    return Preview(picture_of(rows), shown)


def _held_out(latents: Latents, place: int) -> VolumeFile:
    """Return the held-out volume whose condition a preview sample gets."""
    return latents.volumes.val[place % len(latents.volumes.val)]


def _condition_and_target(latents: Latents, place: int) -> list[tuple[str, str, Tensor, tuple[float, ...]]]:
    """Return what a preview sample was conditioned on, and the real volume of that case.

    Each with its role in the viewer, its name, its (D, H, W) voxels in [0, 1] and its spacing.
    """
    assert latents.conditions is not None, "without partners a sample has no target"
    file = _held_out(latents, place)
    result = []
    for kind, shown in latents.conditions.shown(file.name):
        factors = [n / m for n, m in zip(latents.settings.voxel_size, shown.shape, strict=True)]
        spacing_mm = tuple(mm * factor for mm, factor in zip(latents.spacing_mm, factors, strict=True))
        named = "condition volume" if kind == VOLUME else kind
        result.append((kind.replace(" ", ""), f"{named} of {file.name}", shown, spacing_mm))
    target = to_unit(load_file(file, latents.settings).image[0])
    return [*result, ("target", f"{file.name}, real", target, latents.spacing_mm)]


def _as_written(volume: Tensor, step: LatentDiffusionStep, latents: Latents, place: int) -> Tensor:
    """Return a preview sample with what its condition knows of the target, as users get it."""
    s, conditions = step.settings.ldm.conditioning.volume, latents.conditions
    if conditions is None or conditions.image is None or not s.is_from_target:
        return volume
    file = _held_out(latents, place)
    _, unknown = conditions.image(conditions.numbers[file.name], 0)
    return with_known(volume.cpu(), load_file(file, latents.settings).image, s, unknown)


def _condition(step: LatentDiffusionStep, latents: Latents, place: int) -> str:
    """Return the condition of a preview sample in words; empty without one."""
    conditioning = step.settings.ldm.conditioning
    words = []
    if conditioning.type == "class":
        number, names = place % conditioning.num_classes, latents.volumes.class_names
        if latents.conditions is not None:
            number = _held_out(latents, place).label or 0
        words.append(f"class {names[number] if number < len(names) else number}")
    if conditioning.has_targets:
        words.append(f"conditions of {_held_out(latents, place).name}")
    return ", ".join(words)


@contextmanager
def _inference_weights(step: LatentDiffusionStep) -> Iterator[None]:
    """Put the U-Net in eval mode with the averaged weights, as it will be exported."""
    step.unet.eval()
    with step.average.swapped_in() if step.average is not None else nullcontext():
        yield
    step.unet.train()
