"""Reads each volume format with its library, and separates damaged files from errors in our own code."""

from __future__ import annotations

import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import nibabel.imageglobals
import numpy as np
import SimpleITK
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError
from nibabel.wrapstruct import WrapStructError

from data.itk_headers import HeaderError, check_metaimage, check_nrrd

# What the libraries raise for damaged files, found by damaging files of every format at random and field by field. Only
# calls into a library are guarded, so that a bug of ours is never reported as a damaged file.
_NUMPY = (OSError, EOFError, ValueError, TypeError, OverflowError, SyntaxError, MemoryError, tokenize.TokenError)
DAMAGE: dict[str, tuple[type[Exception], ...]] = {
    "nifti": (
        *(OSError, EOFError, ValueError, OverflowError, MemoryError, zlib.error),
        *(ImageFileError, HeaderDataError, WrapStructError),
    ),
    "npy": _NUMPY,
    # RuntimeError: a feature zipfile does not support, such as encryption. KeyError: an array missing from the archive.
    "npz": (*_NUMPY, RuntimeError, KeyError, zlib.error, lzma.LZMAError, struct.error, zipfile.BadZipFile),
    "itk": (OSError, RuntimeError, MemoryError, HeaderError),
}

# ITK uses LPS coordinates (left, posterior, superior), NIfTI uses RAS (right, anterior, superior).
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0])

# nibabel logs header repairs and ITK prints warnings about files whose problems we report ourselves.
nibabel.imageglobals.logger.setLevel("CRITICAL")
SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)


class DamagedError(Exception):
    """A file that its library could not read; `__cause__` is the library's error."""


class UnsuitableError(Exception):
    """A file that can be read but not used; the text says why and what to do."""


@contextmanager
def _library(name: str) -> Iterator[None]:
    try:
        yield
    except DAMAGE[name] as error:
        raise DamagedError from error


@dataclass(frozen=True)
class Header:
    """The shape, type and geometry of a volume, read without its voxels.

    `affine` maps voxel indices to millimetres (RAS+). `has_spacing` is False for numpy arrays, which store no spacing.
    `axes` is the shape of the stored array, for messages.
    """

    shape: tuple[int, int, int]
    num_channels: int
    affine: np.ndarray
    dtype: str
    has_spacing: bool
    axes: tuple[int, ...]

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        """Return the distance between neighbouring voxels along each stored axis."""
        x, y, z = np.linalg.norm(self.affine[:3, :3], axis=0).tolist()
        return x, y, z

    @property
    def num_bytes(self) -> int:
        """Return the size of the volume as float32."""
        return 4 * self.num_channels * math.prod(self.shape)


def _spatial(axes: tuple[int, ...], channel_axis: int | None) -> tuple[tuple[int, int, int], int]:
    """Split an array's shape into its three spatial axes and the number of channels."""
    if any(n < 1 for n in axes):
        raise UnsuitableError(
            f"an axis without voxels ({' x '.join(map(str, axes))}); every axis needs some; write it again"
        )
    num_channels = 1
    if len(axes) == 4 and channel_axis is not None:
        num_channels = axes[channel_axis]
        axes = axes[1:] if channel_axis == 0 else axes[:3]
    if len(axes) == 2 or (len(axes) == 3 and 1 in axes):
        raise UnsuitableError(
            f"a 2D image ({' x '.join(map(str, axes))}); a volume has three axes of 2 or more voxels; "
            "stack the slices or remove it"
        )
    if len(axes) != 3:
        raise UnsuitableError(
            f"{len(axes)} axes ({' x '.join(map(str, axes))}); 3, or 4 with channels, are allowed; split it"
        )
    return (axes[0], axes[1], axes[2]), num_channels


def _numeric(dtype: np.dtype) -> str:
    if dtype.kind not in "biuf":
        raise UnsuitableError(f"voxels of type {dtype}; integers or real numbers are allowed; convert it")
    return dtype.str


def _shaped(voxels: np.ndarray, *shape: int) -> np.ndarray:
    """Reshape voxels to fit a header read earlier; the file may have been replaced in between."""
    if voxels.size != math.prod(shape):
        raise UnsuitableError(f"voxels of shape {voxels.shape} do not fit its own header; write the file again")
    return voxels.reshape(shape)


def _nifti_image(path: Path) -> Any:
    with _library("nifti"):
        image = nib.load(path)
    if not isinstance(image, nib.Nifti1Image):
        raise UnsuitableError(f"it holds {type(image).__name__}; NIfTI-1 or 2 is allowed; convert it")
    return image


def _nifti_header(path: Path) -> Header:
    image = _nifti_image(path)
    axes = tuple(int(n) for n in image.shape)
    # NIfTI stores vector components on the fifth axis, after a time axis of length 1.
    axes = (*axes[:3], axes[4]) if len(axes) == 5 and axes[3] == 1 else axes
    shape, num_channels = _spatial(axes, channel_axis=-1)
    affine = np.asarray(image.affine, dtype=np.float64)
    return Header(shape, num_channels, affine, _numeric(image.get_data_dtype()), True, axes)


def _nifti_voxels(path: Path, header: Header) -> np.ndarray:
    image = _nifti_image(path)
    with _library("nifti"):
        voxels = np.asarray(image.dataobj, dtype=np.float32)
    return np.moveaxis(_shaped(voxels, *header.shape, header.num_channels), -1, 0)


