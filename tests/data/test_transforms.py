"""Volumes reach the network's grid and range as the settings say, and come back."""

from __future__ import annotations

import tracemalloc
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from scipy import ndimage

from data.checking import Ranking, measure, on_grid
from data.formats import COPIES_WHILE_READING, write_nifti
from data.header import Stored
from data.loading import in_pose, load_volume, random_part, random_pose, restore
from settings import DataError
from tests.data.small_volumes import AFFINE, build_settings, random_voxels

WIDE = {"mode": "percentile", "lower": 0.0, "upper": 100.0}
TURNED = np.array([[0, 0, -3.0, 40], [2.0, 0, 0, -12], [0, -2.5, 0, 30], [0, 0, 0, 1]])


def smooth(shape: tuple[int, int, int]) -> np.ndarray:
    axes = np.meshgrid(*(np.linspace(0, 1, n) for n in shape), indexing="ij")
    return (100 * np.sin(2 * axes[0] + axes[1]) + 40 * axes[2] ** 2)[None].astype(np.float32)


def test_the_range_is_found_on_the_whole_volume_before_cropping(make_volume):
    voxels = np.zeros((1, 12, 12, 12), np.float32)
    voxels[0, 0] = 100.0
    voxels[0, 4:8] = 50.0
    loaded = load_volume(make_volume("v.nii.gz", voxels), build_settings(voxel_size=[4, 4, 4], resize="crop_or_pad"))
    assert (loaded.lower, loaded.upper) == ((0.0,), (100.0,))
    torch.testing.assert_close(loaded.image, torch.zeros(1, 4, 4, 4))


def test_resampling_follows_a_smooth_function(make_volume):
    path = make_volume("v.nii.gz", smooth((40, 30, 24)))
    settings = build_settings(voxel_size=[20, 15, 12], intensity={"mode": "window", "lower": -200.0, "upper": 200.0})
    image = load_volume(path, settings).image.numpy() * 200
    expected = smooth((40, 30, 24)).reshape(1, 20, 2, 15, 2, 12, 2).mean(axis=(2, 4, 6))
    np.testing.assert_allclose(image[:, 1:-1, 1:-1, 1:-1], expected[:, 1:-1, 1:-1, 1:-1], atol=0.6)
    finer = load_volume(path, settings.model_copy(update={"voxel_size": (80, 60, 48)})).image.numpy() * 200
    zoomed = ndimage.zoom(smooth((40, 30, 24))[0], 2, order=1, grid_mode=True, mode="nearest")
    np.testing.assert_allclose(finer[0], zoomed, atol=1e-2)


def test_shrinking_averages_instead_of_dropping_voxels(make_volume):
    checkers = (np.indices((32, 32, 32)).sum(axis=0) % 2).astype(np.float32)[None]
    image = load_volume(make_volume("v.nii.gz", checkers), build_settings(voxel_size=[8, 8, 8])).image
    assert image.abs().max() < 0.1


def test_spacing_is_reached_before_the_grid(make_volume):
    path = make_volume("v.nii.gz", smooth((12, 10, 8)))
    settings = build_settings(spacing=[1.0, 1.25, 6.0], resize="crop_or_pad", voxel_size=[24, 20, 6], intensity=WIDE)
    loaded = load_volume(path, settings)
    assert loaded.geometry.spaced_shape == (24, 20, 4)
    np.testing.assert_allclose(loaded.geometry.spacing_mm, (1.0, 1.25, 6.0), rtol=1e-6)
    assert (loaded.image[..., 0] == -1).all()
    assert (loaded.image[..., -1] == -1).all()


@pytest.mark.parametrize("affine", [AFFINE, TURNED])
@pytest.mark.parametrize("resize", ["resample", "crop_or_pad"])
@pytest.mark.parametrize("spacing", [None, [1.5, 1.5, 1.5]])
def test_a_volume_comes_back_onto_its_own_grid(make_volume, affine, resize, spacing):
    voxels = smooth((24, 20, 16))
    path = make_volume("v.nii.gz", voxels, affine)
    settings = build_settings(voxel_size=[48, 44, 40], resize=resize, spacing=spacing, intensity=WIDE)
    loaded = load_volume(path, settings)
    back, back_affine = restore(loaded.image, loaded)
    np.testing.assert_allclose(back_affine, affine)
    assert back.shape == voxels.shape
    inner = (slice(None), *(slice(2, -2),) * 3)
    atol = 0.01 if resize == "crop_or_pad" and spacing is None else 2.0
    np.testing.assert_allclose(back[inner], voxels[inner], atol=atol)


