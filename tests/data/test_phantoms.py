"""Phantoms are real files, varied, seeded, and their classes look different."""

from __future__ import annotations

import nibabel as nib
import numpy as np
import pytest

from data.phantoms import CLASS_NAMES, generator_of, phantom, phantom_files, pose
from settings import DataError

GRID = (32, 32, 32)


def test_phantoms_are_nifti_files_with_a_centred_affine(tmp_path):
    paths = phantom_files(tmp_path, 3, (24, 20, 16), num_channels=1, seed=0)
    assert [path.parent.name for path in paths] == list(CLASS_NAMES)
    image = nib.load(paths[0])
    assert image.shape == (24, 20, 16)
    assert nib.aff2axcodes(image.affine) == ("R", "A", "S")
    np.testing.assert_allclose(image.affine @ [11.5, 9.5, 7.5, 1], [0, 0, 0, 1], atol=1e-4)
    np.testing.assert_allclose(np.array(image.shape) * image.header.get_zooms(), (200, 240, 200), rtol=1e-5)


def test_phantoms_are_generated_once_and_further_ones_added(tmp_path):
    paths = phantom_files(tmp_path, 3, GRID, 1, seed=0)
    times = [path.stat().st_mtime_ns for path in paths]
    more = phantom_files(tmp_path, 5, GRID, 1, seed=0)
    assert more[:3] == paths
    assert [path.stat().st_mtime_ns for path in paths] == times
    assert [path.name for path in tmp_path.rglob(".*")] == [".lock"]
    content = paths[1].read_bytes()
    paths[1].unlink()
    phantom_files(tmp_path, 3, GRID, 1, seed=0)
    assert paths[1].read_bytes() == content


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "runs").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"phantoms cannot be written to .*runs.* a writable folder"):
        phantom_files(tmp_path / "runs", 3, GRID, 1, seed=0)


def test_phantoms_differ_by_number_and_seed_and_by_nothing_else():
    first = phantom(0, GRID, 1, seed=0)
    assert np.array_equal(first, phantom(0, GRID, 1, seed=0))
    for other in (phantom(3, GRID, 1, seed=0), phantom(0, GRID, 1, seed=1)):
        assert np.abs(first - other).mean() > 20
    assert first.min() >= 0
    assert first.max() <= 1000


def brain_of(index: int) -> np.ndarray:
    """The voxels inside the skull, which is bright in all phantoms."""
    head, tilt, centre = pose(generator_of(index, seed=5))
    places = np.stack(np.meshgrid(*[(np.arange(n) + 0.5) / n * 2 - 1 for n in GRID], indexing="ij"), axis=-1)
    inside = np.linalg.norm((places - centre) @ tilt / head, axis=-1) < 0.72
    return phantom(index, GRID, 1, seed=5)[0][inside]


def test_classes_show_in_the_anatomy():
    dark, bright = [], []
    for kind in range(3):
        brains = [brain_of(kind + 3 * i) for i in range(6)]
        dark.append(np.mean([(brain < 250).mean() for brain in brains]))
        bright.append(np.mean([(brain > 680).mean() for brain in brains]))
    healthy, lesion, ventricles = range(3)
    assert dark[ventricles] > 2 * max(dark[healthy], dark[lesion])
    assert bright[lesion] > 2 * max(bright[healthy], bright[ventricles])


def test_channels_show_the_same_anatomy_with_another_contrast():
    first, second = phantom(0, GRID, 2, seed=0)
    assert np.corrcoef(first.ravel(), second.ravel())[0, 1] > 0.9
    assert np.abs(first - second).mean() > 20
