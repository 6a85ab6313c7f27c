"""Condition volumes: what is taken from the target, how the rest reaches the latent grid, and what samples keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from data.formats import write_nifti
from diffusion.conditioning.kind import KnownVoxels, filled
from diffusion.conditioning.volume import hole_mask, lowered, on_latent_grid, read_condition, read_mask
from settings import DataError
from settings.conditioning import VolumeSettings
from tests.data.small_volumes import build_settings, random_voxels, read_volume

TURNED = np.array([[0, -2.5, 0, 4], [2.0, 0, 0, -10], [0, 0, 3.0, 5], [0, 0, 0, 1]])


def test_a_lowered_volume_keeps_what_is_linear_and_its_means_are_those_of_the_blocks():
    ramp = torch.arange(8.0).view(1, 1, 8, 1).expand(1, 4, 8, 4).contiguous()
    found = lowered(ramp, (1, 2, 1))
    torch.testing.assert_close(found[:, :, 1:-1], ramp[:, :, 1:-1])
    noise = torch.randn(2, 4, 8, 4, generator=torch.Generator().manual_seed(0))
    coarse = torch.nn.functional.avg_pool3d(noise[None], (2, 2, 1))[0]
    torch.testing.assert_close(lowered(noise, (2, 2, 1)).mean(), coarse.mean(), atol=0.1, rtol=0)
    assert torch.equal(lowered(noise, (1, 1, 1)), noise)


def test_a_hole_has_its_size_and_depends_on_seed_volume_and_variant():
    places = set()
    for seed, digest, variant in [(1, "a", 0), (1, "a", 1), (1, "b", 0), (2, "a", 0)]:
        mask = hole_mask((12, 10, 8), (5, 4, 3), seed, digest, variant)
        corners = mask.nonzero()
        assert (corners.max(dim=0).values - corners.min(dim=0).values + 1).tolist() == [5, 4, 3]
        assert mask.sum() == 5 * 4 * 3
        assert torch.equal(mask, hole_mask((12, 10, 8), (5, 4, 3), seed, digest, variant))
        places.add(tuple(corners[0].tolist()))
    assert len(places) > 1


def test_a_hole_has_nothing_of_the_target_and_no_cliff_at_its_border():
    ramp = torch.linspace(-1, 1, 21).view(1, -1, 1, 1).expand(2, 21, 16, 10)
    unknown = hole_mask(ramp.shape[1:], (5, 6, 7), 0, "a", 0)
    found = filled(ramp, unknown)
    assert torch.equal(found, filled(ramp.masked_fill(unknown, 9.0), unknown))
    assert torch.equal(found[:, ~unknown], ramp[:, ~unknown])
    # What is filled in lies between its surroundings; black would be up to 1.2 away from the next voxel.
    assert found.diff(dim=1).abs().max() < 0.35
    assert torch.equal(filled(ramp, torch.ones_like(unknown)), torch.zeros_like(ramp))


def test_what_a_sample_lacks_around_a_hole_goes_on_in_it():
    generator = torch.Generator().manual_seed(0)
    target, detail = torch.rand(1, 12, 12, 12, generator=generator), torch.rand(1, 12, 12, 12, generator=generator)
    unknown = hole_mask(target.shape[1:], (5, 5, 5), 0, "a", 0)
    sample = (target + 0.3 + detail).where(unknown, target + 0.3)
    found = KnownVoxels(unknown).kept_in(sample, target)
    assert torch.equal(found[:, ~unknown], target[:, ~unknown])
    torch.testing.assert_close(found[:, unknown], (target + detail)[:, unknown])


@pytest.mark.parametrize("is_encoded", [False, True])
def test_the_last_channel_is_the_share_that_is_known(is_encoded):
    image = torch.rand(2, 8, 8, 8)
    unknown = torch.zeros(8, 8, 8, dtype=torch.bool)
    unknown[:2, :1, :2] = True
    codec: Any = SimpleNamespace(encode=lambda image: image[:, ::2, ::2, ::2] * 3) if is_encoded else None
    found = on_latent_grid(image, unknown, codec, (4, 4, 4))
    assert found.shape == (3, 4, 4, 4)
    assert found[-1, 0, 0, 0] == 0.5
    assert (found[-1].flatten()[1:] == 1).all()
    image = filled(image, unknown)
    blocks = image.reshape(2, 4, 2, 4, 2, 4, 2).mean(dim=(2, 4, 6))
    torch.testing.assert_close(found[:-1], image[:, ::2, ::2, ::2] * 3 if is_encoded else blocks)
    assert (on_latent_grid(image, None, codec, (4, 4, 4))[-1] == 1).all()


def from_target(**degrade) -> VolumeSettings:
    return VolumeSettings.model_validate({"encoding": "resample", "source": "target", "degrade": degrade})


@pytest.mark.parametrize(("dtype", "codes"), [(np.int16, "RAS"), (np.uint8, "LPS"), (np.float32, "PIR")])
def test_written_files_equal_the_given_one_outside_the_mask_in_any_type_and_orientation(tmp_path, dtype, codes):
    voxels = np.random.default_rng(0).uniform(0, 250, (13, 11, 9)).astype(dtype)
    hole = np.zeros(voxels.shape, bool)
    hole[3:7, 2:6, 1:5] = True
    affine = np.zeros((4, 4))
    for axis, (row, sign) in enumerate(nib.orientations.axcodes2ornt(codes)):
        affine[int(row), axis] = sign * (0.7, 1.37, 2.9)[axis]
    affine[:, 3] = [-31.3, 12.7, 99.1, 1]
    nib.save(nib.Nifti1Image(voxels, affine), tmp_path / "a.nii.gz")
    # The mask has the same place, but its axes have another order or direction.
    nib.save(nib.as_closest_canonical(nib.Nifti1Image(hole.astype(np.uint8), affine)), tmp_path / "mask.nii.gz")
    data = build_settings(voxel_size=[8, 12, 8])
    unknown = read_mask(tmp_path / "mask.nii.gz", tmp_path / "a.nii.gz", data)[1]
    _, space = read_condition(tmp_path / "a.nii.gz", data, from_target(hole=[2, 2, 2]), unknown)
    for value in (0.2, 0.7):
        filled = space.restored(np.full((1, 8, 12, 8), value, np.float32), (7.0,), (9.0,))
        write_nifti(tmp_path / "filled.nii.gz", filled, space.geometry.affine)
        image = nib.load(tmp_path / "filled.nii.gz")
        np.testing.assert_allclose(image.affine, affine, atol=1e-5)
        assert np.array_equal(image.get_fdata()[~hole], voxels[~hole].astype(np.float64))
        # In the file's own intensities, not in those of the training set.
        assert space.lower is not None
        assert space.upper is not None
        expected = space.lower[0] + value * (space.upper[0] - space.lower[0])
        np.testing.assert_allclose(image.get_fdata()[hole], expected, rtol=1e-3)


@pytest.mark.parametrize("resize", ["resample", "crop_or_pad"])
def test_a_finer_volume_has_the_condition_as_the_means_of_its_blocks(tmp_path, resize):
    voxels = random_voxels(3)
    write_nifti(tmp_path / "coarse.nii.gz", voxels, TURNED)
    # The network's second axis is the file's first.
    data = build_settings(voxel_size=[10, 24, 8], resize=resize)
    image, space = read_condition(tmp_path / "coarse.nii.gz", data, from_target(downsample=[1, 2, 1]))
    assert image.shape == (1, 10, 24, 8)
    assert space.known.factors == (2, 1, 1)
    sample = np.random.default_rng(0).random((1, 10, 24, 8)).astype(np.float32)
    result = space.restored(sample, (0.0,), (1.0,))
    assert result.shape == (1, 24, 10, 8)
    np.testing.assert_allclose(result.reshape(1, 12, 2, 10, 8).mean(axis=2), voxels, rtol=1e-5, atol=1e-3)
    # The two grids cover the same space.
    corner = space.geometry.affine @ [-0.5, -0.5, -0.5, 1]
    np.testing.assert_allclose(corner, TURNED @ [-0.5, -0.5, -0.5, 1])
    far = space.geometry.affine @ [23.5, 9.5, 7.5, 1]
    np.testing.assert_allclose(far, TURNED @ [11.5, 9.5, 7.5, 1])


def test_another_volume_has_intensities_of_its_own_and_samples_those_of_the_training_set(tmp_path):
    write_nifti(tmp_path / "ct.nii.gz", random_voxels(3) * 10, TURNED)
    s = VolumeSettings.model_validate(
        {"encoding": "resample", "source": "ct", "intensity": {"mode": "window", "lower": 0, "upper": 6000}}
    )
    data = build_settings(voxel_size=[10, 12, 8])
    image, space = read_condition(tmp_path / "ct.nii.gz", data, s)
    voxels, _ = read_volume(tmp_path / "ct.nii.gz")
    torch.testing.assert_close(image.max().item(), voxels.max() / 3000 - 1, rtol=1e-3, atol=1e-3)
    assert (space.restored(np.ones((1, 10, 12, 8), np.float32), (7.0,), (9.0,)) == 9).all()
    with pytest.raises(DataError, match=r"1 channel \(12 x 10 x 8\); ldm.conditioning.volume.num_channels is 2"):
        read_condition(tmp_path / "ct.nii.gz", data, s.model_copy(update={"num_channels": 2}))


@pytest.mark.parametrize("garbage", [1e6, np.nan])
def test_what_a_file_holds_in_its_hole_has_no_influence(tmp_path, garbage):
    voxels, unknown = random_voxels(1), np.zeros((12, 10, 8), bool)
    unknown[3:7, 2:6, 1:5] = True
    data = build_settings(voxel_size=[8, 10, 8])
    s = from_target(hole=[2, 2, 2])
    found = []
    for value in (0.0, garbage):
        write_nifti(tmp_path / "a.nii.gz", np.where(unknown, np.float32(value), voxels), TURNED)
        found.append(read_condition(tmp_path / "a.nii.gz", data, s, unknown))
    assert torch.equal(found[0][0], found[1][0])
    # Percentiles of the known voxels, computed another way.
    known = np.percentile(voxels[0][~unknown], [data.intensity.lower, data.intensity.upper])
    for ends, expected in zip((found[1][1].lower, found[1][1].upper), known, strict=True):
        assert ends == (pytest.approx(expected, rel=1e-6),)
    assert np.isfinite(found[1][1].restored(np.zeros((1, 8, 10, 8), np.float32), (7.0,), (9.0,))).all()


def test_masks_that_do_not_suit_their_volume_are_refused_and_holes_that_the_grid_cuts_off_named(tmp_path, caplog):
    mask = np.zeros((1, 12, 10, 8), np.float32)
    mask[0, 1:4, 2:4, 1:3] = 1
    away = np.eye(4)
    away[:3, 3] = 50
    write_nifti(tmp_path / "a.nii.gz", random_voxels(1), np.eye(4))
    for voxels, affine, text in (
        (mask[:, :6], np.eye(4), r"6 x 10 x 8 voxels, and .* has 12 x 10 x 8; a mask needs the shape"),
        (mask, away, "both must cover the same space to within a voxel"),
        (np.ones_like(mask), np.eye(4), r"above 0 everywhere, so nothing of .* is known"),
    ):
        write_nifti(tmp_path / "mask.nii.gz", voxels, affine)
        with pytest.raises(DataError, match=text):
            read_mask(tmp_path / "mask.nii.gz", tmp_path / "a.nii.gz", build_settings(voxel_size=[12, 10, 8]))
    write_nifti(tmp_path / "mask.nii.gz", mask, np.eye(4))
    for grid, words in ([12, 10, 8], ""), ([8, 10, 8], "4 of its 12 voxels above 0 lie outside the network's grid"):
        data = build_settings(voxel_size=grid, resize="crop_or_pad")
        read_mask(tmp_path / "mask.nii.gz", tmp_path / "a.nii.gz", data)
        assert words in caplog.text
        assert bool(words) == bool(caplog.text)
