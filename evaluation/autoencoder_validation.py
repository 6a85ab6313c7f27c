"""Validation of stage 1: PSNR, SSIM and mean absolute error of reconstructed held-out volumes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from data import Batch
from evaluation.pair_metrics import absolute_error, psnr, ssim
from evaluation.pictures import reconstruction_picture
from evaluation.previews import Preview, ViewerVolume
from training.autoencoder_step import AutoencoderStep


@torch.no_grad()
def validate_autoencoder(step: AutoencoderStep, batches: Iterable[Batch]) -> tuple[dict[str, float], Preview | None]:
    """Return mean PSNR, SSIM and absolute error over all processes, and a preview of this process's first volume.

    Decode the mean of the latent distribution, with the averaged weights if there are any. Volumes larger than the
    training patches run in slabs.
    """
    totals = torch.zeros(4, dtype=torch.float64)  # PSNR, SSIM, mean absolute error, number of volumes
    preview = None
    network = step.autoencoder.eval()
    with step.average.swapped_in() if step.average is not None else nullcontext():
        for batch in batches:
            image = batch.image.to(step.process.device, non_blocking=True)
            reconstruction, values = reconstruct_and_measure(step, image)
            totals += values.cpu()
            if preview is None:
                volumes = {"input": ViewerVolume.of(image[0]), "reconstruction": ViewerVolume.of(reconstruction[0])}
                preview = Preview(reconstruction_picture(image[0], reconstruction[0]), volumes)
    network.train()
    psnr_sum, ssim_sum, error_sum, count = step.process.sum(totals).tolist()
    if not count:  # a data set of one volume has no held-out volumes
        return {}, None
    means = {"val_psnr": psnr_sum / count, "val_ssim": ssim_sum / count, "val_l1": error_sum / count}
    return means, preview


def reconstruct_and_measure(step: AutoencoderStep, image: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reconstructions of a batch, and its sums of PSNR, SSIM, absolute error and number of volumes."""
    codec = step.codec
    reconstruction = torch.stack([codec.decode(codec.encode(volume)[0]) for volume in image])
    error = absolute_error(reconstruction, image)
    values = [psnr(reconstruction, image), ssim(reconstruction, image), error, torch.ones_like(error)]
    return reconstruction, torch.stack([value.double().sum() for value in values])
