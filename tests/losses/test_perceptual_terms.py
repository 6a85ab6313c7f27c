"""What holds for every perceptual term that a config can name, and the structural term on a real brain."""

import functools
import itertools

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from scipy.ndimage import gaussian_filter

from losses import build_perceptual_loss
from losses.networks import LpipsSlices, drawn_slices
from losses.perceptual import StructuralDistance
from memory.predict.emulation import measure_peak
from settings import AutoencoderTraining

NETWORKS = ["lpips-squeeze", "medicalnet-resnet10", "structural"]


@pytest.fixture(scope="module")
def build(trunk_files, medicalnet_file):
    @functools.cache
    def build(network: str, **changes):
        family, _, trunk = network.partition("-")
        weights = {"lpips": trunk_files.get(trunk), "medicalnet": medicalnet_file}.get(family)
        perceptual = {"network": network, "weights": weights and str(weights), "slice_fraction": 0.1, **changes}
        training = AutoencoderTraining.model_validate({"use_perceptual_loss": True, "perceptual": perceptual})
        return build_perceptual_loss(training, seed=0)

    return build


def pairs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Reconstruction and target, each case a way to break a normalisation or an overflow."""
    image = torch.rand(1, 1, 20, 18, 17, generator=torch.Generator().manual_seed(0)) * 2 - 1
    zero, one = torch.zeros_like(image), torch.ones_like(image)
    return {
        "both zero": (zero, zero),
        "both constant": (one, one),
        "constants that differ": (-one, one),
        "constant against image": (zero, image),
        "image against constant": (image, zero),
        "equal": (image, image),
        "thousands": (1000 * image, image),
        "fp16's largest": (65504 * image.sign(), image),
        "fp32's largest": (3e38 * image.sign(), image),
        "tiny": (1e-30 * image, 1e-38 * image),
        "one voxel apart": (zero.index_fill(2, torch.tensor([3]), 1.0), zero),
    }


@pytest.mark.parametrize("case", pairs())
@pytest.mark.parametrize("network", NETWORKS)
def test_loss_and_gradient_are_finite(build, network, case):
    term = build(network)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        reconstruction, target = (x.to(dtype) for x in pairs()[case])
        if not torch.isfinite(reconstruction).all():
            continue
        reconstruction.requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = term(reconstruction, target, 0)
        assert loss.dtype == torch.float32
        (gradient,) = torch.autograd.grad(loss, reconstruction)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()
        assert gradient.dtype == dtype


@pytest.mark.parametrize("network", NETWORKS)
def test_loss_falls_from_bad_to_equal(build, network):
    generator = torch.Generator().manual_seed(0)
    target = torch.nn.functional.avg_pool3d(torch.randn(1, 2, 28, 26, 24, generator=generator), 5, 1).clamp(-1, 1)
    noise = torch.randn(target.shape, generator=generator)
    term = build(network)
    worse, better, equal = (term(target + sigma * noise, target, 0).item() for sigma in (0.5, 0.05, 0.0))
    assert worse > better > equal
    assert abs(equal) < 1e-6


@pytest.mark.parametrize("network", NETWORKS)
def test_nan_is_not_hidden_and_only_the_reconstruction_receives_gradients(build, network):
    reconstruction = torch.full((1, 1, 17, 17, 17), torch.nan, requires_grad=True)
    assert not torch.isfinite(build(network, slice_fraction=1.0)(reconstruction, torch.zeros(1, 1, 17, 17, 17), 0))
    reconstruction, target = (torch.rand(1, 1, 20, 20, 20, requires_grad=True) for _ in range(2))
    loss = build(network)(reconstruction, target, 0)
    ours, theirs = torch.autograd.grad(loss, (reconstruction, target), allow_unused=True)
    assert theirs is None
    assert ours.abs().sum() > 0


def test_lpips_gets_the_seed_fraction_and_chunk_of_the_config(trunk_files, monkeypatch):
    weights = str(trunk_files["squeeze"])
    perceptual = {"network": "lpips-squeeze", "weights": weights, "slice_fraction": 0.35, "chunk_size": 5}
    training = AutoencoderTraining.model_validate({"use_perceptual_loss": True, "perceptual": perceptual})
    term = build_perceptual_loss(training, seed=11)
    assert isinstance(term, LpipsSlices)
    compared: list[tuple[int, ...]] = []

    def difference(images, wanted):
        compared.append(tuple(images.shape))
        return (images - wanted).mean(dim=(1, 2))

    monkeypatch.setattr(term, "distance", difference)
    # Each voxel tells its place along the first axis, so that a piece tells which slice it is.
    places = torch.arange(20.0).view(1, 1, 20, 1, 1).expand(1, 1, 20, 18, 17)
    loss = term(places, torch.zeros(1, 1, 20, 18, 17), 3)
    drawn = drawn_slices((20, 18, 17), 0.35, 11, 3)
    assert [shape[0] for shape in compared] == [5, 2, 5, 1, 5, 1]
    assert loss.item() == pytest.approx((sum(drawn[0]) + 12 * 9.5) / 19, rel=1e-5)


def peak_bytes(network: str, chunk_size: int, slice_fraction: float = 0.0625) -> int:
    """Peak of the term and its backward on a 64^3 volume, on tensors without data."""

    def run(tracker):
        perceptual = {"network": network, "chunk_size": chunk_size, "slice_fraction": slice_fraction}
        training = AutoencoderTraining.model_validate({"use_perceptual_loss": True, "perceptual": perceptual})
        term = build_perceptual_loss(training, seed=0, load_weights=False)
        volume, target = torch.zeros(1, 1, 64, 64, 64, requires_grad=True), torch.zeros(1, 1, 64, 64, 64)
        tracker.reset()
        assert term is not None
        term(volume, target, 0).backward()

    return measure_peak(run).peak["device"]


def test_memory_follows_the_chunk_and_not_the_number_of_slices():
    few, many = (peak_bytes("lpips-squeeze", chunk_size=4, slice_fraction=fraction) for fraction in (0.0625, 0.125))
    assert many == pytest.approx(few, rel=0.01)
    assert peak_bytes("lpips-squeeze", chunk_size=1) < 0.6 * many


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
    assert torch.autograd.gradcheck(lambda x: StructuralDistance().distance(x, target), volume.requires_grad_())


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 8, 8), (2, 3, 64), (5, 7, 9), (16, 16, 1)])
def test_any_grid_is_compared(grid):
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(2, 2, *grid, generator=generator) * 2 - 1
    volume = (target + 0.2).requires_grad_()
    loss = StructuralDistance()(volume, target, 0)
    assert torch.isfinite(torch.autograd.grad(loss, volume)[0]).all()
    assert 0 < loss < 2
