"""Reconstructions of held-out volumes by a finished autoencoder."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from data import VolumeFile, load_file, to_unit
from diffusion.volume_codec import VolumeCodec
from evaluation.pair_metrics import ms_ssim, psnr, ssim
from settings import DataSettings


def evaluate_reconstructions(codec: VolumeCodec, files: Sequence[VolumeFile], data: DataSettings) -> dict[str, Any]:
    """Return PSNR, SSIM and MS-SSIM of each volume's reconstruction, and their means."""
    names: list[str] = []
    rows: list[dict[str, float]] = []
    for file in tqdm(files, desc="reconstructions", unit="volume"):
        image = load_file(file, data).image[None].to(codec.precision.device)
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