def test_what_was_cropped_comes_back_as_the_lower_intensity(make_volume):
    voxels = random_voxels(0, (1, 13, 10, 8))
    loaded = load_volume(
        make_volume("v.nii.gz", voxels), build_settings(voxel_size=[6, 12, 8], resize="crop_or_pad", intensity=WIDE)
    )
    back, _ = restore(loaded.image, loaded)
    np.testing.assert_allclose(back[:, 3:9], voxels[:, 3:9], atol=1e-2)
    np.testing.assert_allclose(back[:, 9:], voxels.min(), atol=1e-3)


@pytest.mark.parametrize("resize", ["resample", "crop_or_pad"])
def test_the_grids_affine_puts_voxels_where_they_are_in_the_file(make_volume, resize):
    voxels = np.zeros((1, 24, 20, 16), np.float32)
    voxels[0, 14:16, 8:10, 6:8] = 1.0
    path = make_volume("v.nii.gz", voxels, TURNED)
    loaded = load_volume(path, build_settings(voxel_size=[8, 12, 10], resize=resize, intensity=WIDE))
    centre = np.array(ndimage.center_of_mass((loaded.image[0] + 1).numpy()))
    place = loaded.geometry.grid_affine @ [*centre, 1]
    np.testing.assert_allclose(place, TURNED @ [14.5, 8.5, 6.5, 1], atol=0.6)


def test_loading_names_the_file_that_is_not_as_it_was(make_volume):
    voxels = random_voxels(0)
    with pytest.raises(DataError, match=r"v\.nii\.gz: 1 channel \(12 x 10 x 8\); autoencoder.in_channels is 2"):
        load_volume(make_volume("v.nii.gz", voxels), build_settings(), num_channels=2)
    with pytest.raises(DataError, match=r"v\.nii\.gz: channel 0 is 0 at both"):
        load_volume(make_volume("v.nii.gz", voxels * 0), build_settings())
    voxels[0, 0, 0, 0] = np.nan
    with pytest.raises(DataError, match=r"v\.nii\.gz: 1 voxel is NaN or infinite"):
        load_volume(make_volume("v.nii.gz", voxels), build_settings())


def test_patches_are_parts_of_the_volume_and_reach_all_of_it():
    image = torch.arange(6 * 7 * 8, dtype=torch.float32).reshape(1, 6, 7, 8)
    settings = build_settings(voxel_size=[6, 7, 8], patch_size=[4, 4, 4])
    corners = set()
    for seed in range(600):
        patch = random_part(image, settings, np.random.default_rng(seed))
        x, y, z = np.unravel_index(int(patch[0, 0, 0, 0]), (6, 7, 8))
        corners.add((x, y, z))
        assert torch.equal(patch, image[:, x : x + 4, y : y + 4, z : z + 4])
    assert corners == {(x, y, z) for x in range(3) for y in range(4) for z in range(5)}


@pytest.mark.parametrize("patch_size", [None, [4, 4, 4]])
def test_augmentation_flips_and_moves_by_whole_voxels(patch_size):
    size = (6, 7, 8)
    image = torch.arange(6 * 7 * 8, dtype=torch.float32).reshape(1, *size)
    settings = build_settings(voxel_size=size, patch_size=patch_size, use_augmentation=True)
    flips, firsts = set(), [set[int]() for _ in size]
    for seed in range(200):
        places = np.unravel_index(random_part(image, settings, np.random.default_rng(seed))[0].long().numpy(), size)
        lines = [np.moveaxis(along, axis, 0)[:, 0, 0] for axis, along in enumerate(places)]
        for axis, (along, line) in enumerate(zip(places, lines, strict=True)):
            assert (np.moveaxis(along, axis, -1) == line).all(), "the axes are turned"
            # Voxels repeat at an edge.
            assert set(np.diff(line)) <= {0, 1} or set(np.diff(line)) <= {0, -1}
            firsts[axis].add(int(line.min()))
        flips.add(tuple(bool(line[-1] < line[0]) for line in lines))
    assert len(flips) == 8
    assert firsts == [set(range(3)) if patch_size is None else set(range(n - 1)) for n in size]


