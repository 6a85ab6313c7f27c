"""What a run is worth: reconstructions of held-out volumes, samples beside volumes, and what a condition is worth.

The last is measured by errors of samples with their condition, with another case's and without any.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from data import DataSplit, VolumeFile
from data.loading import from_unit, load_file, to_unit
from diffusion.conditioning import check_conditions, hidden
from diffusion.conditioning.kind import NOTHING_KNOWN, KnownVoxels
from diffusion.conditioning.volume import held_out_with_hole, lowered
from diffusion.latents import Latents, prepare_latents, stage_two_data
from diffusion.sampling import ConditionOf, VolumeSampler
from evaluation.fid import FeatureNetwork, Features, caution, fid_and_kid
from evaluation.trained_run import SampleFrame, check_finite
from models.volume_codec import VolumeCodec
from runtime.cli import ProgressBar
from runtime.files import printable
from runtime.processes import Process
from runtime.randomness import SampleNoise
from settings import DataSettings
from training.validation.metrics import (
    OCCUPANCY,
    compare_sharpness,
    gradient_magnitude,
    laplacian_kurtosis,
    mean_pairwise_ms_ssim,
    ms_ssim,
    nearest,
    occupancy,
    psnr,
    ssim,
    summary_vector,
)
from training.validation.skill import LinearDenoiser, Skill

log = logging.getLogger(__name__)

EFFECT = {
    "right": "with its own condition",
    "shuffled": "with that of another volume",
    "hidden": "with none",
    "interpolated": "condition, interpolated",
    "interpolated_kept": "the same with its means kept",
}
"""The conditions of samples and what they are compared with, by their names among the results."""

MEMORISED_RATIO = 0.5
"""A sample counts as memorised when its distance to the nearest training volume is below this share of the median
over held-out volumes."""


def evaluate_reconstructions(
    codec: VolumeCodec, files: Sequence[VolumeFile], data: DataSettings, threshold: float | None = None
) -> dict[str, Any]:
    """Return PSNR, SSIM and MS-SSIM of each volume's reconstruction, their means with 95 % intervals, and sharpness.

    With the threshold above which a voxel is occupied, also IoU and Chamfer distance.
    """
    rows: list[dict[str, Any]] = []
    slopes: list[list[float]] = []
    for file in ProgressBar(files, desc="reconstructions", unit="volume"):
        image = load_file(file, data).image.to(codec.precision.device)
        reconstruction = check_finite(codec.decode(codec.encode(image)), printable(file.name))
        pair = reconstruction[None], image[None]
        units = [to_unit(volume) for volume in pair]
        slopes.append([gradient_magnitude(unit[0]) for unit in units])
        similarity = {"psnr": float(psnr(*pair)), "ssim": float(ssim(*pair)), "ms_ssim": float(ms_ssim(*units))}
        rows.append({"volume": file.name, **similarity, **occupancy(reconstruction, image, threshold)})
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "volume"}
    return {
        "mean": {name: statistics.fmean(values) for name, values in columns.items()},
        "interval": {name: mean_interval(values) for name, values in columns.items()},
        "sharpness": compare_sharpness(*zip(*slopes, strict=True)),
        "volumes": rows,
    }


def mean_interval(values: Sequence[float]) -> list[float]:
    """Return the 95 % interval of a mean over volumes, by Student's t distribution; NaN for a single volume."""
    if len(values) < 2:
        return [math.nan, math.nan]
    middle, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    # The spread is itself a guess from few volumes; 1.96 standard errors of two would hold the mean 7 times in 10.
    reach = float(stdtrit(len(values) - 1, 0.975)) * error
    return [middle - reach, middle + reach]


@dataclass(frozen=True)
class Reference:
    """The volumes that samples are compared with: held-out volumes in [0, 1], and summary vectors of all volumes.

    With a `network`, FID and KID are computed too, against `held_out_features`.
    """

    held_out: list[Tensor]
    held_out_vectors: Tensor
    training_vectors: Tensor
    training_names: tuple[str, ...]
    network: FeatureNetwork | None = None
    held_out_features: Sequence[Features] = ()


def load_reference(volumes: DataSplit, data: DataSettings, network: FeatureNetwork | None = None) -> Reference:
    """Read every volume once, and keep only the summary vectors of the training volumes."""

    def read(files: Sequence[VolumeFile], what: str) -> Iterator[Tensor]:
        return (to_unit(load_file(file, data).image) for file in ProgressBar(files, desc=what, unit="volume"))

    held_out = list(read(volumes.val, "held-out volumes"))
    training = torch.stack([summary_vector(volume) for volume in read(volumes.train, "training volumes")])
    features = network.features(held_out, "held-out volumes") if network is not None else ()
    vectors, names = torch.stack([*map(summary_vector, held_out)]), tuple(file.name for file in volumes.train)
    return Reference(held_out, vectors, training, names, network, features)


