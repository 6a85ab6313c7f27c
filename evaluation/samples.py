"""Samples of a finished run, compared with held-out and training volumes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from data import DataSplit, VolumeFile, load_file, to_unit
from diffusion.conditioning import check_conditions
from diffusion.conditioning.volume import held_out_with_hole
from diffusion.latents import prepare_latents, stage_two_data
from diffusion.sampling import ConditionOf, VolumeSampler
from evaluation.condition_effect import condition_effect
from evaluation.fid import FeatureNetwork, Features, fid_and_kid
from evaluation.trained_run import SampleFrame, check_finite
from models.volume_codec import VolumeCodec
from runtime.cli.bars import ProgressBar
from runtime.files import printable
from runtime.processes import Process
from runtime.randomness import SampleNoise
from settings import DataSettings
from training.validation.metrics import (
    compare_sharpness,
    gradient_magnitude,
    laplacian_kurtosis,
    mean_pairwise_ms_ssim,
    nearest,
    summary_vector,
)
from training.validation.skill import LinearDenoiser, Skill

MEMORISED_RATIO = 0.5
"""A sample counts as memorised when its distance to the nearest training volume is below this share of the median
over held-out volumes."""


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


def load_reference(
    train: Sequence[VolumeFile],
    val: Sequence[VolumeFile],
    data: DataSettings,
    network: FeatureNetwork | None = None,
) -> Reference:
    """Read every volume once, and keep only the summary vectors of the training volumes."""

    def read(file: VolumeFile) -> Tensor:
        return to_unit(load_file(file, data).image)

    held_out = [read(file) for file in ProgressBar(val, desc="held-out volumes", unit="volume")]
    training = [summary_vector(read(file)) for file in ProgressBar(train, desc="training volumes", unit="volume")]
    return Reference(
        held_out,
        torch.stack([summary_vector(volume) for volume in held_out]),
        torch.stack(training),
        tuple(file.name for file in train),
        network,
        network.features(held_out, "held-out volumes") if network is not None else (),
    )


def evaluate_stage_two(
    sampler: VolumeSampler,
    frame: SampleFrame,
    volumes: DataSplit,
    num: int,
    network: FeatureNetwork | None = None,
) -> dict[str, Any]:
    """Return what samples are worth: metrics, skill, the effect of conditions, and what to compare them with."""
    settings, codec = sampler.settings, sampler.codec
    data, process = stage_two_data(settings.data), Process(codec.precision.device)
    reference = load_reference(volumes.train, volumes.val, data, network)
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
    results["anchors"] = evaluate_anchors({**sets, "network switched off": silent}, reference)
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
    volumes, reconstructions = [], []
    for place in ProgressBar(range(number), desc="reconstructed training volumes", unit="volume"):
        file = train[place * len(train) // number]
        image = load_file(file, data).image
        mean = codec.encode(image)
        volumes.append(to_unit(image))
        reconstructions.append(to_unit(check_finite(codec.decode(mean), printable(file.name))).cpu())
    return volumes, reconstructions


def evaluate_anchors(sets: dict[str, Sequence[Tensor]], reference: Reference) -> dict[str, dict[str, Any]]:
    """Return the metrics that samples have, for sets of volumes that show what good and bad values look like."""
    return {name: _compared(volumes, reference) for name, volumes in sets.items() if len(volumes) > 1}


def similarity(samples: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the mean correlation between samples and their counterparts from the same seeds; NaN if constant."""
    pairs = [torch.stack([a.flatten(), b.flatten()]).double() for a, b in zip(samples, others, strict=True)]
    return statistics.fmean(float(torch.corrcoef(pair)[0, 1]) for pair in pairs)


def _compared(volumes: Sequence[Tensor], reference: Reference) -> dict[str, Any]:
    """Return the detail of volumes relative to that of held-out volumes, and FID and KID if they are asked for."""
    distances: dict[str, Any] = {}
    if reference.network is not None:
        distances = fid_and_kid(reference.network.features(volumes, "volumes"), reference.held_out_features)
    kurtosis = statistics.fmean(map(laplacian_kurtosis, volumes))
    return {
        "sharpness": compare_sharpness(
            [gradient_magnitude(volume) for volume in volumes], [gradient_magnitude(v) for v in reference.held_out]
        ),
        "laplacian_kurtosis": kurtosis / statistics.fmean(map(laplacian_kurtosis, reference.held_out)),
        **distances,
    }


def draw_samples(sampler: VolumeSampler, num: int, condition_of: ConditionOf | None = None) -> list[Tensor]:
    """Draw samples with a progress bar; return them on the CPU with values in [0, 1]."""
    total = -(-num // sampler.batch_size) * sampler.settings.ldm.sampling.num_inference_steps
    with ProgressBar(total=total, desc="sampling", unit="step") as bar:
        volumes = sampler.draw(range(num), condition_of, bar.update)
        return [to_unit(check_finite(volume, f"sample {n}")).cpu() for n, volume in enumerate(volumes)]


def evaluate_samples(samples: Sequence[Tensor], reference: Reference) -> dict[str, Any]:
    """Return sharpness, diversity and nearest training volumes of the samples."""
    vectors = torch.stack([summary_vector(sample) for sample in samples])
    return {
        "num": len(samples),
        **_compared(samples, reference),
        "pairwise_ms_ssim": mean_pairwise_ms_ssim(samples),
        "held_out_pairwise_ms_ssim": mean_pairwise_ms_ssim(reference.held_out),
        **_memorisation(vectors, reference),
    }


def _memorisation(vectors: Tensor, reference: Reference) -> dict[str, Any]:
    """Return each sample's nearest training volume, and how many samples are memorised.

    `ratio` is the distance divided by the median distance of held-out volumes to their nearest training volume. When
    that median is 0, because held-out volumes repeat training volumes, ratios and count are NaN.
    """
    held_out_distances, _ = nearest(reference.held_out_vectors, reference.training_vectors)
    distances, indices = nearest(vectors, reference.training_vectors)
    typical = float(held_out_distances.median()) or math.nan
    ratios = (distances / typical).tolist()
    rows = [
        {"training_volume": reference.training_names[index], "rms_distance": distance, "ratio": ratio}
        for index, distance, ratio in zip(indices.tolist(), distances.tolist(), ratios, strict=True)
    ]
    num_memorised = math.nan if math.isnan(typical) else sum(ratio < MEMORISED_RATIO for ratio in ratios)
    return {"nearest_training": rows, "num_memorised": num_memorised}