@pytest.mark.parametrize("scales", [True, False])
def test_poses_are_rigid_in_millimetres_up_to_one_scale(scales):
    spacing_mm = np.array([1.0, 1.5, 4.0])
    angles, found = [], []
    for seed in range(200):
        matrix = random_pose(spacing_mm, np.random.default_rng(seed), scales).matrix
        in_mm = np.diag(spacing_mm) @ matrix @ np.diag(1 / spacing_mm)
        found.append(np.cbrt(np.linalg.det(in_mm)))
        np.testing.assert_allclose(in_mm @ in_mm.T, found[-1] ** 2 * np.eye(3), atol=1e-9)
        angles.append(np.degrees(np.arccos(np.clip((np.trace(in_mm / found[-1]) - 1) / 2, -1, 1))))
    if scales:
        assert 0.9 <= min(found) < 0.93
        assert 1.07 < max(found) <= 1.1
    else:
        np.testing.assert_allclose(found, 1)
    assert 4 < np.mean(angles) < max(angles) < 8 * np.sqrt(3) + 0.5


@pytest.mark.parametrize("codes", ["RAS", "LPS", "ASR", "IPL", "SRA"])
def test_every_orientation_puts_a_voxel_where_its_millimetres_say(make_volume, codes):
    """One bright voxel, found again through the file's affine alone."""
    place = np.array([9, 2, 5])
    voxels = np.zeros((1, 12, 10, 8), np.float32)
    voxels[0, *place] = 1.0
    file = nib.Nifti1Image(voxels[0], AFFINE).as_reoriented(nib.orientations.axcodes2ornt(codes))
    path = make_volume(f"{codes}.nii.gz", np.asarray(file.dataobj)[None], file.affine)
    loaded = load_volume(path, build_settings(intensity=WIDE))
    brightest = np.unravel_index(int(loaded.image.argmax()), (12, 10, 8))
    assert list(brightest) == place.tolist()
    np.testing.assert_allclose(loaded.geometry.grid_affine @ [*brightest, 1], AFFINE @ [*place, 1], atol=1e-6)


def test_a_new_pose_moves_a_volume_a_little_and_keeps_its_detail():
    noise = torch.from_numpy(ndimage.gaussian_filter(np.random.default_rng(0).normal(size=(24, 20, 28)), 0.7))[None]
    image = (noise / noise.abs().max()).float()
    image[:, 11:13, 9:11, 13:15] = 1.0
    spacing = np.array([1.0, 1.0, 2.5])
    poses = [in_pose(image, random_pose(spacing, np.random.default_rng(n))) for n in range(8)]
    assert torch.equal(poses[0], in_pose(image, random_pose(spacing, np.random.default_rng(0))))
    for pose in poses:
        assert pose.shape == image.shape
        assert pose.abs().max() <= 1
        # Linear interpolation would keep 0.6 of the gradients here.
        assert float(pose.diff(dim=1).std() / image.diff(dim=1).std()) > 0.8
        place = np.array(np.unravel_index(int(pose.argmax()), image.shape)[1:])
        assert np.abs(place - (np.array([24, 20, 28]) - 1) / 2).max() < 3
    assert len({float(pose.sum()) for pose in poses}) == 8


RULES: list[list[Any]] = [["window", 0, 80], ["percentile", 5, 95], ["window", -30, 30]]


def by_channel(rules: list[list[Any]]) -> dict[str, list[Any]]:
    return dict(zip(("mode", "lower", "upper"), map(list, zip(*rules, strict=True)), strict=True))


