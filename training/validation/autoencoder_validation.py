"""Validation of stage 1: PSNR, SSIM and mean absolute error of reconstructed held-out volumes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from data import VolumeFile
from data.batches import Batch
from data.formats import read_header
from data.geometry import geometry_of
from models.bottleneck import code_use
from settings import DataSettings
from training.autoencoder_step import AutoencoderStep
from training.validation.metrics import OCCUPANCY, absolute_error, psnr, ssim
from training.validation.previews import (
    MAX_COPIES,
    Preview,
    Row,
    ViewerVolume,
    picture_of,
    reconstruction_rows,
)

_MEASURES = {"psnr": psnr, "ssim": ssim, "l1": absolute_error}


@torch.no_grad()
def validate_autoencoder(
    step: AutoencoderStep, batches: Iterable[Batch], files: Sequence[VolumeFile] = ()
) -> tuple[dict[str, float], Preview | None]:
    """Return mean PSNR, SSIM and absolute error over all processes, and a preview of this process's first volumes.

    With a quantiser, also how its codes are used over all held-out volumes; of volumes that are mostly empty, also IoU
    and Chamfer distance.
    `files` are the held-out volumes that the positions of the batches index; the preview takes their spacing.
    Decode the mean of the latent distribution, with the averaged weights if there are any. Volumes larger than the
    training patches run in slabs.
    """
    threshold, quantiser = step.training.occupancy_threshold, step.autoencoder.quantiser
    names = [*_MEASURES, "count", *(OCCUPANCY if threshold is not None else [])]
    totals = torch.zeros(len(names), dtype=torch.float64)
    counts = None if quantiser is None else torch.zeros(quantiser.num_codes, dtype=torch.float64)
    rows: list[Row] = []
    shown: dict[str, ViewerVolume] = {}
    network = step.autoencoder.eval()
    with step.inference_weights():
        for batch in batches:
            image = batch.image.to(step.process.device, non_blocking=True)
            reconstruction, values = reconstruct_and_measure(step, image, counts)
            if threshold is not None:
                occupied = [measure(reconstruction, image, threshold).double().sum() for measure in OCCUPANCY.values()]
                values = torch.stack([*values, *occupied])
            totals += values.cpu()
            if (place := len(shown) // 2) < MAX_COPIES:
                name, pair = batch.files[0], {"input": image[0], "reconstruction": reconstruction[0]}
                spacing = spacing_of(files[batch.positions[0]], step.settings.data) if files else (1.0, 1.0, 1.0)
                rows = rows or reconstruction_rows(name, image[0], reconstruction[0], spacing)
                shown |= {f"{r}_{place}": ViewerVolume.of(v, spacing, name, place=place) for r, v in pair.items()}
    network.train()
    sums = dict(zip(names, step.process.sum(totals).tolist(), strict=True))
    count = sums.pop("count")
    if not count:  # a data set of one volume has no held-out volumes
        return {}, None
    means = {f"val_{name}": value / count for name, value in sums.items()}
    if counts is not None:
        means |= {f"val_{name}": float(value) for name, value in code_use(step.process.sum(counts)).items()}
    return means, Preview(picture_of(rows), shown) if rows else None


def reconstruct_and_measure(
    step: AutoencoderStep, image: Tensor, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the reconstructions of a batch, and its sums of PSNR, SSIM, absolute error and number of volumes.

    Add how often each code occurs to `counts`, a tensor of the host, if given.
    """
    volumes = []
    for volume in image:
        latent = step.codec.encode(volume)
        if step.autoencoder.quantiser is not None and counts is not None:
            codes = step.autoencoder.quantiser.codes(latent[None]).flatten().cpu()
            counts.index_add_(0, codes, torch.ones_like(codes, dtype=counts.dtype))
        volumes.append(step.codec.decode(latent))
    reconstruction = torch.stack(volumes)
    values = [measure(reconstruction, image) for measure in _MEASURES.values()]
    return reconstruction, torch.stack([value.double().sum() for value in (*values, torch.ones_like(values[0]))])


def spacing_of(file: VolumeFile, data: DataSettings) -> tuple[float, ...]:
    """Return the distance between neighbouring voxels, in mm, once a volume is on the network's grid."""
    return tuple(map(float, geometry_of(read_header(file.path), data).spacing_mm))
