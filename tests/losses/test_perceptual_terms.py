"""What holds for every perceptual term that the config can name."""

import functools

import pytest
import torch

from losses import build_perceptual_loss
from losses.networks import LpipsSlices, drawn_slices
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
