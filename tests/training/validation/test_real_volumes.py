"""Real volumes beside samples: the nearest training volume of each, and held-out volumes with their spacing."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from data import DataSplit, VolumeFile
from data.loading import load_volume, to_unit
from settings import DataSettings
from training.validation.autoencoder_validation import spacing_of
from training.validation.ldm_validation import MAX_COMPARED, MAX_SHOWN, RealVolumes

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
