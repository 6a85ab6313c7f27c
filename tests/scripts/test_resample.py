"""scripts/resample.py: what belongs to a volume comes to its grid, wherever the two lie in the scanner."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from data.formats import write_nifti
from tests.finished_run import run_here

COMMAND = ["scripts/resample.py", "--volumes", "ct", "--partners", "other", "--out", "out", "--kind"]
# Turned and oblique, so that no axis of one is an axis of the other.
TURN = np.array([[0.0, -0.8, 0.6], [1.0, 0.0, 0.0], [0.0, 0.6, 0.8]])


def affine(spacing_mm: tuple[float, ...], origin: tuple[float, ...], turn: np.ndarray) -> np.ndarray:
    result = np.eye(4)
    result[:3, :3], result[:3, 3] = turn * spacing_mm, origin
    return result


VOLUME = affine((2.0, 1.5, 3.0), (-20.0, 5.0, 9.0), np.diag([-1.0, 1.0, 1.0]))
PARTNER = affine((0.7, 1.0, 0.9), (-49.0, -2.0, -16.0), TURN)


def places(shape: tuple[int, ...], of: np.ndarray) -> np.ndarray:
    """Return the position of every voxel in millimetres, (3, X, Y, Z)."""
    return np.tensordot(of[:3, :3], np.indices(shape), 1) + of[:3, 3].reshape(3, 1, 1, 1)


def brightness(at: np.ndarray) -> np.ndarray:
    return (3 * at[0] - at[1] + 2 * at[2] + 500)[None].astype(np.float32)


@pytest.fixture
def folders(tmp_path, monkeypatch) -> Path:
    """Two volumes of 10 x 12 x 8 voxels in folders of their own, and their partners on a finer grid across them."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.nii.gz", "sub/b.nii.gz"):
        write_nifti(Path("ct") / name, np.random.default_rng(0).random((1, 10, 12, 8), np.float32), VOLUME)
    return tmp_path


def test_an_image_keeps_its_value_at_each_place_whatever_its_grid(folders, capsys):
    image = brightness(places((60, 70, 60), PARTNER))
    for name in ("a", "sub/b"):
        write_nifti(Path("other") / f"{name}.nii", image, PARTNER)
    assert run_here(*COMMAND, "image") == 0
    covered = []
    for name in ("a", "sub/b"):
        found = nib.load(f"out/{name}.nii.gz")
        np.testing.assert_allclose(found.affine, VOLUME, atol=1e-5)
        wanted = brightness(places((10, 12, 8), VOLUME))[0]
        voxels = np.asarray(found.dataobj)
        # Blurring for the coarser grid leaves a linear image as it is, except beside its border.
        at = np.tensordot(np.linalg.inv(PARTNER)[:3, :3], places((10, 12, 8), VOLUME), 1)
        at += np.linalg.inv(PARTNER)[:3, 3].reshape(3, 1, 1, 1)
        last = np.reshape([59, 69, 59], (3, 1, 1, 1))
        inner = ((at > 8) & (at < last - 8)).all(axis=0)
        assert inner.sum() > 100
        np.testing.assert_allclose(voxels[inner], wanted[inner], atol=0.05)
        outside = ((at < -0.51) | (at > last + 0.51)).any(axis=0)
        assert (voxels[outside] == image.min()).all()
        covered.append(1 - outside.mean())
    assert f"a.nii.gz: other/a.nii covers {100 * covered[0]:.0f} % of the volume" in capsys.readouterr().err


