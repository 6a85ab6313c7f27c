"""Every format gives the same voxels and geometry; every damaged file a DataError in its name, and our bugs do not."""

from __future__ import annotations

import gzip
import io
import os
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK

from data import formats
from data.checking import measure, on_grid, unusable
from data.formats import read_header, suffix_of, write_nifti
from settings import DataError
from tests.data.small_volumes import AFFINE, build_settings, random_voxels, read_volume

FORMATS = (".nii", ".nii.gz", ".npy", ".npz", ".mha", ".nrrd")
PIECES = (*b"'(){}[]:,=\n\0O-", b"nan", b"99999999999999999999", b"<c16", b"|O", b"\xff\xff\xff\x7f", b"NDims = 3\n")
every_format = pytest.mark.parametrize("suffix", FORMATS)


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
@every_format
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


@pytest.mark.parametrize(("code", "mm"), [(0, 1.0), (1, 1000.0), (2, 1.0), (3, 0.001), (10, 1.0), (11, 0.001)])
def test_nifti_is_scaled_by_its_slope_and_units_are_converted_to_millimetres(tmp_path, code, mm):
    image = nib.Nifti1Image(np.arange(960, dtype=np.int16).reshape(12, 10, 8), np.diag([2.0, 3.0, 4.0, 1.0]))
    image.header.set_slope_inter(0.5, -100)
    image.header["xyzt_units"] = code
    nib.save(image, tmp_path / "v.nii.gz")
    voxels, header = read_volume(tmp_path / "v.nii.gz")
    np.testing.assert_allclose(voxels[0], nib.load(tmp_path / "v.nii.gz").get_fdata(), atol=1e-3)
    np.testing.assert_allclose(header.spacing_mm, [2 * mm, 3 * mm, 4 * mm])


def test_channels_may_lie_on_a_fifth_axis_of_nifti_and_on_the_fourth_of_nrrd(tmp_path):
    nib.save(nib.Nifti1Image(np.zeros((12, 10, 8, 1, 3), np.float32), AFFINE), tmp_path / "v.nii")
    assert read_header(tmp_path / "v.nii").num_channels == 3
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


@pytest.mark.timeout(120)
@every_format
def test_what_is_missing_foreign_or_no_regular_file_is_named_without_waiting_for_it(tmp_path, suffix):
    path = tmp_path / f"v{suffix}"
    for make, text in (
        (lambda path: None, "no such file; restore it"),
        (lambda path: path.symlink_to(path.name), "no such file; restore it"),
        (
            lambda path: path.write_text("these are my notes, not a volume\n" * 30),
            "(cannot be read as .*again|its header)",
        ),
        (os.mkfifo, r"cannot be read as .* \(not a regular file\)"),
        (lambda path: path.symlink_to("/dev/zero"), r"cannot be read as .* \(not a regular file\)"),
        (os.mkdir, r"cannot be read as .* \(a folder, not a file\)"),
    ):
        path.unlink(missing_ok=True)
        make(path)
        with pytest.raises(DataError, match=rf"v{suffix}: {text}"):
            read_volume(path)
    (tmp_path / "v.stl").write_bytes(b"x")
    with pytest.raises(DataError, match=r"unknown file type; .nii .nii.gz"):
        read_volume(tmp_path / "v.stl")


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_header_that_promises_more_than_the_file_or_the_memory_can_hold_is_refused(tmp_path, suffix, monkeypatch):
    content = bytearray(nib.Nifti1Image(np.zeros((4, 4, 4), np.float32), np.eye(4)).to_bytes())
    content[40:56] = struct.pack("<8h", 3, 32767, 32767, 32767, 1, 1, 1, 1)
    (tmp_path / f"bomb{suffix}").write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(DataError, match=r"truncated or damaged: its header promises .* bytes of voxels in a file of"):
        read_volume(tmp_path / f"bomb{suffix}")
    path = write(tmp_path / f"v{suffix}", random_voxels(0))
    monkeypatch.setattr(formats, "available_host_bytes", lambda: 1000)
    with pytest.raises(DataError, match=r"12 x 10 x 8 voxels need 0\.0 GiB to be read; 0\.0 GiB of memory is free"):
        read_volume(path)


