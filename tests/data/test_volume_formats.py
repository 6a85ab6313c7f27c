"""Every format gives the same voxels and geometry; every damaged file a DataError in its name."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK

from data.formats import read_header, suffix_of, write_nifti
from settings import DataError
from tests.data.small_volumes import AFFINE, random_voxels, read_volume

FORMATS = (".nii", ".nii.gz", ".npy", ".npz", ".mha", ".nrrd")


def write(path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE) -> Path:
    """Write a channel-first volume in the format of the path's suffix."""
    suffix = suffix_of(path.name)
    if suffix in (".nii", ".nii.gz"):
        write_nifti(path, voxels, affine)
    elif suffix == ".npy":
        np.save(path, voxels if len(voxels) > 1 else voxels[0])
    elif suffix == ".npz":
        np.savez_compressed(path, image=voxels if len(voxels) > 1 else voxels[0], affine=affine)
    else:
        last = np.ascontiguousarray(voxels.transpose(3, 2, 1, 0))
        image = SimpleITK.GetImageFromArray(last if len(voxels) > 1 else last[..., 0], isVector=len(voxels) > 1)
        spacing = np.linalg.norm(affine[:3, :3], axis=0)
        to_lps = np.diag([-1.0, -1.0, 1.0])
        image.SetSpacing(spacing.tolist())
        image.SetOrigin((to_lps @ affine[:3, 3]).tolist())
        image.SetDirection((to_lps @ affine[:3, :3] / spacing).ravel().tolist())
        SimpleITK.WriteImage(image, str(path), useCompression=True)
    return path


@pytest.mark.parametrize("num_channels", [1, 2])
@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_voxels_and_affine(tmp_path, suffix, num_channels):
    voxels = random_voxels(0, (num_channels, 12, 10, 8))
    read, header = read_volume(write(tmp_path / f"v{suffix}", voxels))
    np.testing.assert_allclose(read, voxels, rtol=1e-6)
    assert read.dtype == np.float32
    assert (header.shape, header.num_channels) == ((12, 10, 8), num_channels)
    assert header.has_spacing == (suffix != ".npy")
    if header.has_spacing:
        np.testing.assert_allclose(header.affine, AFFINE, atol=1e-5)
        np.testing.assert_allclose(header.spacing_mm, (2.0, 2.5, 3.0), rtol=1e-6)


def test_nifti_integers_are_scaled_by_slope_and_intercept(tmp_path):
    image = nib.Nifti1Image(np.arange(960, dtype=np.int16).reshape(12, 10, 8), AFFINE)
    image.header.set_slope_inter(0.5, -100)
    nib.save(image, tmp_path / "v.nii.gz")
    raw = np.asarray(nib.load(tmp_path / "v.nii.gz").dataobj)
    np.testing.assert_allclose(read_volume(tmp_path / "v.nii.gz")[0][0], raw, atol=1e-3)


@pytest.mark.parametrize(("code", "mm"), [(0, 1.0), (1, 1000.0), (2, 1.0), (3, 0.001), (10, 1.0), (11, 0.001)])
def test_nifti_units_are_converted_to_millimetres(tmp_path, code, mm):
    image = nib.Nifti1Image(np.zeros((4, 5, 6), np.int16), np.diag([2.0, 3.0, 4.0, 1.0]))
    image.header["xyzt_units"] = code
    nib.save(image, tmp_path / "v.nii")
    np.testing.assert_allclose(read_header(tmp_path / "v.nii").spacing_mm, [2 * mm, 3 * mm, 4 * mm])


def test_nifti_vectors_on_the_fifth_axis_are_channels(tmp_path):
    nib.save(nib.Nifti1Image(np.zeros((12, 10, 8, 1, 3), np.float32), AFFINE), tmp_path / "v.nii")
    assert read_header(tmp_path / "v.nii").num_channels == 3


def test_itk_four_dimensional_images_have_channels_last(tmp_path):
    parts = [SimpleITK.GetImageFromArray(random_voxels(i)[0].transpose(2, 1, 0)) for i in range(2)]
    SimpleITK.WriteImage(SimpleITK.JoinSeries(parts), str(tmp_path / "v.nrrd"))
    voxels, header = read_volume(tmp_path / "v.nrrd")
    assert header.num_channels == 2
    np.testing.assert_allclose(voxels, np.concatenate([random_voxels(0), random_voxels(1)]), rtol=1e-6)


def test_writing_the_same_volume_twice_gives_the_same_bytes(tmp_path):
    for name in "ab":
        write_nifti(tmp_path / f"{name}.nii.gz", random_voxels(0), AFFINE)
    assert (tmp_path / "a.nii.gz").read_bytes() == (tmp_path / "b.nii.gz").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.nii.gz", "b.nii.gz"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_missing_truncated_and_foreign_files_are_named(tmp_path, suffix):
    path = tmp_path / f"v{suffix}"
    with pytest.raises(DataError, match=rf"v{suffix}: no such file; restore it"):
        read_volume(path)
    content = write(path, random_voxels(0)).read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=rf"v{suffix}: (truncated|cannot be read).*(again)"):
        read_volume(path)
    path.write_text("these are my notes, not a volume\n" * 30)
    with pytest.raises(DataError, match=rf"v{suffix}: cannot be read as .*again"):
        read_volume(path)