def _npy_header(path: Path) -> Header:
    with _library("npy"):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise UnsuitableError("it holds several arrays; one is allowed; name it .npz")
    return _numpy_header(array.shape, array.dtype)


def _numpy_header(axes: tuple[int, ...], dtype: np.dtype) -> Header:
    shape, num_channels = _spatial(axes, channel_axis=0)
    return Header(shape, num_channels, np.eye(4), _numeric(dtype), False, axes)


def _npy_voxels(path: Path, header: Header) -> np.ndarray:
    with _library("npy"):
        array = np.load(path, allow_pickle=False)
    return _shaped(array, header.num_channels, *header.shape)


def _npz_member(names: list[str]) -> str:
    arrays = [name for name in names if name.endswith(".npy") and name != "affine.npy"]
    if "image.npy" in arrays:
        return "image.npy"
    if len(arrays) != 1:
        raise UnsuitableError(f"{len(arrays)} arrays; one, or one named image, is allowed; write it again")
    return arrays[0]


def _npz_header(path: Path) -> Header:
    with _library("npz"), zipfile.ZipFile(path) as archive:
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
    with _library("npz"), np.load(path, allow_pickle=False) as arrays:
        affine = np.asarray(arrays["affine"])
    if affine.shape != (4, 4) or affine.dtype.kind not in "biuf":
        raise UnsuitableError(
            f"its array affine is of shape {affine.shape} and type {affine.dtype}; 4 x 4 numbers are allowed; "
            "write it again"
        )
    return Header(header.shape, header.num_channels, affine.astype(np.float64), header.dtype, True, header.axes)


def _npz_voxels(path: Path, header: Header) -> np.ndarray:
    with _library("npz"), np.load(path, allow_pickle=False) as arrays:
        name = _npz_member([f"{name}.npy" for name in arrays.files]).removesuffix(".npy")
        array = np.asarray(arrays[name])
    return _shaped(array, header.num_channels, *header.shape)


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _itk_reader(path: Path) -> SimpleITK.ImageFileReader:
    reader = SimpleITK.ImageFileReader()
    # Set explicitly, because ITK would otherwise choose the reader by the content of the file.
    reader.SetImageIO("MetaImageIO" if path.name.lower().endswith(".mha") else "NrrdImageIO")
    reader.SetFileName(str(path))
    return reader


def _itk_header(path: Path) -> Header:
    # SimpleITK terminates the process if a path is not UTF-8.
    if not _is_utf8(str(path)):
        raise UnsuitableError("its path is not UTF-8, which this format's reader needs; rename it")
    reader = _itk_reader(path)
    with _library("itk"):
        (check_metaimage if path.name.lower().endswith(".mha") else check_nrrd)(path)
        reader.ReadImageInformation()
    size, components = tuple(int(n) for n in reader.GetSize()), int(reader.GetNumberOfComponents())
    if components > 1 and len(size) > 3:
        raise UnsuitableError(
            f"{len(size)} axes and {components} components; channels on one of the two are allowed; split it"
        )
    shape, num_channels = _spatial(size, channel_axis=-1)
    num_channels *= components
    direction = np.array(reader.GetDirection()).reshape(len(size), len(size))[:3, :3]
    affine = np.eye(4)
    affine[:3, :3] = LPS_TO_RAS @ direction @ np.diag(reader.GetSpacing()[:3])
    affine[:3, 3] = LPS_TO_RAS @ np.array(reader.GetOrigin()[:3])
    axes = (*size, components) if components > 1 else size
    name = SimpleITK.GetPixelIDValueAsString(reader.GetPixelID())
    return Header(shape, num_channels, affine, _itk_dtype(name), True, axes)


def _itk_dtype(pixel_name: str) -> str:
    """Convert ITK's type name ("vector of 16-bit signed integer", "32-bit float") to a numpy type."""
    words = pixel_name.removeprefix("vector of ").split()
    bits = next((int(word.removesuffix("-bit")) for word in words if word.endswith("-bit")), None)
    if bits is None or "complex" in words:
        raise UnsuitableError(f"voxels of type {pixel_name}; integers or real numbers are allowed; convert it")
    kind = "f" if "float" in words else ("u" if "unsigned" in words else "i")
    return np.dtype(f"{kind}{bits // 8}").str


def _itk_voxels(path: Path, header: Header) -> np.ndarray:
    with _library("itk"):
        image = _itk_reader(path).Execute()
    # SimpleITK reverses the axes: (channel,) z, y, x (, component).
    array = SimpleITK.GetArrayFromImage(image).T
    if array.ndim == 4 and image.GetDimension() == 3:
        return array
    return np.moveaxis(array, -1, 0) if array.ndim == 4 else array[None]


HEADER_READERS: dict[str, Callable[[Path], Header]] = {
    ".nii": _nifti_header,
    ".npy": _npy_header,
    ".npz": _npz_header,
    ".mha": _itk_header,
    ".nrrd": _itk_header,
}
VOXEL_READERS: dict[str, Callable[[Path, Header], np.ndarray]] = {
    ".nii": _nifti_voxels,
    ".npy": _npy_voxels,
    ".npz": _npz_voxels,
    ".mha": _itk_voxels,
    ".nrrd": _itk_voxels,
}