@pytest.mark.parametrize(
    ("voxels", "text"),
    [
        (np.zeros((12, 10), np.float32), r"12 x 10 voxels; a volume has three axes"),
        (np.zeros((12, 10, 1), np.float32), r"12 x 10 x 1 voxels; .* stack the slices of 2D images"),
        (np.zeros((12, 0, 8), np.float32), r"12 x 0 x 8 voxels"),
        (np.zeros((2, 2, 2, 2, 2), np.float32), r"2 x 2 x 2 x 2 x 2 voxels"),
        (np.zeros((4, 4, 4), np.complex64), "voxels of type complex64; integers or real numbers are allowed; convert"),
        (np.array([{}]), r"cannot be read as \.npy \(.*Python objects"),
    ],
)
def test_arrays_that_are_not_volumes_are_refused(tmp_path, voxels, text):
    np.save(tmp_path / "v.npy", voxels, allow_pickle=True)
    with pytest.raises(DataError, match=text):
        read_volume(tmp_path / "v.npy")


SIZE = r"cannot be read as \.mha \(its CompressedDataSize is not that of its voxels"
AXES, ELSEWHERE = "its header has no NDims from 1 to 4", "its header .* puts the voxels into another file"


@pytest.mark.parametrize(
    ("suffix", "old", "new", "text"),
    [
        *((".mha", b"NDims = 3", new, AXES) for new in (b"NDims = 300", b"NDims = -3", b"NDims : 3\nNDims : 300", b"")),
        *((".mha", b"LOCAL", place, ELSEWHERE) for place in (b"/etc/passwd", b"LIST\n/etc/passwd")),
        (".mha", b"ElementDataFile", b"ElementDataFile : a.raw\nElementDataFile", ELSEWHERE),
        (".mha", b"ElementDataFile", b"HeaderSize = 100\nElementDataFile", ELSEWHERE),
        *((".mha", b"DataSize = ", new, SIZE) for new in (b"Size = ", b"DataSize = 1")),
        (".nrrd", b"encoding:", b"data file: /etc/passwd\nencoding:", ELSEWHERE),
    ],
)
def test_headers_that_itk_would_misread_are_refused(tmp_path, suffix, old, new, text):
    path = write(tmp_path / f"v{suffix}", random_voxels(0))
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(DataError, match=rf"v{suffix}: {text}"):
        read_volume(path)


@pytest.mark.parametrize("suffix", [".mha", ".nrrd"])
def test_itk_images_that_are_not_volumes_are_refused(tmp_path, suffix):
    kinds = [(np.uint8, "3 x 3 voxels; a volume has three axes"), (np.complex64, "voxels of type complex of 32-bit")]
    for dtype, text in kinds if suffix == ".nrrd" else kinds[:1]:
        image = SimpleITK.GetImageFromArray(np.ones((3, 3, 3), dtype), isVector=dtype == np.uint8)
        SimpleITK.WriteImage(image, str(tmp_path / f"v{suffix}"))
        with pytest.raises(DataError, match=text):
            read_volume(tmp_path / f"v{suffix}")


@pytest.mark.parametrize("suffix", [".mha", ".nrrd"])
@pytest.mark.parametrize("is_short", [False, True])
def test_damaged_compressed_voxels_are_refused(tmp_path, suffix, is_short):
    path = tmp_path / f"v{suffix}"
    voxels = np.random.default_rng(0).integers(0, 100, (8, 9, 10)).astype(np.int16)
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(voxels), str(path), True)
    np.testing.assert_array_equal(read_volume(path)[0][0], voxels.T)
    content = bytearray(path.read_bytes())
    content[-30] ^= 0xFF
    path.write_bytes(content[:-1] if is_short else content)
    with pytest.raises(DataError, match=r"cannot be read as .* \((Error -3|\d+ bytes of compressed voxels)"):
        read_volume(path)


