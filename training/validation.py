"""How good the reconstructions of held-out volumes are: PSNR and SSIM over whole volumes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import nullcontext

import models.monai_import  # noqa: F401  # first: it keeps MONAI's import short

# isort: split
import torch
from monai.metrics.regression import SSIMMetric
from torch import Tensor

from data import Batch
from training.autoencoder_step import AutoencoderStep
from training.previews import reconstruction_picture, save_picture
from training.recorder import Recorder
from training.report import Preview, ViewerVolume, publish, save_viewer_volumes

log = logging.getLogger(__name__)

DATA_RANGE = 2.0  # volumes lie in [-1, 1]
_WINDOW = 11


def psnr(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB of each volume in a batch."""
    error = (reconstruction.float() - image.float()).square().flatten(1).mean(dim=1)
    return 10 * torch.log10(DATA_RANGE**2 / error.clamp_min(1e-12))


def ssim(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the mean structural similarity of each volume in a batch; thin axes get a smaller window."""
    smallest = min(image.shape[2:])
    window = min(_WINDOW, smallest if smallest % 2 else smallest - 1)
    metric = SSIMMetric(spatial_dims=3, data_range=DATA_RANGE, win_size=window, kernel_sigma=1.5 * window / _WINDOW)
    return metric(reconstruction.float(), image.float()).flatten()


@torch.no_grad()
def validate_autoencoder(step: AutoencoderStep, batches: Iterable[Batch]) -> tuple[dict[str, float], Preview | None]:
    """Return mean PSNR and SSIM over all processes, and a preview of this process's first volume.

    Reconstructs the mean of the latent, with the averaged weights when there are any.
    """
    totals = torch.zeros(4, dtype=torch.float64)  # PSNR, SSIM, mean absolute error, number of volumes
    preview = None
    network = step.autoencoder.eval()
    with step.average.swapped_in() if step.average is not None else nullcontext():
        for batch in batches:
            image = batch.image.to(step.process.device, non_blocking=True)
            with step.precision.autocast():
                mean, _ = network.encode(image)
                reconstruction = network.decode(mean)
            error = (reconstruction.float() - image).abs().flatten(1).mean(dim=1)
            values = [psnr(reconstruction, image), ssim(reconstruction, image), error, torch.ones_like(error)]
            totals += torch.stack([value.double().sum() for value in values]).cpu()
            if preview is None:
                volumes = {"input": ViewerVolume.of(image[0]), "reconstruction": ViewerVolume.of(reconstruction[0])}
                preview = Preview(reconstruction_picture(image[0], reconstruction[0]), volumes)
    network.train()
    psnr_sum, ssim_sum, error_sum, count = step.process.sum(totals).tolist()
    if not count:  # a data set of one volume has none to hold out
        return {}, None
    means = {"val_psnr": psnr_sum / count, "val_ssim": ssim_sum / count, "val_l1": error_sum / count}
    return means, preview


def show_validation(recorder: Recorder, step: int, metrics: dict[str, float], preview: Preview | None) -> None:
    """Log validation metrics, keep the preview as PNG, in TensorBoard and for the report, and write the report."""
    recorder.write(step, metrics)
    if preview is not None and recorder.process.is_first:
        path = recorder.run.previews / f"{recorder.stage}_{step:08d}.png"
        recorder.image(step, "reconstruction", save_picture(path, preview.picture))
        save_viewer_volumes(recorder.run, recorder.stage, step, preview.volumes)
        log.info("step %d: %s; preview %s", step, ", ".join(f"{n} {v:.4g}" for n, v in metrics.items()), path)
    publish(recorder.run, recorder.process)
