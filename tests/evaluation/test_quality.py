"""The metrics against known answers, and that they rank better sets above worse ones."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evaluation.quality import (
    Reference,
    SilentNetwork,
    compared,
    evaluate_samples,
    mean_interval,
    similarity,
    training_volumes,
)
from settings import CheckpointError, DataSettings
from training.validation.metrics import (
    compare_sharpness,
    gradient_magnitude,
    laplacian_kurtosis,
    mean_pairwise_ms_ssim,
    ms_ssim,
    nearest,
    summary_vector,
)


def blobs(number: int, seed: int, size: int = 24, offset: float = 0.0) -> list[torch.Tensor]:
    """Smooth random volumes in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand((number, 1, 4, 4, 4), generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(size,) * 3, mode="trilinear")
    return list((smooth + offset).clamp(0, 1))


@pytest.mark.parametrize("shape", [(12, 12, 12), (32, 32, 32), (64, 64, 16), (7, 40, 40), (16, 16, 2), (16, 1, 2)])
def test_ms_ssim_is_one_for_equals_and_falls_with_noise_whatever_the_grid(shape):
    generator = torch.Generator().manual_seed(0)
    volume = torch.rand((2, 1, *shape), generator=generator)
    assert ms_ssim(volume, volume).tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    some, more = (
        ms_ssim(volume, volume + level * torch.randn(volume.shape, generator=generator)) for level in (0.05, 0.3)
    )
    assert (more < some).all()
    assert (some < 1).all()


def test_one_volume_drawn_again_and_again_has_no_diversity():
    assert mean_pairwise_ms_ssim(blobs(1, 0) * 3) == pytest.approx(1.0, abs=1e-5)
    assert mean_pairwise_ms_ssim(blobs(14, 1)) < 0.9


def test_the_nearest_is_found_with_its_rms_distance_which_is_none_for_copies():
    others = torch.tensor([[0.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    distances, indices = nearest(torch.tensor([[3.0, 0.0]], dtype=torch.float64), others)
    assert (indices.tolist(), distances.tolist()) == ([1], pytest.approx([1 / math.sqrt(2)]))
    others = torch.rand((40, 4096), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distances, indices = nearest(others[:30], others)
    assert distances.tolist() == [0.0] * 30
    assert indices.tolist() == list(range(30))


def make_reference(held_out: list[torch.Tensor], training: list[torch.Tensor]) -> Reference:
    vectors = [torch.stack([summary_vector(v) for v in volumes]) for volumes in (held_out, training)]
    return Reference(held_out, vectors[0], vectors[1], tuple(f"t{i}" for i in range(len(training))))


def test_samples_that_copy_training_volumes_are_counted_and_named():
    training = blobs(10, 0)
    result = evaluate_samples([*blobs(3, 2), training[7] + 1e-3], make_reference(blobs(6, 1), training))
    assert result["num_memorised"] == 1
    assert result["nearest_training"][3]["training_volume"] == "t7"
    assert result["nearest_training"][3]["ratio"] < 0.1


def test_sharpness_is_one_for_equals_falls_with_blur_and_is_the_slope_of_a_ramp():
    generator = torch.Generator().manual_seed(0)
    volumes = [torch.rand((1, 24, 20, 16), generator=generator) for _ in range(3)]
    blurred = [torch.nn.functional.avg_pool3d(volume[None], 3, 1, 1)[0] for volume in volumes]
    wanted = [gradient_magnitude(volume) for volume in volumes]
    assert compare_sharpness(wanted, wanted)["gradient_magnitude"] == pytest.approx(1.0)
    soft = compare_sharpness([gradient_magnitude(volume) for volume in blurred], wanted)
    assert soft["gradient_magnitude"] < 0.5
    ramp = 0.03 * torch.arange(8.0).view(1, 8, 1, 1) + 0.04 * torch.arange(8.0).view(1, 1, 8, 1)
    assert gradient_magnitude(ramp) == pytest.approx(0.05, rel=1e-5)


@pytest.mark.parametrize("number", [2, 3, 8])
def test_the_interval_of_a_mean_holds_the_truth_19_times_in_20_however_few_the_volumes(number):
    draws = torch.randn((1000, number), generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    intervals = [mean_interval(values) for values in draws]
    assert 920 <= sum(low < 0 < high for low, high in intervals) <= 980
    assert all(math.isnan(end) for end in mean_interval([1.0]))


@pytest.mark.parametrize(("num", "warns"), [(2, True), (5, False)])
def test_samples_too_few_for_a_covariance_are_said_to_be(caplog, num, warns):
    def features(volumes, what):
        return [[volume.flatten()[None, :4].double()] for volume in volumes]

    reference = make_reference(blobs(8, 1), blobs(3, 2))
    network: Any = SimpleNamespace(features=features)
    reference = replace(reference, network=network, held_out_features=features(reference.held_out, ""))
    assert evaluate_samples(blobs(num, 3), reference)["fid"] > 0
    assert ("2 rows cannot determine the covariance of 4 features, so FID is too high" in caplog.text) == warns


def test_a_silent_network_leaves_samples_as_they_start():
    network = SilentNetwork(2)
    assert network(torch.rand(3, 5, 4, 4, 4), torch.zeros(3)).shape == (3, 2, 4, 4, 4)
    volumes = blobs(3, seed=1, offset=0.3)
    assert similarity(volumes, [2 * volume + 1 for volume in volumes]) == pytest.approx(1)
    assert abs(similarity(volumes, [torch.rand_like(volume) for volume in volumes])) < 0.5


def test_training_volumes_whose_reconstructions_are_not_finite_are_an_error(monkeypatch):
    monkeypatch.setattr("evaluation.quality.load_file", lambda *file: SimpleNamespace(image=torch.ones(1, 2, 2, 2)))
    codec: Any = SimpleNamespace(encode=lambda image: image, decode=lambda mean: mean * torch.nan)
    file: Any = SimpleNamespace(name="a.nii")
    with pytest.raises(CheckpointError, match=r"a\.nii: the networks gave values that are not finite"):
        training_volumes(codec, [file], DataSettings(), 1)


def test_the_laplacian_of_noise_is_gaussian_and_that_of_a_box_is_not():
    noise = 0.5 + 0.05 * torch.randn(1, 24, 24, 24, generator=torch.Generator().manual_seed(0))
    assert laplacian_kurtosis(noise) == pytest.approx(3, abs=0.2)
    box = torch.full((1, 24, 24, 24), 0.2)
    box[:, 6:18, 6:18, 6:18] = 0.9
    assert laplacian_kurtosis(box) > 6
    assert math.isnan(laplacian_kurtosis(torch.zeros(1, 4, 4, 4)))
    reference = make_reference([box, box.flip(1)], [box])
    assert compared([noise.clamp(0, 1)] * 2, reference)["laplacian_kurtosis"] < 0.6
