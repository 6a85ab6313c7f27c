"""PSNR, SSIM, MS-SSIM and measures of occupied voxels, and the validation of stage 1 against one written out."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from data.batches import Batch
from runtime.processes import Process
from settings import Settings
from training.autoencoder_step import AutoencoderStep
from training.validation.metrics import SCALE_WEIGHTS, chamfer, iou, ms_ssim, ssim, summary_vector
from training.validation.stages import validate_autoencoder

CPU = Process(torch.device("cpu"))


def pair(size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A smooth volume in [-1, 1] and a worse copy of it."""
    rng = np.random.default_rng(seed)
    volume = np.clip(4 * ndimage.gaussian_filter(rng.normal(size=(size,) * 3), 2.0), -1, 1)
    return volume + 0.1 * rng.normal(size=volume.shape), volume


def as_batch(*volumes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack(volumes)[:, None]).float()


def window(size: int, sigma: float) -> np.ndarray:
    offsets = np.arange(size) - (size - 1) / 2
    line = np.exp(-(offsets**2) / (2 * sigma**2))
    return line / line.sum()


def local_mean(volume: np.ndarray, line: np.ndarray) -> np.ndarray:
    """Weighted means of all windows that lie inside of the volume."""
    inner = slice(len(line) // 2, -(len(line) // 2) or None)
    for axis in range(3):
        volume = ndimage.correlate1d(volume, line, axis=axis)
    return volume[inner, inner, inner]


def ssim_parts(x: np.ndarray, y: np.ndarray, size: int, sigma: float, data_range: float) -> tuple[float, float]:
    """SSIM and its contrast-structure part (Wang et al. 2004, equations 12 and 13, K1 = 0.01, K2 = 0.03)."""
    line = window(size, sigma)
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    mean_x, mean_y = local_mean(x, line), local_mean(y, line)
    var_x, var_y = local_mean(x * x, line) - mean_x**2, local_mean(y * y, line) - mean_y**2
    covariance = local_mean(x * y, line) - mean_x * mean_y
    contrast = (2 * covariance + c2) / (var_x + var_y + c2)
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return float((luminance * contrast).mean()), float(contrast.mean())


@pytest.mark.parametrize(("size", "win"), [(20, 11), (9, 9), (8, 7)])
def test_ssim_is_the_published_formula_for_a_range_of_two(size, win):
    pairs = [pair(size), pair(size, seed=1)]
    found = ssim(as_batch(*(x for x, _ in pairs)), as_batch(*(y for _, y in pairs)))
    expected = [ssim_parts(x, y, win, 1.5 * win / 11, 2.0)[0] for x, y in pairs]
    assert found.tolist() == pytest.approx(expected, abs=2e-3)


def test_ms_ssim_is_the_published_product_over_scales_for_a_range_of_one():
    x, y = ((volume + 1) / 2 for volume in pair(32))
    found = ms_ssim(as_batch(x), as_batch(y)).item()
    # 32 voxels have room for three scales with a window of seven: 32, 16 and 8 voxels.
    weights = np.array(SCALE_WEIGHTS[:3]) / sum(SCALE_WEIGHTS[:3])
    expected = 1.0
    for scale, weight in enumerate(weights):
        whole, contrast = ssim_parts(x, y, 7, 1.5 * 7 / 11, 1.0)
        expected *= (whole if scale == 2 else contrast) ** weight
        x, y = (v.reshape(*(n for size in v.shape for n in (size // 2, 2))).mean(axis=(1, 3, 5)) for v in (x, y))
    assert found == pytest.approx(expected, abs=2e-3)


def test_the_summary_of_a_volume_is_its_block_means():
    volume = torch.rand(1, 32, 16, 48, generator=torch.Generator().manual_seed(0))
    expected = volume.numpy().reshape(1, 16, 2, 16, 1, 16, 3).mean(axis=(2, 4, 6))
    np.testing.assert_allclose(summary_vector(volume).numpy(), expected.ravel(), atol=1e-6)


def test_validation_reconstructs_the_latents_mean_with_the_averaged_weights(tiny_values):
    values = copy.deepcopy(tiny_values)
    values["autoencoder"]["training"].update(ema_decay=0.9, adversarial_weight=0.0)
    step = AutoencoderStep(Settings.model_validate(values), CPU)
    assert step.average is not None
    for average in step.average.averages:
        average.mul_(0.9)
    averaged = copy.deepcopy(step.autoencoder)
    with torch.no_grad():
        for parameter, average in zip(averaged.parameters(), step.average.averages, strict=True):
            parameter.copy_(average)
    images = [as_batch(pair(16, seed)[1]) for seed in range(3)]
    expected: dict[str, float] = dict.fromkeys(("val_psnr", "val_ssim", "val_l1"), 0.0)
    for image in images:
        with torch.no_grad():
            found = averaged.decode(averaged.encode(image)[0])
        x, y = (volume[0, 0].double().numpy() for volume in (found, image))
        expected["val_psnr"] += 20 * math.log10(2 / math.sqrt(((x - y) ** 2).mean())) / 3
        expected["val_ssim"] += ssim_parts(x, y, 11, 1.5, 2.0)[0] / 3
        expected["val_l1"] += float(np.abs(x - y).mean()) / 3
    batches = [Batch(image, (place,), ("a.nii",)) for place, image in enumerate(images)]
    metrics, _ = validate_autoencoder(step, batches)
    assert metrics == pytest.approx(expected, abs=2e-3)
    assert step.autoencoder.training


def grid(*places, size=8):
    volume = torch.full((1, 1, size, size, size), -1.0)
    for place in places:
        volume[(0, 0, *place)] = 1.0
    return volume


def test_shares_and_distances_are_those_of_the_occupied_voxels_of_each_volume():
    for volume in (grid((1, 2, 3), (4, 4, 4)), grid()):
        assert float(iou(volume, volume, 0.1)) == 1
        assert float(chamfer(volume, volume, 0.1)) == 0
    first, second = grid((0, 0, 0), (3, 3, 3)), grid((0, 0, 0), (3, 3, 5))
    shares = iou(torch.cat([first, grid()]), torch.cat([second, grid((1, 1, 1))]), 0.1)
    assert shares.tolist() == pytest.approx([1 / 3, 0])
    assert float(chamfer(first, second, 0.1)) == pytest.approx(1.0)  # 0 and 2, both ways
    assert float(chamfer(grid(), grid((1, 1, 1)), 0.1)) == pytest.approx(8 * math.sqrt(3))
    faint = torch.where(grid((2, 2, 2)) > 0, -0.5, -1.0)  # a quarter of the range
    assert [float(iou(faint, grid((2, 2, 2)), threshold)) for threshold in (0.2, 0.3)] == [1, 0]


def test_a_volume_without_one_common_value_is_occupied_above_its_lower_end():
    filled = torch.linspace(-1, 1, 512).view(1, 1, 8, 8, 8)
    assert float(iou(torch.ones_like(filled), filled, 0.1)) == pytest.approx((filled > -0.8).float().mean().item())
