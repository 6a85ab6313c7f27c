"""Validation of stage 1: PSNR, SSIM and mean absolute error of reconstructed held-out volumes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from data import Batch, VolumeFile
from models.bottleneck import code_use
from settings import DataSettings
from training.autoencoder_step import AutoencoderStep
from training.validation.pair_metrics import OCCUPANCY, absolute_error, psnr, ssim
from training.validation.pictures import Row, picture_of, reconstruction_rows
from training.validation.previews import MAX_COPIES, Preview, ViewerVolume
from training.validation.real_volumes import spacing_of

_NAMES = ("psnr", "ssim", "l1", "count")


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
    names = [*_NAMES, *(OCCUPANCY if step.training.occupancy_threshold is not None else [])]
    totals = torch.zeros(len(names), dtype=torch.float64)
    quantiser = step.autoencoder.quantiser
    counts = None if quantiser is None else torch.zeros(quantiser.num_codes, dtype=torch.float64)
    preview = _PreviewOfPairs(step.settings.data, files)
    network = step.autoencoder.eval()
    with step.inference_weights():
        for batch in batches:
            image = batch.image.to(step.process.device, non_blocking=True)
            reconstruction, values = reconstruct_and_measure(step, image, counts)
            totals += torch.cat([values.cpu(), _occupancy(step, reconstruction, image)])
            preview.add(batch, image[0], reconstruction[0])
    network.train()
    sums = dict(zip(names, step.process.sum(totals).tolist(), strict=True))
    count = sums.pop("count")
    if not count:  # a data set of one volume has no held-out volumes
        return {}, None
    means = {f"val_{name}": value / count for name, value in sums.items()}
    if counts is not None:
        means |= {f"val_{name}": float(value) for name, value in code_use(step.process.sum(counts)).items()}
    return means, preview.finished()


def _occupancy(step: AutoencoderStep, reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the sums of IoU and Chamfer distance over a batch of volumes that are mostly empty; else nothing."""
    threshold = step.training.occupancy_threshold
    if threshold is None:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack(
        [measure(reconstruction, image, threshold).double().sum().cpu() for measure in OCCUPANCY.values()]
    )


def reconstruct_and_measure(
    step: AutoencoderStep, image: Tensor, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the reconstructions of a batch, and its sums of PSNR, SSIM, absolute error and number of volumes.

    Add how often each code occurs to `counts`, a tensor of the host, if given.
    """
    reconstruction = torch.stack([_reconstruct(step, volume, counts) for volume in image])
    error = absolute_error(reconstruction, image)
    values = [psnr(reconstruction, image), ssim(reconstruction, image), error, torch.ones_like(error)]
    return reconstruction, torch.stack([value.double().sum() for value in values])


def _reconstruct(step: AutoencoderStep, volume: Tensor, counts: Tensor | None) -> Tensor:
    latent = step.codec.encode(volume)
    if step.autoencoder.quantiser is not None and counts is not None:
        codes = step.autoencoder.quantiser.codes(latent[None]).flatten().cpu()
        counts.index_add_(0, codes, torch.ones_like(codes, dtype=counts.dtype))
    return step.codec.decode(latent)


class _PreviewOfPairs:
    """Collects the first held-out volumes with their reconstructions; the picture shows the first of them."""

    def __init__(self, data: DataSettings, files: Sequence[VolumeFile]) -> None:
        self.data, self.files = data, files
        self.rows: list[Row] = []
        self.volumes: dict[str, ViewerVolume] = {}

    def add(self, batch: Batch, image: Tensor, reconstruction: Tensor) -> None:
        """Keep the first volume of a batch, unless there are enough."""
        place = len(self.volumes) // 2
        if place == MAX_COPIES:
            return
        name = batch.files[0]
        spacing_mm = spacing_of(self.files[batch.positions[0]], self.data) if self.files else (1.0, 1.0, 1.0)
        for role, volume in (("input", image), ("reconstruction", reconstruction)):
            shown = ViewerVolume.of(volume, place)
            self.volumes[f"{role}_{place}"] = shown.described(spacing_mm, name)
        if not place:
            self.rows = reconstruction_rows(name, image, reconstruction, spacing_mm)

    def finished(self) -> Preview | None:
        """Return the preview; None without volumes."""
        return Preview(picture_of(self.rows), self.volumes) if self.rows else None