def test_each_channel_is_scaled_by_its_rule(tmp_path):
    voxels = random_voxels(0, (3, 12, 10, 8)) * np.array([0.5, 1, 0.1], np.float32)[:, None, None, None]
    write_nifti(tmp_path / "a.nii.gz", voxels, np.eye(4))
    found = load_volume(tmp_path / "a.nii.gz", build_settings(intensity=by_channel(RULES)), 3).image.numpy()
    for mine, values, (mode, lower, upper) in zip(found, voxels, RULES, strict=True):
        ends = np.percentile(values, [lower, upper]) if mode == "percentile" else (lower, upper)
        expected = 2 * (np.clip(values, *ends) - ends[0]) / (ends[1] - ends[0]) - 1
        np.testing.assert_allclose(mine, expected, atol=1e-5)


KINDS = {
    "float": lambda rng, n: rng.normal(0, 100, n).astype(np.float32),
    "wide float": lambda rng, n: (rng.normal(0, 1, n) ** 5).astype(np.float64),
    "half empty": lambda rng, n: np.where(rng.random(n) < 0.5, 0, rng.normal(0, 1e-3, n)).astype(np.float32),
    "labels": lambda rng, n: rng.integers(0, 3, n).astype(np.float32),
    "int16": lambda rng, n: rng.integers(-3000, 3000, n).astype(np.int16),
    "uint8": lambda rng, n: rng.integers(0, 255, n).astype(np.uint8),
    "big-endian": lambda rng, n: rng.integers(0, 60000, n).astype(">u2"),
    "int32": lambda rng, n: rng.integers(-(10**8), 10**8, n).astype(np.int32),
    "bool": lambda rng, n: rng.random(n) < 0.3,
}


@pytest.mark.parametrize("scale", [(1.0, 0.0), (-2.1, 3.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_percentiles_and_shares_are_those_of_all_voxels(kind, scale):
    for number in (1, 2, 2500):
        stored = Stored(KINDS[kind](np.random.default_rng(0), number).reshape(1, number, 1, 1), *scale)
        values = stored.values(stored.array)
        ranking = Ranking(stored)
        assert ranking.percentiles((0, 0.5, 37.3, 100)) == np.percentile(values, (0, 0.5, 37.3, 100)).tolist()
        assert ranking.is_whole == bool((values == values.round()).all())
        assert (ranking.count, ranking.num_not_finite) == (number, 0)
        for value in (*np.percentile(values, (0, 50, 97, 100)).tolist(), float(values.min()) - 1):
            assert ranking.share_up_to(value) == (values <= np.float32(value)).mean()


def test_numbers_that_are_not_finite_are_counted_and_left_out():
    values = np.array([1, np.nan, np.inf, -np.inf, 2, -5], np.float32).reshape(1, 6, 1, 1)
    ranking = Ranking(Stored(values))
    assert (ranking.count, ranking.num_not_finite) == (3, 3)
    assert ranking.values.tolist() == [-5, 1, 2]
    overflowing = Ranking(Stored(np.array([0, 1, 2], np.int16).reshape(1, 3, 1, 1), slope=3e38))
    assert (overflowing.count, overflowing.num_not_finite) == (2, 1)
    assert Ranking(Stored(np.full((1, 2, 2, 2), np.nan, np.float32))).count == 0
    interleaved = Stored(np.arange(24, dtype=np.uint8).reshape((2, 3, 2, 2), order="F"))
    assert [Ranking(interleaved.channel(c)).values[0] for c in range(2)] == [0, 1]


@pytest.mark.parametrize("kind", ["int16", "float"])
def test_reading_a_volume_needs_at_most_three_times_its_size(tmp_path, kind):
    shape = (128, 128, 96)
    path = tmp_path / "v.nii.gz"
    write_nifti(path, KINDS[kind](np.random.default_rng(0), np.prod(shape)).reshape(1, *shape), np.eye(4))
    settings = build_settings(voxel_size=[64, 64, 32])
    measure(path, settings)
    tracemalloc.start()
    try:
        stored, facts = measure(path, settings)
        on_grid(stored, facts, settings)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < COPIES_WHILE_READING * 4 * np.prod(shape)