def test_labels_stay_whole_and_come_from_the_nearest_voxel(folders):
    labels = (brightness(places((60, 70, 60), PARTNER)) // 20).astype(np.int16)
    for name in ("a_seg", "sub/b_seg"):
        write_nifti(Path("other") / f"{name}.nii.gz", labels, PARTNER)
    assert run_here(*COMMAND, "labels") == 0
    at = np.linalg.inv(PARTNER) @ np.concatenate([places((10, 12, 8), VOLUME), np.ones((1, 10, 12, 8))]).reshape(4, -1)
    nearest = np.rint(at[:3]).astype(int)
    inside = ((nearest >= 0) & (nearest < np.array([[60], [70], [60]]))).all(axis=0)
    assert 0.2 < inside.mean() < 1
    wanted = np.where(inside, labels[(0, *nearest.clip(0, [[59], [69], [59]]))], 0).reshape(10, 12, 8)
    for name in ("a", "sub/b"):
        found = nib.load(f"out/{name}.nii.gz")
        assert found.get_data_dtype() == np.int32
        np.testing.assert_array_equal(np.asarray(found.dataobj), wanted)


def test_a_partner_on_the_same_grid_is_unchanged_and_a_single_pair_may_be_given(folders):
    image = np.random.default_rng(1).normal(size=(2, 10, 12, 8)).astype(np.float32)
    write_nifti(Path("mr.nii.gz"), image, VOLUME)
    single = ["scripts/resample.py", "--volumes", "ct/a.nii.gz", "--partners", "mr.nii.gz", "--kind", "image"]
    assert run_here(*single, "--out", "out") == 0
    np.testing.assert_allclose(np.moveaxis(nib.load("out/a.nii.gz").get_fdata(), -1, 0), image, atol=1e-6)
    assert run_here(*single, "--out", "ct") == 2


def test_outside_its_partner_each_channel_of_an_image_has_its_own_lowest_value(folders):
    image = np.stack([np.linspace(low, 9000, 5 * 12 * 8).reshape(5, 12, 8) for low in (-1000, 7)])
    write_nifti(Path("petct.nii.gz"), image.astype(np.float32), VOLUME)
    given = ["--volumes", "ct/a.nii.gz", "--partners", "petct.nii.gz", "--kind", "image", "--out", "out"]
    assert run_here("scripts/resample.py", *given) == 0
    outside = nib.load("out/a.nii.gz").get_fdata()[5:]
    assert [np.unique(outside[..., channel]).tolist() for channel in range(2)] == [[-1000], [7]]


def test_finer_voxels_are_averaged_instead_of_skipped(folders):
    stripes = np.where(np.arange(30) % 2, 100, 0).astype(np.float32)
    third = VOLUME @ np.diag([1 / 3, 1, 1, 1])
    write_nifti(Path("mr.nii.gz"), np.broadcast_to(stripes[None, :, None, None], (1, 30, 12, 8)), third)
    given = ["--volumes", "ct/a.nii.gz", "--partners", "mr.nii.gz", "--kind", "image", "--out", "out"]
    assert run_here("scripts/resample.py", *given) == 0
    np.testing.assert_allclose(nib.load("out/a.nii.gz").get_fdata()[1:-1], 50, atol=5)


def test_what_cannot_be_resampled_is_named(folders, capsys):
    write_nifti(Path("other/a.nii.gz"), np.full((1, 8, 8, 8), 0.5, np.float32), VOLUME)
    assert run_here(*COMMAND, "labels") == 2
    assert "sub/b.nii.gz: no partner in --partners: other" in capsys.readouterr().err
    write_nifti(Path("ct/a.nii"), np.zeros((1, 10, 12, 8), np.float32), VOLUME)
    Path("pairs.csv").write_text("file,partner\na.nii,other/a.nii.gz\na.nii.gz,ct/a.nii\nb.nii.gz,other/a.nii.gz\n")
    assert run_here(*COMMAND[:3], "--partners", "pairs.csv", "--kind", "image", "--out", "out") == 2
    assert "differ in the ending of their type alone" in capsys.readouterr().err
    cases = (
        ("half.nii.gz", "labels", "values that are not whole numbers; give --kind image"),
        ("large.nii.gz", "labels", "has labels that are not below 16,777,216; give them smaller numbers"),
        ("nan.nii.gz", "image", "values that are not finite"),
        ("array.npy", "image", "stores no spacing and orientation"),
        ("far.nii.gz", "image", "does not overlap with its volume"),
    )
    Path("other/a.nii.gz").rename("half.nii.gz")
    write_nifti(Path("nan.nii.gz"), np.full((1, 8, 8, 8), np.nan, np.float32), VOLUME)
    write_nifti(Path("large.nii.gz"), np.full((1, 8, 8, 8), 2**24 + 1, np.int32), VOLUME)
    np.save("array.npy", np.ones((10, 12, 8), np.float32))
    write_nifti(Path("far.nii.gz"), np.ones((1, 8, 8, 8), np.float32), affine((1, 1, 1), (900, 0, 0), np.eye(3)))
    for partner, kind, said in cases:
        given = ["--volumes", "ct/a.nii.gz", "--partners", partner, "--kind", kind, "--out", "out"]
        assert run_here("scripts/resample.py", *given) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("volumes", "partners", "out", "said"),
    [
        ("ct/a.nii.gz", "other", "out", "--partners: other is not one volume, as --volumes is"),
        ("ct/a.nii.gz", "pairs.csv", "out", "--partners: pairs.csv is not one volume, as --volumes is"),
        ("ct", "other", "ct/labels", "--out: ct/labels lies in --volumes, whose files are all volumes"),
    ],
)
def test_paths_that_do_not_belong_together_are_refused(folders, capsys, volumes, partners, out, said):
    for name in ("a", "sub/b"):
        write_nifti(Path("other") / f"{name}.nii.gz", np.ones((1, 10, 12, 8), np.uint8), VOLUME)
    Path("pairs.csv").write_text("file,partner\na.nii.gz,other/a.nii.gz\n")
    given = ["--volumes", volumes, "--partners", partners, "--kind", "labels", "--out", out]
    assert run_here("scripts/resample.py", *given) == 2
    assert said in capsys.readouterr().err
    assert not Path(out).exists()