@pytest.mark.parametrize(
    ("affine", "text"),
    [
        (np.diag([1.0, 1.0, 0.0, 1.0]), "the axes of its affine are nan degrees"),
        (np.full((4, 4), np.inf), "the axes of its affine are nan degrees"),
        (np.array([[1, 0.3, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]), "are 17 degrees from being perpendic"),
        (np.eye(3), r"its array affine is of shape \(3, 3\) and type float64; 4 x 4 numbers"),
        (np.full((4, 4), "x"), "its array affine is of shape"),
        (np.array([[1, 0.01, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]), None),
    ],
)
def test_an_affine_that_spans_no_straight_grid_is_refused_beyond_what_is_rounded(tmp_path, affine, text):
    np.savez(tmp_path / "v.npz", image=np.zeros((4, 4, 4)), affine=affine)
    if text is None:
        assert read_header(tmp_path / "v.npz").shape == (4, 4, 4)
        return
    with pytest.raises(DataError, match=text):
        read_header(tmp_path / "v.npz")


def test_an_npz_with_several_arrays_needs_one_named_image_and_an_affine_that_is_an_array(tmp_path):
    np.savez(tmp_path / "v.npz", a=np.zeros((4, 4, 4)), b=np.zeros((4, 4, 4)))
    with pytest.raises(DataError, match="2 arrays; one, or one named image, is allowed"):
        read_volume(tmp_path / "v.npz")
    stream = io.BytesIO()
    np.save(stream, random_voxels(0)[0])
    with zipfile.ZipFile(tmp_path / "v.npz", "w") as archive:
        archive.writestr("image.npy", stream.getvalue())
        archive.writestr("affine.npy", b"no array")
    with pytest.raises(DataError, match=r"v\.npz: its array affine is of shape"):
        read_volume(tmp_path / "v.npz")


@pytest.mark.timeout(60)
@every_format
def test_file_cut_at_any_place_is_refused(tmp_path, suffix):
    path = write(tmp_path / f"v{suffix}", random_voxels(0))
    content = path.read_bytes()
    for end in {*range(0, min(420, len(content)), 7), *range(0, len(content), len(content) // 40)}:
        path.write_bytes(content[:end])
        with pytest.raises(DataError, match=f"v{suffix}: "):
            read_volume(path)


@pytest.mark.timeout(60)
@every_format
def test_file_with_foreign_pieces_is_read_or_refused(tmp_path, suffix):
    path = write(tmp_path / f"v{suffix}", random_voxels(0))
    content = path.read_bytes()
    rng, s = random.Random(suffix), build_settings()
    for _ in range(80):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 2, 5))):
            place, piece = rng.randrange(min(len(damaged), 400)), rng.choice((*PIECES, rng.randrange(256)))
            piece = bytes([piece]) if isinstance(piece, int) else piece
            damaged[place : place + rng.choice((0, len(piece)))] = piece
        path.write_bytes(damaged)
        message = path.name
        try:
            stored, facts = measure(path, s)
            if unusable(facts, s) is None:
                on_grid(stored, facts, s)
        except DataError as error:
            message = str(error)
        assert path.name in message


@every_format
@pytest.mark.parametrize("mistake", [AttributeError, ValueError])
def test_our_own_bugs_are_not_reported_as_damaged_files(tmp_path, suffix, mistake, monkeypatch):
    path = write(tmp_path / f"v{suffix}", random_voxels(0))

    def wrong(*_: Any, **__: Any) -> None:
        raise mistake("a mistake")

    monkeypatch.setattr(formats, "header_of", wrong)
    with pytest.raises(mistake, match="a mistake"):
        read_header(path)


@every_format
def test_names_that_are_not_utf_8_are_read_or_refused(tmp_path, suffix):
    path = tmp_path / os.fsdecode(b"v\xff" + suffix.encode())
    write(tmp_path / f"v{suffix}", random_voxels(0)).rename(path)
    if suffix in (".mha", ".nrrd"):
        with pytest.raises(DataError, match=r"v\\udcff\.\w+: its path is not UTF-8, .* rename it"):
            read_volume(path)
    else:
        assert read_volume(path)[0].shape == (1, 12, 10, 8)
