"""Validation of whole volumes needs about as much memory as training on patches, and slabs leave its figures alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from data.batches import Batch
from runtime.processes import Process
from settings import Settings
from training.autoencoder_step import AutoencoderStep
from training.validation import metrics
from training.validation.autoencoder_validation import validate_autoencoder
from training.validation.metrics import absolute_error, chamfer, iou, psnr, ssim

CPU = Process(torch.device("cpu"))
GRID = [64, 32, 32]


@pytest.fixture
def values(tiny_values) -> dict[str, Any]:
    """A config that trains on patches of large volumes."""
    result = copy.deepcopy(tiny_values)
    result["data"] |= {"voxel_size": GRID, "patch_size": [16, 16, 16]}
    result["autoencoder"] |= {"num_channels": [16, 32], "attention_levels": [False, False]}
    return result


def make_step(values: dict[str, Any], patch_size: list[int] | None) -> AutoencoderStep:
    changed = copy.deepcopy(values)
    changed["data"]["patch_size"] = patch_size
    return AutoencoderStep(Settings.model_validate(changed), CPU)


def held_out() -> list[Batch]:
    image = torch.rand((1, 1, *GRID), generator=torch.Generator().manual_seed(1)) * 2 - 1
    return [Batch(image, positions=(0,), files=("one.nii",))]


def test_validation_of_volumes_larger_than_patches_gives_the_same_figures_in_slabs(values):
    patches, whole = make_step(values, [16, 16, 16]), make_step(values, None)
    whole.load_state_dict(patches.state_dict())
    in_slabs, preview = validate_autoencoder(patches, held_out())
    plain, _ = validate_autoencoder(whole, held_out())
    assert patches.codec.slab_rows > 0
    assert whole.codec.slab_rows == 0
    assert in_slabs == pytest.approx(plain, rel=1e-5)
    assert preview is not None


@pytest.mark.parametrize("measure", [psnr, ssim, absolute_error])
def test_measures_taken_in_slabs_equal_those_of_the_whole_volume(measure, monkeypatch):
    generator = torch.Generator().manual_seed(2)
    image, noise = (torch.rand((2, 2, 33, 17, 13), generator=generator) * 2 - 1 for _ in range(2))
    reconstruction = image + 0.3 * noise
    whole: Tensor = measure(reconstruction, image)
    assert whole.shape == (2,)
    seen = []
    rows_of_slab = metrics.SSIMMetric.__call__

    def noted(self: Any, first: Tensor, second: Tensor) -> Any:
        seen.append(first.shape[2])
        return rows_of_slab(self, first, second)

    monkeypatch.setattr(metrics.SSIMMetric, "__call__", noted)
    monkeypatch.setattr(metrics, "_SLAB_VOXELS", 16 * image[:, :, 0].numel())
    torch.testing.assert_close(measure(reconstruction, image), whole, rtol=1e-6, atol=0)
    assert measure is not ssim or len(seen) > 1


def test_volumes_that_are_mostly_empty_are_validated_by_their_occupied_voxels(values, monkeypatch):
    monkeypatch.setattr("settings.autoencoder.OCCUPIED_THRESHOLD", 0.5)
    values["autoencoder"]["training"] |= {"occupied_weight": 10.0}
    step = make_step(values, [16, 16, 16])
    found, _ = validate_autoencoder(step, held_out())
    image = held_out()[0].image
    reconstruction = torch.stack([step.codec.decode(step.codec.encode(volume)) for volume in image])
    assert found["val_iou"] == pytest.approx(float(iou(reconstruction, image, 0.5)))
    assert found["val_chamfer"] == pytest.approx(float(chamfer(reconstruction, image, 0.5)))
