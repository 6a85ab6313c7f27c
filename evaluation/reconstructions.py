"""Reconstructions of held-out volumes by a finished autoencoder."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from scipy.special import stdtrit

from data import VolumeFile, load_file, to_unit
from evaluation.trained_run import check_finite
from models.volume_codec import VolumeCodec
from runtime.cli.bars import ProgressBar
from runtime.files import printable
from settings import DataSettings
from training.validation.metrics import compare_sharpness, gradient_magnitude, ms_ssim, occupancy, psnr, ssim


def evaluate_reconstructions(
    codec: VolumeCodec, files: Sequence[VolumeFile], data: DataSettings, threshold: float | None = None
) -> dict[str, Any]:
    """Return PSNR, SSIM and MS-SSIM of each volume's reconstruction, their means with 95 % intervals, and sharpness.

    With the threshold above which a voxel is occupied, also IoU and Chamfer distance.
    """
    rows: list[dict[str, float]] = []
    found: list[float] = []
    wanted: list[float] = []
    for file in ProgressBar(files, desc="reconstructions", unit="volume"):
        image = load_file(file, data).image[None].to(codec.precision.device)
        reconstruction = check_finite(codec.decode(codec.encode(image[0])), printable(file.name))[None]
        found.append(gradient_magnitude(to_unit(reconstruction[0])))
        wanted.append(gradient_magnitude(to_unit(image[0])))
        rows.append(
            {
                "psnr": float(psnr(reconstruction, image)),
                "ssim": float(ssim(reconstruction, image)),
                "ms_ssim": float(ms_ssim(to_unit(reconstruction), to_unit(image))),
                **occupancy(reconstruction[0], image[0], threshold),
            }
        )
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        "mean": {name: statistics.fmean(values) for name, values in columns.items()},
        "interval": {name: mean_interval(values) for name, values in columns.items()},
        "sharpness": compare_sharpness(found, wanted),
        "volumes": [{"volume": file.name, **row} for file, row in zip(files, rows, strict=True)],
    }


def mean_interval(values: Sequence[float]) -> list[float]:
    """Return the 95 % interval of a mean over volumes, by Student's t distribution; NaN for a single volume."""
    if len(values) < 2:
        return [math.nan, math.nan]
    middle, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    # The spread is itself a guess from few volumes; 1.96 standard errors of two would hold the mean 7 times in 10.
    reach = float(stdtrit(len(values) - 1, 0.975)) * error
    return [middle - reach, middle + reach]