def evaluate_stage_two(
    sampler: VolumeSampler, frame: SampleFrame, volumes: DataSplit, num: int, network: FeatureNetwork | None = None
) -> dict[str, Any]:
    """Return what samples are worth: metrics, skill, the effect of conditions, and what to compare them with."""
    settings, codec = sampler.settings, sampler.codec
    data, process = stage_two_data(settings.data), Process(codec.precision.device)
    reference = load_reference(volumes, data, network)
    pairs = check_conditions(settings, volumes)
    latents = prepare_latents(codec, volumes, settings, process, pairs, frame.conditions)
    results: dict[str, Any] = {}
    if settings.ldm.conditioning.describes_volumes:
        held_out = held_out_with_hole(pairs.get("volume"), volumes.val, settings.data)[:num]
        results["conditions"] = condition_effect(sampler, latents, held_out)
    condition_of = latents.held_out_condition if settings.ldm.conditioning.comes_from_volumes else None
    samples = draw_samples(sampler, num, condition_of)
    results["samples"] = evaluate_samples(samples, reference)
    skill = Skill(latents, codec, frame.normalisation, settings, process)
    results["skill"] = skill(sampler.network)
    silent_network = SilentNetwork(settings.autoencoder.latent_channels)
    silent = draw_samples(replace(sampler, network=silent_network), num, condition_of)
    results["samples"]["correlation_with_silent_network"] = similarity(samples, silent)
    training, reconstructed = training_volumes(codec, volumes.train, data, num)
    sets = {"training volumes": training, "reconstructed training volumes": reconstructed}
    if skill.denoiser is not None:
        sets["Gaussian with their covariance"] = gaussian_volumes(skill.denoiser, sampler, num)
    sets["network switched off"] = silent
    results["anchors"] = {name: compared(some, reference) for name, some in sets.items() if len(some) > 1}
    return results


class SilentNetwork(nn.Module):
    """A U-Net that always predicts 0: samples that it gives as well were not made by what the network learned."""

    def __init__(self, latent_channels: int) -> None:
        super().__init__()
        self.latent_channels = latent_channels

    def forward(self, x: Tensor, timesteps: Tensor, **_: Tensor) -> Tensor:
        """Return zeros in the shape of the latent."""
        return torch.zeros_like(x[:, : self.latent_channels])


def gaussian_volumes(denoiser: LinearDenoiser, sampler: VolumeSampler, num: int) -> list[Tensor]:
    """Draw latents from the Gaussian with the training latents' mean and covariance, and decode them."""
    noise, positions = SampleNoise(sampler.seed, torch.device("cpu")), range(num)
    white = noise.normal("Gaussian rest", positions, denoiser.shape)
    weights = noise.normal("Gaussian weights", positions, [len(denoiser.centred)])
    latents = sampler.normalisation.to(noise.device).undo(denoiser.draw(white, weights))
    return [to_unit(sampler.codec.decode(latent)).cpu() for latent in latents]


