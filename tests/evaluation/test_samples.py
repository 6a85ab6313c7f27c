"""The metrics against known answers, and that they rank better sets above worse ones."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.linalg import sqrtm

from evaluation.fid import frechet_distance, load_features, slice_features
from evaluation.reconstructions import mean_interval
from evaluation.samples import (
    Reference,
    SilentNetwork,
    evaluate_anchors,
    evaluate_samples,
    similarity,
    training_volumes,
)
from evaluation.sharpness import compare_sharpness, gradient_magnitude, laplacian_kurtosis
from losses.torchvision_import import import_torchvision
from settings import CheckpointError, DataSettings
from training.validation.pair_metrics import ms_ssim
from training.validation.set_metrics import (
    mean_pairwise_ms_ssim,
    nearest,
    precision_and_recall,
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
    [volume] = blobs(1, 0)
    assert mean_pairwise_ms_ssim([volume] * 3) == pytest.approx(1.0, abs=1e-5)
    assert mean_pairwise_ms_ssim(blobs(14, 1)) < 0.9


def test_the_nearest_is_found_with_its_rms_distance():
    others = torch.tensor([[0.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    distances, indices = nearest(torch.tensor([[3.0, 0.0]], dtype=torch.float64), others)
    assert indices.tolist() == [1]
    assert distances.tolist() == pytest.approx([1 / math.sqrt(2)])


def test_copies_are_at_no_distance_however_many_vectors_there_are():
    others = torch.rand((40, 4096), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distances, indices = nearest(others[:30], others)
    assert distances.tolist() == [0.0] * 30
    assert indices.tolist() == list(range(30))


def make_reference() -> tuple[Reference, list[torch.Tensor]]:
    training, held_out = blobs(10, 0), blobs(6, 1)
    vectors = [torch.stack([summary_vector(v) for v in volumes]) for volumes in (held_out, training)]
    return Reference(held_out, vectors[0], vectors[1], tuple(f"t{i}" for i in range(10))), training


def test_samples_that_copy_training_volumes_are_counted_and_named():
    reference, training = make_reference()
    result = evaluate_samples([*blobs(3, 2), training[7] + 1e-3], reference)
    assert result["num_memorised"] == 1
    assert result["nearest_training"][3]["training_volume"] == "t7"
    assert result["nearest_training"][3]["ratio"] < 0.1
    assert "fid" not in result


def test_the_frechet_distance_is_the_formula_and_exact_for_gaussians():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn((300, 6), generator=generator).double() for _ in range(2))
    second = second * 2 + 1
    root = sqrtm((torch.cov(first.T) @ torch.cov(second.T)).numpy()).real
    both = torch.cov(first.T).trace() + torch.cov(second.T).trace() - 2 * root.trace()
    expected = float((first.mean(dim=0) - second.mean(dim=0)).square().sum() + both)
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-5)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-8)
    assert frechet_distance(first, first + 3) == pytest.approx(9 * 6, rel=1e-9)
    few = torch.randn((5, 64), generator=generator).double()  # rounding alone would take these below zero
    assert 0 <= frechet_distance(few, few) < 1e-4


@pytest.fixture(scope="module")
def squeezenet(tmp_path_factory):
    torch.manual_seed(0)
    model = import_torchvision().models.squeezenet1_1(weights=None)
    path = tmp_path_factory.mktemp("weights") / "squeezenet.pth"
    torch.save(model.state_dict(), path)
    return path


def test_fid_over_three_planes_grows_with_the_difference(squeezenet):
    features = load_features("squeezenet1_1", squeezenet)
    reference, _ = make_reference()
    same = evaluate_samples(blobs(5, 3), reference, features)["fid"]
    other = evaluate_samples(blobs(5, 3, offset=0.5), reference, features)["fid"]
    assert set(same) == {"first axis", "second axis", "third axis", "mean"}
    assert other["mean"] > 3 * same["mean"]
    assert same["mean"] == pytest.approx(sum(v for n, v in same.items() if n != "mean") / 3)


def test_weights_without_the_counters_of_batch_norms_are_taken(tmp_path):
    state = import_torchvision().models.get_model("resnet18", weights=None).state_dict()
    torch.save({name: value for name, value in state.items() if "tracked" not in name}, tmp_path / "w.pth")
    assert load_features("resnet18", tmp_path / "w.pth")(torch.rand(2, 70, 70)).shape == (2, 512)


def test_each_plane_is_cut_across_its_own_axis(squeezenet):
    seen = []

    def features(slices):
        seen.append(tuple(slices.shape))
        return torch.zeros(len(slices), 2)

    found = slice_features([torch.zeros(1, 10, 20, 30)], features)
    assert seen == [(6, 20, 30), (12, 10, 30), (18, 10, 20)]
    assert [len(f) for f in found] == [6, 12, 18]


def test_weights_of_another_network_are_refused(squeezenet, tmp_path):
    own, deeper = (import_torchvision().models.get_model(f"resnet{n}", weights=None).state_dict() for n in (18, 34))
    for sibling in (deeper, own | {"conv1.weight": torch.zeros(64, 1, 7, 7)}):
        torch.save(sibling, tmp_path / "sibling.pth")
        with pytest.raises(CheckpointError, match="does not hold the weights of resnet18"):
            load_features("resnet18", tmp_path / "sibling.pth")
    with pytest.raises(CheckpointError, match="does not hold the weights of resnet18"):
        load_features("resnet18", squeezenet)
    with pytest.raises(CheckpointError, match="there is no file"):
        load_features("resnet18", tmp_path / "gone.pth")


def test_precision_falls_with_strange_samples_and_recall_with_missing_ones():
    reference = torch.arange(20, dtype=torch.float64)[:, None]
    assert precision_and_recall(reference + 0.5, reference) == (1.0, 1.0)
    half_strange = torch.cat([reference[::2], reference[::2] + 1000])
    assert precision_and_recall(half_strange, reference)[0] == 0.5
    # Ten samples around the first five: they reach their third neighbours and no further.
    narrow = torch.linspace(0, 4, 10, dtype=torch.float64)[:, None]
    precision, recall = precision_and_recall(narrow, reference)
    assert precision == 1.0
    assert 0.2 <= recall <= 0.35
    assert precision_and_recall(reference[:2], reference[:2]) == (1.0, 1.0)


def test_precision_reaches_as_far_as_the_third_neighbour():
    reference = torch.arange(20, dtype=torch.float64)[:, None]
    # The third neighbour of the last point is 3 away.
    for beyond, is_inside in ((2.9, 1.0), (3.1, 0.0)):
        assert precision_and_recall(reference[-1:] + beyond, reference)[0] == is_inside


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


def test_anchors_rank_as_they_should():
    held_out, training = blobs(12, seed=1, offset=0.3), blobs(30, seed=2, offset=0.3)
    reference = Reference(
        held_out,
        torch.stack([summary_vector(volume) for volume in held_out]),
        torch.stack([summary_vector(volume) for volume in training]),
        tuple(map(str, range(30))),
    )
    noise = [torch.rand(volume.shape, generator=torch.Generator().manual_seed(3)) for volume in training[:10]]
    found = evaluate_anchors({"training": training[:10], "noise": noise, "too few": training[:1]}, reference)
    assert list(found) == ["training", "noise"]
    assert found["noise"]["precision"] == found["noise"]["recall"] == 0 < found["training"]["precision"]
    assert found["noise"]["laplacian_kurtosis"] < found["training"]["laplacian_kurtosis"]


def test_a_silent_network_leaves_samples_as_they_start():
    network = SilentNetwork(2)
    assert network(torch.rand(3, 5, 4, 4, 4), torch.zeros(3)).shape == (3, 2, 4, 4, 4)
    volumes = blobs(3, seed=1, offset=0.3)
    assert similarity(volumes, [2 * volume + 1 for volume in volumes]) == pytest.approx(1)
    assert abs(similarity(volumes, [torch.rand_like(volume) for volume in volumes])) < 0.5


def test_training_volumes_whose_reconstructions_are_not_finite_are_an_error(monkeypatch):
    monkeypatch.setattr("evaluation.samples.load_file", lambda *file: SimpleNamespace(image=torch.ones(1, 2, 2, 2)))
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
