"""How good the reconstructions of held-out volumes are: PSNR and SSIM over whole volumes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
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
_SLAB_VOXELS = 1 << 23  # SSIM holds about ten tensors of this size


def psnr(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB of each volume in a batch."""
    error = _mean(lambda first, second: (first - second).square().flatten(1).mean(dim=1), reconstruction, image)
    return 10 * torch.log10(DATA_RANGE**2 / error.clamp_min(1e-12))


def absolute_error(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the mean absolute error of each volume in a batch."""
    return _mean(lambda first, second: (first - second).abs().flatten(1).mean(dim=1), reconstruction, image)


def ssim(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return the mean structural similarity of each volume in a batch; thin axes get a smaller window."""
    smallest = min(image.shape[2:])
    window = min(_WINDOW, smallest if smallest % 2 else smallest - 1)
    metric = SSIMMetric(spatial_dims=3, data_range=DATA_RANGE, win_size=window, kernel_sigma=1.5 * window / _WINDOW)
    return _mean(lambda first, second: metric(first, second).flatten(), reconstruction, image, halo=window - 1)


def _mean(measure: Callable[[Tensor, Tensor], Tensor], reconstruction: Tensor, image: Tensor, halo: int = 0) -> Tensor:
    """Return the mean of a measure over each volume in a batch, from slabs of rows: large volumes need no copies.

    `halo` is how many rows more than it returns values for the measure needs.
    """
    num_rows = image.shape[2] - halo
    rows = max(1, _SLAB_VOXELS // image[:, :, 0].numel() - halo)
    total = torch.zeros((), device=image.device)
    for start in range(0, num_rows, rows):
        end = min(start + rows, num_rows)
        first, second = (volume[:, :, start : end + halo].float() for volume in (reconstruction, image))
        total = total + measure(first, second) * ((end - start) / num_rows)
    return total


@torch.no_grad()
def validate_autoencoder(step: AutoencoderStep, batches: Iterable[Batch]) -> tuple[dict[str, float], Preview | None]:
    """Return mean PSNR and SSIM over all processes, and a preview of this process's first volume.

    Reconstructs the mean of the latent, with the averaged weights when there are any, and in slabs what is larger than
    training's patches.
    """
    totals = torch.zeros(4, dtype=torch.float64)  # PSNR, SSIM, mean absolute error, number of volumes
    preview = None
    network, whole = step.autoencoder.eval(), step.whole_volumes
    with step.average.swapped_in() if step.average is not None else nullcontext():
        for batch in batches:
            image = batch.image.to(step.process.device, non_blocking=True)
            reconstruction = torch.stack([whole.decode(whole.encode(volume)[0]) for volume in image])
            error = absolute_error(reconstruction, image)
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
    """Log validation metrics, keep the preview as PNG, in TensorBoard and for the report, and write the report.

    The metrics come last: their line says that the validation of this step is complete.
    """
    if preview is not None and recorder.process.is_first:
        path = recorder.run.previews / f"{recorder.stage}_{step:08d}.png"
        recorder.image(step, "reconstruction", save_picture(path, preview.picture))
        save_viewer_volumes(recorder.run, recorder.stage, step, preview.volumes)
        log.info("step %d: %s; preview %s", step, ", ".join(f"{n} {v:.4g}" for n, v in metrics.items()), path)
    recorder.write(step, metrics)
    publish(recorder.run, recorder.process)