def training_volumes(
    codec: VolumeCodec, train: Sequence[VolumeFile], data: DataSettings, num: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return at most `num` training volumes, spread over the set, and their reconstructions."""
    number = min(num, len(train))
    chosen = [train[place * len(train) // number] for place in range(number)]
    volumes, reconstructions = [], []
    for file in ProgressBar(chosen, desc="reconstructed training volumes", unit="volume"):
        image = load_file(file, data).image
        decoded = check_finite(codec.decode(codec.encode(image)), printable(file.name))
        volumes.append(to_unit(image))
        reconstructions.append(to_unit(decoded).cpu())
    return volumes, reconstructions


def draw_samples(sampler: VolumeSampler, num: int, condition_of: ConditionOf | None = None) -> list[Tensor]:
    """Draw samples with a progress bar; return them on the CPU with values in [0, 1]."""
    total = -(-num // sampler.batch_size) * sampler.settings.ldm.sampling.num_inference_steps
    with ProgressBar(total=total, desc="sampling", unit="step") as bar:
        volumes = sampler.draw(range(num), condition_of, bar.update)
        return [to_unit(check_finite(volume, f"sample {n}")).cpu() for n, volume in enumerate(volumes)]


def similarity(samples: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the mean correlation between samples and their counterparts from the same seeds; NaN if constant."""
    pairs = [torch.stack([a.flatten(), b.flatten()]).double() for a, b in zip(samples, others, strict=True)]
    return statistics.fmean(float(torch.corrcoef(pair)[0, 1]) for pair in pairs)


def compared(volumes: Sequence[Tensor], reference: Reference, warns: bool = False) -> dict[str, Any]:
    """Return the detail of volumes relative to that of held-out volumes, and FID and KID if they are asked for.

    `warns`: say so if the volumes are too few for FID.
    """
    distances: dict[str, Any] = {}
    if reference.network is not None:
        features = reference.network.features(volumes, "volumes")
        distances = fid_and_kid(features, reference.held_out_features)
        if warns and (words := caution(features, reference.held_out_features)):
            log.warning("%s", words)
    held_out = reference.held_out
    kurtosis, wanted = (statistics.fmean(map(laplacian_kurtosis, some)) for some in (volumes, held_out))
    return {
        "sharpness": compare_sharpness(*([gradient_magnitude(one) for one in some] for some in (volumes, held_out))),
        "laplacian_kurtosis": kurtosis / wanted,
        **distances,
    }


def evaluate_samples(samples: Sequence[Tensor], reference: Reference) -> dict[str, Any]:
    """Return sharpness, diversity and nearest training volumes of the samples, and how many are memorised.

    `ratio` is the distance divided by the median distance of held-out volumes to their nearest training volume. When
    that median is 0, because held-out volumes repeat training volumes, ratios and count are NaN.
    """
    held_out_distances, _ = nearest(reference.held_out_vectors, reference.training_vectors)
    vectors = torch.stack([summary_vector(sample) for sample in samples])
    distances, indices = nearest(vectors, reference.training_vectors)
    typical = float(held_out_distances.median()) or math.nan
    ratios = (distances / typical).tolist()
    rows = [
        {"training_volume": reference.training_names[index], "rms_distance": distance, "ratio": ratio}
        for index, distance, ratio in zip(indices.tolist(), distances.tolist(), ratios, strict=True)
    ]
    return {
        "num": len(samples),
        **compared(samples, reference, warns=True),
        "pairwise_ms_ssim": mean_pairwise_ms_ssim(samples),
        "held_out_pairwise_ms_ssim": mean_pairwise_ms_ssim(reference.held_out),
        "nearest_training": rows,
        "num_memorised": math.nan if math.isnan(typical) else sum(ratio < MEMORISED_RATIO for ratio in ratios),
    }


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
    s = settings.ldm.conditioning
    right = latents.held_out_condition(held_out)
    conditions = {"right": right, "shuffled": right.rows([*range(1, len(held_out)), 0])}
    if not s.always_given:
        conditions["hidden"] = hidden(right, s)
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
        results["interpolated"] = _errors([NOTHING_KNOWN] * len(targets), smooth, targets, threshold)
        results["interpolated_kept"] = _errors(known, smooth, targets, threshold)
    return results


def _errors(
    known: Sequence[KnownVoxels], found: Sequence[Tensor], targets: Sequence[Tensor], threshold: float | None
) -> dict[str, Any]:
    """Return the mean errors of volumes (C, D, H, W) in [0, 1], only in the hole if there is one."""
    l1, decibels, of_occupied = [], [], []
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
        decibels.append(float(-10 * torch.tensor(max(float(difference.square().mean()), 1e-10)).log10()))
        of_occupied.append(occupancy(from_unit(grids[0]), from_unit(grids[1]), threshold))
    means = {name: statistics.fmean(row[name] for row in of_occupied) for name in of_occupied[0]}
    return {"l1": statistics.fmean(l1), "psnr": statistics.fmean(decibels), **means, "l1_of_volumes": l1}


def effect_lines(values: dict[str, Any]) -> list[str]:
    """Return the results as a table of text."""
    where = "in the hole" if values["region"] == "hole" else "of the whole volume"
    of_occupied = [name for name in OCCUPANCY if name in values["right"]]
    head = f"{'':<30}     L1   PSNR dB" + ("      IoU  Chamfer" if of_occupied else "")
    lines = [f"{values['num']} samples against their held-out volumes, error {where}", head]
    lines += [
        f"  {text:<28} {values[n]['l1']:8.4f} {values[n]['psnr']:8.2f}"
        + "".join(f" {values[n][name]:8.3f}" for name in of_occupied)
        for n, text in EFFECT.items()
        if n in values
    ]
    gain = 1 - values["right"]["l1"] / max(values["shuffled"]["l1"], 1e-12)
    change = f"{100 * abs(gain):.1f} % {'lower' if gain >= 0 else 'higher'}"
    return [*lines, f"  L1 with the right condition is {change} than with another's"]
