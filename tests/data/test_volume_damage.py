"""Damaged files of every format give a DataError in their name; a mistake in our own code gives a traceback."""

from __future__ import annotations

import io
import os
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import SimpleITK

from data.files import images
from data.formats import read_header
from settings import DataError
from tests.data.small_volumes import random_voxels, read_volume
from tests.data.test_volume_formats import FORMATS, write

FLOATS = (-1.0, float("nan"), float("inf"), 1e30, 1e-40)
INTEGERS = (0, -1, 5, 8, 2048, 32767)
PIECES = (*b"'(){}[]:,=\n\0O-", b"nan", b"99999999999999999999", b"<c16", b"|O", b"\xff\xff\xff\x7f", b"NDims = 3\n")


def read_or_refuse(path: Path) -> None:
    """Read a file, or meet a DataError that names it; anything else is an error of the test."""
    message = path.name
    try:
        read_volume(path)
    except DataError as error:
        message = str(error)
    assert path.name in message


@pytest.mark.timeout(60)
@pytest.mark.parametrize("suffix", FORMATS)
def test_file_cut_at_any_place_is_refused(tmp_path, suffix):
    path = write(tmp_path / f"v{suffix}", random_voxels(0))
    content = path.read_bytes()
    for end in {*range(0, min(420, len(content)), 7), *range(0, len(content), len(content) // 40)}:
        path.write_bytes(content[:end])
        with pytest.raises(DataError, match=f"v{suffix}: "):
            read_volume(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("suffix", FORMATS)
def test_file_with_foreign_pieces_is_read_or_refused(tmp_path, suffix):
    content = write(tmp_path / f"v{suffix}", random_voxels(0)).read_bytes()
    rng = random.Random(suffix)
    for _ in range(120):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 2, 5))):
            place, piece = rng.randrange(min(len(damaged), 400)), rng.choice(PIECES)
            piece = bytes([piece]) if isinstance(piece, int) else piece
            damaged[place : place + rng.choice((0, len(piece)))] = piece
        (tmp_path / f"v{suffix}").write_bytes(damaged)
        read_or_refuse(tmp_path / f"v{suffix}")


def npy(header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(960)


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', [1]: False, 'shape': (4, 4, 4)}",
        b"{'descr': '<i4,<q,', 'fortran_order': False, 'shape': (4, 4, 4)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (4, 4, " + b"(" * 500,
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999, 4, 4)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-4, 4, 4)}",
        b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4, 4, 4)}",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (4, 4, 4)}",
        b"{'descr'",
    ],
)
def test_invalid_numpy_headers_are_refused(tmp_path, header):
    (tmp_path / "v.npy").write_bytes(npy(header))
    with zipfile.ZipFile(tmp_path / "v.npz", "w") as archive:
        archive.writestr("image.npy", npy(header))
    for name in ("v.npy", "v.npz"):
        with pytest.raises(DataError, match=rf"{name}: "):
            read_volume(tmp_path / name)


def packed(method: int, **members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return stream.getvalue()


@pytest.mark.parametrize(
    "affine", [b"no array", b"", npy(b"{'descr': '<U1', 'fortran_order': False, 'shape': (4, 4)}")]
)
def test_an_affine_that_is_not_a_matrix_of_numbers_is_refused(tmp_path, affine):
    stream = io.BytesIO()
    np.save(stream, random_voxels(0)[0])
    (tmp_path / "v.npz").write_bytes(packed(zipfile.ZIP_DEFLATED, image=stream.getvalue(), affine=affine))
    with pytest.raises(DataError, match=r"v\.npz: its array affine is of shape"):
        read_volume(tmp_path / "v.npz")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (os.mkfifo, "not a regular file; remove it"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file; remove it"),
        (lambda path: path.symlink_to(path.name), "no such file"),
        (os.mkdir, "a folder, not a file"),
    ],
)
def test_what_is_not_a_regular_file_is_refused_without_waiting_for_it(tmp_path, suffix, make, text):
    make(tmp_path / f"v{suffix}")
    with pytest.raises(DataError, match=rf"v{suffix}: {text}"):
        read_volume(tmp_path / f"v{suffix}")


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("mistake", [AttributeError, TypeError, ValueError, RuntimeError, KeyError])
def test_our_own_bugs_are_not_reported_as_damaged_files(tmp_path, suffix, mistake, monkeypatch):
    path = write(tmp_path / f"v{suffix}", random_voxels(0))

    def wrong(*_: Any, **__: Any) -> None:
        raise mistake("a mistake")

    monkeypatch.setattr(images, "spatial", wrong)
    with pytest.raises(mistake, match="a mistake"):
        read_header(path)


@pytest.mark.parametrize("suffix", FORMATS)
def test_names_that_are_not_utf_8_are_read_or_refused(tmp_path, suffix):
    path = tmp_path / os.fsdecode(b"v\xff" + suffix.encode())
    write(tmp_path / f"v{suffix}", random_voxels(0)).rename(path)
    if suffix in (".mha", ".nrrd"):
        with pytest.raises(DataError, match=r"v\\udcff\.\w+: its path is not UTF-8, .* rename it"):
            read_volume(path)
    else:
        assert read_volume(path)[0].shape == (1, 12, 10, 8)


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
    with pytest.raises(DataError, match="its compressed voxels"):
        read_volume(path)
