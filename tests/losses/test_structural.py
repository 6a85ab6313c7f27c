"""The structural term on a real brain: nilearn ships the MNI152 T1 template."""

import functools
import itertools

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from scipy.ndimage import gaussian_filter

from losses.perceptual import StructuralDistance, structural_distance


@pytest.fixture(scope="module")
def brain() -> torch.Tensor:
    from nilearn.datasets import load_mni152_template

    data = load_mni152_template(resolution=2).get_fdata().astype(np.float32)
    return torch.from_numpy(2 * data / data.max() - 1)[None, None]


def distance(volume: torch.Tensor, target: torch.Tensor) -> float:
    return StructuralDistance()(volume, target, 0).item()


def blurred(volume: torch.Tensor, sigma: float) -> torch.Tensor:
    return torch.from_numpy(gaussian_filter(volume.numpy(), (0, 0, sigma, sigma, sigma)))


def noisy(volume: torch.Tensor, sigma: float) -> torch.Tensor:
    return volume + sigma * torch.randn(volume.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("degraded", "amounts"),
    [
        (blurred, (0.5, 1.0, 2.0, 4.0)),
        (noisy, (0.02, 0.05, 0.1, 0.2, 0.4)),
        *((functools.partial(torch.roll, dims=axis), (1, 2, 3, 5, 8)) for axis in (2, 3, 4)),
    ],
)
def test_distance_rises_with_blur_noise_and_shift(brain, degraded, amounts):
    values = [0.0, *(distance(degraded(brain, amount), brain) for amount in amounts)]
    assert all(after > before + 0.005 for before, after in itertools.pairwise(values)), values


def halved(volume: np.ndarray) -> np.ndarray:
    """Block means of two voxels along each axis; a last odd voxel is left out."""
    a, b, c = (size // 2 for size in volume.shape)
    return volume[: 2 * a, : 2 * b, : 2 * c].reshape(a, 2, b, 2, c, 2).mean(axis=(1, 3, 5))


def written_out(x: np.ndarray, y: np.ndarray) -> float:
    """The distance as its module describes it, in numpy: four scales, intensities that span 2."""
    floor = (0.03 * 2) ** 2
    similarities = []

    def window(volume: np.ndarray) -> np.ndarray:
        blocks = halved(volume)
        size = tuple(min(3, n) for n in blocks.shape)
        return sliding_window_view(blocks, size).mean(axis=(3, 4, 5))

    for scale in range(4):
        assert min(x.shape) >= 8, "this reference halves at every scale"
        product, energy = np.zeros_like(x), np.zeros_like(x)
        for axis in range(3):
            dx, dy = (np.diff(v, axis=axis, append=np.take(v, [-1], axis=axis)) for v in (x, y))
            product, energy = product + dx * dy, energy + dx**2 + dy**2
        similarities.append(((2 * halved(product) + floor) / (halved(energy) + floor)).mean())
        mean_x, mean_y = window(x), window(y)
        var_x, var_y = window(x * x) - mean_x**2, window(y * y) - mean_y**2
        covariance = window(x * y) - mean_x * mean_y
        similarities.append(((2 * covariance + floor) / (var_x + var_y + floor)).mean())
        x, y = halved(x), halved(y)
        if scale == 3:
            similarities.append((0.1 / ((x - y) ** 2 + 0.1)).mean())
    return 1 - float(np.mean(similarities))


def test_distance_is_the_formula_written_out_in_numpy():
    rng = np.random.default_rng(0)
    targets = [gaussian_filter(rng.normal(size=(64, 72, 80)), 3) * 8 for _ in range(2)]
    volumes = [0.8 * target + 0.1 + 0.05 * rng.normal(size=target.shape) for target in targets]
    expected = np.mean([written_out(x, y) for x, y in zip(volumes, targets, strict=True)])
    batch = [torch.from_numpy(np.stack(each)[:, None]) for each in (volumes, targets)]
    assert StructuralDistance()(*batch, 0).item() == pytest.approx(expected, rel=1e-9)


def test_gradient_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    volume, target = (torch.rand(1, 9, 4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x: structural_distance(x, target), volume.requires_grad_())


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 8, 8), (2, 3, 64), (5, 7, 9), (16, 16, 1)])
def test_any_grid_is_compared(grid):
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(2, 2, *grid, generator=generator) * 2 - 1
    volume = (target + 0.2).requires_grad_()
    loss = StructuralDistance()(volume, target, 0)
    assert torch.isfinite(torch.autograd.grad(loss, volume)[0]).all()
    assert 0 < loss < 2
