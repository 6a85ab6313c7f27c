"""What a finished run is worth: held-out volumes reconstructed, samples against held-out and training volumes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data import VolumeFile, load_volume, to_unit
from diffusion.sampling import draw_volumes
from diffusion.volume_codec import VolumeCodec
from evaluation.fid import PLANES, frechet_distance, slice_features
from evaluation.pairs import psnr, ssim
from evaluation.similarity import (
    maximum_mean_discrepancy,
    mean_pairwise_ms_ssim,
    ms_ssim,
    nearest,
    summary_vector,
)
from settings import DataSettings, Settings

MEMORISED_RATIO = 0.5
"""A sample nearer to a training volume than this share of what is usual for held-out volumes counts as a copy."""


def evaluate_reconstructions(codec: VolumeCodec, files: Sequence[VolumeFile], data: DataSettings) -> dict[str, Any]:
    """Return PSNR, SSIM and MS-SSIM of each volume's reconstruction and their means."""
    names: list[str] = []
    rows: list[dict[str, float]] = []
    for file in tqdm(files, desc="reconstructions", unit="volume"):
        image = load_volume(file.path, data, file.num_channels).image[None].to(codec.precision.device)
        mean, _ = codec.encode(image[0])
        reconstruction = codec.decode(mean)[None]
        names.append(file.name)
        rows.append(
            {
                "psnr": float(psnr(reconstruction, image)),
                "ssim": float(ssim(reconstruction, image)),
                "ms_ssim": float(ms_ssim(to_unit(reconstruction), to_unit(image))),
            }
        )
    means = {name: statistics.fmean(row[name] for row in rows) for name in ("psnr", "ssim", "ms_ssim")}
    return {"mean": means, "volumes": [{"volume": name, **row} for name, row in zip(names, rows, strict=True)]}


@dataclass(frozen=True)
class Reference:
    """What samples are compared with: held-out volumes in [0, 1], and the summary vectors of all volumes."""

    held_out: list[Tensor]
    held_out_vectors: Tensor
    training_vectors: Tensor
    training_names: tuple[str, ...]


def load_reference(train: Sequence[VolumeFile], val: Sequence[VolumeFile], data: DataSettings) -> Reference:
    """Read every volume once; of training volumes only the summary is kept."""

    def read(file: VolumeFile) -> Tensor:
        return to_unit(load_volume(file.path, data, file.num_channels).image)

    held_out = [read(file) for file in tqdm(val, desc="held-out volumes", unit="volume")]
    training = [summary_vector(read(file)) for file in tqdm(train, desc="training volumes", unit="volume")]
    return Reference(
        held_out,
        torch.stack([summary_vector(volume) for volume in held_out]),
        torch.stack(training),
        tuple(file.name for file in train),
    )


def reconstruction_discrepancy(
    codec: VolumeCodec, train: Sequence[VolumeFile], data: DataSettings, reference: Reference, num: int
) -> float:
    """Return the MMD between reconstructed training volumes, at most `num`, and held-out volumes.

    What the autoencoder alone costs: samples cannot be much nearer to the held-out volumes than this.
    """
    chosen = [train[number * len(train) // min(num, len(train))] for number in range(min(num, len(train)))]
    vectors = []
    for file in tqdm(chosen, desc="reconstructed training volumes", unit="volume"):
        mean, _ = codec.encode(load_volume(file.path, data, file.num_channels).image)
        vectors.append(summary_vector(to_unit(codec.decode(mean))))
    return maximum_mean_discrepancy(torch.stack(vectors), reference.held_out_vectors)


def draw_samples(
    network: nn.Module,
    codec: VolumeCodec,
    settings: Settings,
    latent_scale: float,
    seed: int,
    num: int,
    batch_size: int,
) -> list[Tensor]:
    """Return samples in [0, 1], on the host, with a bar."""
    total = -(-num // batch_size) * settings.ldm.sampling.num_inference_steps
    with tqdm(total=total, desc="sampling", unit="step") as bar:
        volumes = draw_volumes(
            network, codec, settings, latent_scale, seed, range(num), batch_size=batch_size, on_step=bar.update
        )
        return [to_unit(volume).cpu() for volume in volumes]


def evaluate_samples(
    samples: Sequence[Tensor], reference: Reference, features: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Any]:
    """Return MMD to held-out volumes, diversity beside theirs, nearest training volumes and, with features, FID."""
    vectors = torch.stack([summary_vector(sample) for sample in samples])
    result: dict[str, Any] = {
        "num": len(samples),
        "mmd": maximum_mean_discrepancy(vectors, reference.held_out_vectors),
        "pairwise_ms_ssim": mean_pairwise_ms_ssim(samples),
        "held_out_pairwise_ms_ssim": mean_pairwise_ms_ssim(reference.held_out),
    }
    if features is not None:
        planes = zip(slice_features(samples, features), slice_features(reference.held_out, features), strict=True)
        result["fid"] = dict(zip(PLANES, (frechet_distance(*pair) for pair in planes), strict=True))
        result["fid"]["mean"] = statistics.fmean(result["fid"].values())
    return result | _memorisation(vectors, reference)


def _memorisation(vectors: Tensor, reference: Reference) -> dict[str, Any]:
    """Return each sample's nearest training volume, its distance in units of what is usual for held-out volumes.

    Held-out volumes that are copies of training volumes leave no such unit: then nothing can be said of copies, NaN.
    """
    usual, _ = nearest(reference.held_out_vectors, reference.training_vectors)
    distances, indices = nearest(vectors, reference.training_vectors)
    unit = float(usual.median()) or math.nan
    ratios = (distances / unit).tolist()
    rows = [
        {"training_volume": reference.training_names[index], "rms_distance": distance, "ratio": ratio}
        for index, distance, ratio in zip(indices.tolist(), distances.tolist(), ratios, strict=True)
    ]
    num_memorised = math.nan if math.isnan(unit) else sum(ratio < MEMORISED_RATIO for ratio in ratios)
    return {"nearest_training": rows, "num_memorised": num_memorised}
