"""Validation: memory as in training on patches, figures that slabs leave alone, and real volumes beside samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from torch import Tensor

from data import DataSplit, VolumeFile
from data.batches import Batch
from data.loading import load_volume, to_unit
from settings import DataSettings
from tests.training.steps import autoencoder_step
from training.autoencoder_step import AutoencoderStep
from training.validation import metrics
from training.validation.metrics import absolute_error, chamfer, iou, psnr, ssim
from training.validation.stages import MAX_COMPARED, MAX_SHOWN, RealVolumes, spacing_of, validate_autoencoder

GRID = [64, 32, 32]


@pytest.fixture
def values(tiny_values) -> dict[str, Any]:
    """A config that trains on patches of large volumes."""
    tiny_values["data"] |= {"voxel_size": GRID}
    tiny_values["autoencoder"] |= {"num_channels": [16, 32], "attention_levels": [False, False]}
    return tiny_values


def make_step(values: dict[str, Any], patch_size: list[int] | None) -> AutoencoderStep:
    return autoencoder_step(values | {"data": values["data"] | {"patch_size": patch_size}})


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


DATA = DataSettings(voxel_size=(8, 8, 8))


def write(folder: Path, number: int) -> VolumeFile:
    """A volume of 8 x 8 x 4 voxels of 1 x 1 x 4 mm, different for each number."""
    voxels = np.random.default_rng(number).normal(size=(8, 8, 4)).astype(np.float32)
    path = folder / f"volume_{number}.nii"
    nib.save(nib.Nifti1Image(voxels, np.diag([1.0, 1.0, 4.0, 1.0])), path)
    return VolumeFile(path, path.name, number % 2)


@pytest.fixture
def files(tmp_path) -> tuple[VolumeFile, ...]:
    return tuple(write(tmp_path, number) for number in range(6))


def test_each_sample_gets_its_own_nearest_training_volume(files):
    real = RealVolumes(DataSplit(files[:4], files[4:], ("healthy", "lesion")), DATA)
    samples = [to_unit(load_volume(files[number].path, DATA, 1).image) * 0.98 for number in (2, 0, 3)]
    shown = real.nearest_to(samples)
    assert [volume.name for volume in shown] == ["volume_2.nii", "volume_0.nii", "volume_3.nii"]
    assert shown[0].note.startswith("class healthy, nearest of 4 training volumes, distance 0.0")
    assert shown[2].note.startswith("class lesion, ")
    assert shown[0].voxels.shape == (8, 8, 8)


def test_held_out_volumes_come_with_the_spacing_of_the_grid_and_large_sets_are_compared_in_part(files):
    many = (files[:4] * MAX_COMPARED)[: MAX_COMPARED + 10]
    real = RealVolumes(DataSplit(many, files[4:] * MAX_SHOWN), DATA)
    assert [volume.name for volume in real.held_out] == ["volume_4.nii", "volume_5.nii"] * (MAX_SHOWN // 2)
    assert real.held_out[0].spacing_mm == pytest.approx((1.0, 1.0, 2.0))
    assert spacing_of(files[4], DATA) == pytest.approx((1.0, 1.0, 2.0))
    (shown,) = real.nearest_to([to_unit(load_volume(files[1].path, DATA, 1).image)])
    assert shown.name == "volume_1.nii"
    assert f"nearest of {MAX_COMPARED} of {MAX_COMPARED + 10} training volumes" in shown.note