def nifti_with_dims(dims: tuple[int, ...], num_voxel_bytes: int) -> bytes:
    image = nib.Nifti1Image(np.zeros((4, 4, 4), np.float32), np.eye(4))
    content = bytearray(image.to_bytes()[: 352 + num_voxel_bytes])
    content[40:56] = struct.pack("<8h", len(dims), *dims, *([1] * (7 - len(dims))))
    return bytes(content)


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_header_that_promises_more_than_the_file_can_hold_is_refused_before_reading(tmp_path, suffix):
    content = nifti_with_dims((32767, 32767, 32767), 256)
    path = tmp_path / f"bomb{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(DataError, match=r"truncated or damaged: its header promises .* bytes of voxels in a file of"):
        read_volume(path)


def test_a_volume_larger_than_the_free_memory_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "v.nii", random_voxels(0))
    monkeypatch.setattr("data.formats.psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000})())
    with pytest.raises(
        DataError, match=r"12 x 10 x 8 voxels need 0\.0 GiB to be read; 0\.0 GiB of memory is free; crop"
    ):
        read_volume(path)


@pytest.mark.parametrize(
    ("voxels", "text"),
    [
        (np.zeros((12, 10), np.float32), r"a 2D image \(12 x 10\); a volume has three axes"),
        (np.zeros((12, 10, 1), np.float32), r"a 2D image \(12 x 10 x 1\)"),
        (np.zeros((12, 0, 8), np.float32), r"an axis without voxels \(12 x 0 x 8\)"),
        (np.zeros((2, 2, 2, 2, 2), np.float32), r"5 axes \(2 x 2 x 2 x 2 x 2\); 3, or 4 with channels"),
        (np.zeros((4, 4, 4), np.complex64), "voxels of type complex64; integers or real numbers are allowed; convert"),
        (np.array([{}]), r"cannot be read as \.npy \(.*Python objects"),
    ],
)
def test_arrays_that_are_not_volumes_are_refused(tmp_path, voxels, text):
    np.save(tmp_path / "v.npy", voxels, allow_pickle=True)
    with pytest.raises(DataError, match=text):
        read_volume(tmp_path / "v.npy")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (b"NDims = 3", b"NDims = 300", "its header has no NDims from 1 to 4"),
        (b"NDims = 3", b"NDims = -3", "its header has no NDims from 1 to 4"),
        (b"NDims = 3", b"NDims = 3\nNDims = 300", "its header has no NDims from 1 to 4"),
        (b"ElementDataFile = LOCAL", b"ElementDataFile = /etc/passwd", "its voxels are in another file"),
        (b"ElementDataFile = LOCAL", b"ElementDataFile = LIST\n/etc/passwd", "its voxels are in another file"),
    ],
)
def test_metaimage_headers_are_vetted_before_itk_sees_them(tmp_path, old, new, text):
    path = write(tmp_path / "v.mha", random_voxels(0))
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(DataError, match=rf"v\.mha: cannot be read as \.mha \(({text})"):
        read_volume(path)


def test_a_nrrd_header_without_voxels_of_its_own_is_refused(tmp_path):
    content = write(tmp_path / "v.nrrd", random_voxels(0)).read_bytes()
    (tmp_path / "v.nrrd").write_bytes(content.replace(b"encoding:", b"data file: /etc/passwd\nencoding:", 1))
    with pytest.raises(DataError, match="its voxels are in another file"):
        read_volume(tmp_path / "v.nrrd")


def test_an_npz_with_several_arrays_needs_one_named_image(tmp_path):
    np.savez(tmp_path / "v.npz", a=np.zeros((4, 4, 4)), b=np.zeros((4, 4, 4)))
    with pytest.raises(DataError, match="2 arrays; one, or one named image, is allowed"):
        read_volume(tmp_path / "v.npz")
    np.savez(tmp_path / "v.npz", image=np.zeros((4, 4, 4)), affine=np.eye(3))
    with pytest.raises(DataError, match=r"its array affine is of shape \(3, 3\) and type float64; 4 x 4 numbers"):
        read_volume(tmp_path / "v.npz")


def test_an_affine_without_inverse_is_refused(tmp_path):
    np.savez(tmp_path / "v.npz", image=np.zeros((4, 4, 4)), affine=np.diag([1.0, 1.0, 0.0, 1.0]))
    with pytest.raises(DataError, match="its affine has no inverse"):
        read_volume(tmp_path / "v.npz")


@pytest.mark.parametrize(("share", "is_refused"), [(0.3, True), (0.01, False)])
def test_a_sheared_affine_is_refused_beyond_what_is_rounded(tmp_path, share, is_refused):
    sheared = AFFINE.copy()
    sheared[0, 1] = share * sheared[1, 1]
    write_nifti(tmp_path / "v.nii.gz", random_voxels(0), sheared)
    if is_refused:
        with pytest.raises(DataError, match=r"v\.nii\.gz: its axes are 17 degrees from being perpendicular"):
            read_header(tmp_path / "v.nii.gz")
    else:
        assert read_header(tmp_path / "v.nii.gz").shape == (12, 10, 8)


def test_a_name_without_volume_suffix_is_refused(tmp_path):
    (tmp_path / "v.stl").write_bytes(b"x")
    with pytest.raises(DataError, match=r"unknown file type; .nii .nii.gz"):
        read_volume(tmp_path / "v.stl")
