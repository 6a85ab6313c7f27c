"""FID and KID: the distances themselves, and the networks and slices of the two protocols."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from monai.metrics.fid import FIDMetric
from torch import Tensor, nn

from evaluation.fid import FeatureNetwork, fid_and_kid, frechet_distance, kernel_distance, radimagenet_resnet50
from losses.networks import dilated_resnet
from settings import ConfigError

CPU = torch.device("cpu")


def rows(number: int, width: int, shift: float = 0.0, spread: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, width, generator=generator, dtype=torch.float64) * spread + shift


@pytest.mark.parametrize(("number", "width"), [(300, 16), (17, 16), (9, 16)])
def test_frechet_distance_equals_monais(number: int, width: int) -> None:
    a, b = rows(number, width), rows(number + 5, width, shift=0.3, spread=1.4, seed=1)
    # MONAI takes the root of a singular matrix when there are fewer rows than features, which costs digits.
    torch.testing.assert_close(frechet_distance(a, b), float(FIDMetric()(a, b)), rtol=1e-5, atol=1e-5)


def test_kid_is_zero_on_average_for_draws_of_one_distribution_and_large_for_two() -> None:
    same = [kernel_distance(rows(12, 8, seed=2 * n), rows(12, 8, seed=2 * n + 1)) for n in range(200)]
    mean, error = torch.tensor(same).mean(), torch.tensor(same).std() / len(same) ** 0.5
    assert abs(mean) < 4 * error
    assert kernel_distance(rows(12, 8), rows(12, 8, shift=1.0, seed=1)) > 10 * torch.tensor(same).std()


def test_interval_contains_the_value_and_narrows_with_more_volumes() -> None:
    def width_of(number: int) -> float:
        a = [[row[None]] for row in rows(number, 4)]
        b = [[row[None]] for row in rows(number, 4, shift=0.5, seed=1)]
        result = fid_and_kid(a, b)
        low, high = result["fid_interval"]
        assert low < result["fid"] < high
        return high - low

    assert width_of(400) < 0.6 * width_of(40)


def test_networks_have_the_sizes_of_the_published_ones() -> None:
    assert sum(p.numel() for p in radimagenet_resnet50().parameters()) == 23_534_592
    with torch.device("meta"):
        assert sum(p.numel() for p in dilated_resnet(50).parameters()) == 46_155_072


@pytest.fixture(scope="module")
def slices_network(tmp_path_factory: pytest.TempPathFactory) -> FeatureNetwork:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "RadImageNet-ResNet50_notop.pth"
    # Old files have a "module." in front of names and no counts of batches.
    state = {f"module.{k}": v for k, v in radimagenet_resnet50().state_dict().items() if "num_batches" not in k}
    torch.save({"state_dict": state}, path)
    return FeatureNetwork("radimagenet-2.5d", str(path), CPU)


def test_middle_slices_of_three_planes_are_compared_whatever_the_scale_of_intensities(
    slices_network: FeatureNetwork,
) -> None:
    volume = torch.rand(1, 20, 15, 10)
    planes, scaled = slices_network.features([volume, volume * 0.25 + 0.5], "volumes")
    assert [tuple(plane.shape) for plane in planes] == [(4, 2048), (8, 2048), (6, 2048)]
    torch.testing.assert_close(planes, scaled, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"--fid: the volumes have 2 channels; allowed: 1"):
        slices_network.features([torch.rand(2, 8, 8, 8)], "volumes")


def test_missing_and_wrong_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file was given; allowed: resnet_50_23dataset.pth from github.com/Ten"):
        FeatureNetwork("medicalnet-3d", None, CPU)
    (tmp_path / "text.pth").write_text("text")
    with pytest.raises(ConfigError, match=r"^--fid-weights: .*text.pth cannot be read as a state dict"):
        FeatureNetwork("medicalnet-3d", str(tmp_path / "text.pth"), CPU)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in dilated_resnet(50).state_dict().items()}
    broken = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}
    broken["conv1.weight"] = broken["conv1.weight"] + torch.nan
    for state in (nn.Linear(2, 2).state_dict(), broken):
        torch.save(state, tmp_path / "other.pth")
        with pytest.raises(ConfigError, match=r"does not hold the weights of medicalnet-3d \(conv1.weight is missing"):
            FeatureNetwork("medicalnet-3d", str(tmp_path / "other.pth"), CPU)
