"""Reads numpy arrays, alone (.npy) or in an archive (.npz)."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from data.files.header import Header, Stored, UnsuitableError, library, numeric, shaped, spatial

# Four axes of which the first is at least this long and the last is at most that long have their channels last.
LEAST_OF_AXIS, MOST_CHANNELS_LAST = 16, 8


def read_npy_header(path: Path) -> Header:
    """Read the header of a .npy file."""
    with library("npy"):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise UnsuitableError("it holds several arrays; one is allowed; name it .npz")
    return _numpy_header(array.shape, array.dtype)


def _numpy_header(axes: tuple[int, ...], dtype: np.dtype) -> Header:
    if len(axes) == 4 and axes[0] >= LEAST_OF_AXIS and axes[3] <= MOST_CHANNELS_LAST:
        raise UnsuitableError(
            "its last of four axes is short as if it held channels; .npy and .npz hold channels first (channels, x, y, "
            "z); save np.moveaxis(array, -1, 0), or a NIfTI file, which holds them last"
        )
    shape, num_channels = spatial(axes, channel_axis=0)
    return Header(shape, num_channels, np.eye(4), numeric(dtype), False, axes)


def read_npy_voxels(path: Path, header: Header) -> Stored:
    """Read the voxels of a .npy file."""
    with library("npy"):
        array = np.load(path, allow_pickle=False)
    return Stored(shaped(array, header.num_channels, *header.shape))


def _npz_member(names: list[str]) -> str:
    arrays = [name for name in names if name.endswith(".npy") and name != "affine.npy"]
    if "image.npy" in arrays:
        return "image.npy"
    if len(arrays) != 1:
        raise UnsuitableError(f"{len(arrays)} arrays; one, or one named image, is allowed; write it again")
    return arrays[0]


def read_npz_header(path: Path) -> Header:
    """Read the header of the volume in an .npz archive, and its affine if there is one."""
    with library("npz"), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        with archive.open(_npz_member(names)) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            axes, _, dtype = read(file)
        has_affine = "affine.npy" in names and archive.getinfo("affine.npy").file_size < 4096
    header = _numpy_header(axes, dtype)
    if not has_affine:
        return header
    # numpy returns an entry that is not an array as bytes.
    with library("npz"), np.load(path, allow_pickle=False) as arrays:
        affine = np.asarray(arrays["affine"])
    if affine.shape != (4, 4) or affine.dtype.kind not in "biuf":
        raise UnsuitableError(
            f"its array affine is of shape {affine.shape} and type {affine.dtype}; 4 x 4 numbers are allowed; "
            "write it again"
        )
    return Header(header.shape, header.num_channels, affine.astype(np.float64), header.dtype, True, header.axes)


def read_npz_voxels(path: Path, header: Header) -> Stored:
    """Read the voxels of an .npz archive."""
    with library("npz"), np.load(path, allow_pickle=False) as arrays:
        name = _npz_member([f"{name}.npy" for name in arrays.files]).removesuffix(".npy")
        array = np.asarray(arrays[name])
    return Stored(shaped(array, header.num_channels, *header.shape))
