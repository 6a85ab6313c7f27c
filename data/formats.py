"""Reads the voxels, channels and geometry of every volume format, and writes NIfTI."""

from __future__ import annotations

import gzip
import math
import os
import re
import struct
import tempfile
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import nibabel.imageglobals
import numpy as np
import psutil
import SimpleITK
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError
from nibabel.wrapstruct import WrapStructError

from data.itk_headers import vet_metaimage, vet_nrrd
from settings import DataError

SUFFIXES = (".nii", ".nii.gz", ".npy", ".npz", ".mha", ".nrrd")


class _UnsuitableError(Exception):
    """A file that can be read but not used, said in a whole sentence."""


# Whatever a damaged file can raise in nibabel, numpy, SimpleITK, gzip and zipfile (tests/data fuzzes them).
READ_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    SyntaxError,
    MemoryError,
    zlib.error,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    ImageFileError,
    HeaderDataError,
    WrapStructError,
    _UnsuitableError,
)

# Deflate cannot shrink data by more than 1032:1, so a header that promises more than that is lying.
LARGEST_COMPRESSION = 1032

# As stored, as float32, and once more while percentiles are taken.
COPIES_WHILE_READING = 3

# ITK numbers axes to the left and to the back, NIfTI to the right and to the front.
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0])

# nibabel logs header repairs and ITK warns on stderr about files whose problem we report ourselves.
nibabel.imageglobals.logger.setLevel("CRITICAL")
SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)


@dataclass(frozen=True)
class Header:
    """What a file says about its volume before the voxels are read.

    `affine` maps voxel indices to millimetres (RAS+). `has_spacing` is False for numpy arrays, which carry none.
    `axes` is the array's shape as stored in the file, for messages.
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


def printable(text: object) -> str:
    """Return text with whatever could break a line, a terminal or an encoding escaped: file names may hold it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def suffix_of(name: str) -> str | None:
    """Return the volume suffix of a file name, or None when it is not a volume's."""
    lower = name.lower()
    return next((suffix for suffix in (".nii.gz", *SUFFIXES) if lower.endswith(suffix)), None)


def read_header(path: Path) -> Header:
    """Read shape, channels and geometry without the voxels; raises DataError in the file's name."""
    try:
        size = path.stat().st_size
        header = _HEADER_READERS[_reader_of(path)](path)
    except READ_ERRORS as error:
        raise DataError(f"{printable(path)}: {_reason(path, error)}") from error
    return _plausible(path, header, size)


def read_volume(path: Path) -> tuple[np.ndarray, Header]:
    """Read a volume as float32, channel first, in the file's own axis order; raises DataError in the file's name."""
    header = read_header(path)
    try:
        with np.errstate(all="ignore"):
            voxels = _VOXEL_READERS[_reader_of(path)](path, header)
            voxels = voxels.astype(np.float32, copy=False)
    except READ_ERRORS as error:
        raise DataError(f"{printable(path)}: {_reason(path, error)}") from error
    if voxels.shape != (header.num_channels, *header.shape):
        raise DataError(
            f"{printable(path)}: voxels of shape {voxels.shape} do not fit its own header; write the file again"
        )
    return voxels, header


def write_nifti(path: Path, voxels: np.ndarray, affine: np.ndarray) -> None:
    """Write a channel-first volume as .nii or .nii.gz, under a temporary name first so that it is whole or absent.

    The bytes depend on nothing but the arguments. One channel is written as 3D, several as 4D with the channel last.
    """
    array = voxels[0] if voxels.shape[0] == 1 else np.moveaxis(voxels, 0, -1)
    image = nib.Nifti1Image(array, affine)
    image.header.set_xyzt_units("mm")
    content = image.to_bytes()
    if path.name.lower().endswith(".gz"):
        content = gzip.compress(content, compresslevel=1, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _reader_of(path: Path) -> str:
    suffix = suffix_of(path.name)
    if suffix is None:
        raise _UnsuitableError(f"not a volume by its name; {' '.join(SUFFIXES)} are read; rename or convert it")
    return {".nii.gz": ".nii"}.get(suffix, suffix)


def _plausible(path: Path, header: Header, size: int) -> Header:
    where = printable(path)
    stored = math.prod(header.axes) * max(np.dtype(header.dtype).itemsize, 1)
    # A plain .nii or .npy is at least as large as its voxels; the others may be compressed.
    is_plain = path.name.lower().endswith((".nii", ".npy"))
    if stored > size * (1 if is_plain else LARGEST_COMPRESSION):
        raise DataError(
            f"{where}: truncated or damaged: its header promises {stored:,} bytes of voxels in a file of {size:,}; "
            "copy or convert it again"
        )
    available = psutil.virtual_memory().available
    needed = COPIES_WHILE_READING * header.num_bytes
    if needed > available:
        raise DataError(
            f"{where}: {' x '.join(map(str, header.axes))} voxels need {needed / 2**30:.1f} GiB to be read; "
            f"{available / 2**30:.1f} GiB of memory are free; crop or downsample it first"
        )
    if not np.isfinite(header.affine).all() or not _is_invertible(header.affine[:3, :3]):
        raise DataError(f"{where}: its affine has no inverse; give it voxel sizes above zero and an orientation")
    return header


def _is_invertible(matrix: np.ndarray) -> bool:
    # Relative to the voxel size, which may be nanometres; a matrix of axes nearly in one plane is as bad as none.
    lengths = np.linalg.norm(matrix, axis=0)
    return bool((lengths > 0).all() and np.isfinite(lengths).all() and abs(np.linalg.det(matrix / lengths)) > 1e-3)


def _spatial(axes: tuple[int, ...], channel_axis: int | None) -> tuple[tuple[int, int, int], int]:
    """Split an array's shape into its three spatial axes and the number of channels."""
    if any(n < 1 for n in axes):
        raise _UnsuitableError(
            f"an axis without voxels ({' x '.join(map(str, axes))}); every axis needs some; write it again"
        )
    num_channels = 1
    if len(axes) == 4 and channel_axis is not None:
        num_channels = axes[channel_axis]
        axes = axes[1:] if channel_axis == 0 else axes[:3]
    if len(axes) == 2 or (len(axes) == 3 and 1 in axes):
        raise _UnsuitableError(
            f"a 2D image ({' x '.join(map(str, axes))}); a volume has three axes of 2 or more voxels; "
            "stack the slices or remove it"
        )
    if len(axes) != 3:
        raise _UnsuitableError(
            f"{len(axes)} axes ({' x '.join(map(str, axes))}); 3, or 4 with channels, are allowed; split it"
        )
    return (axes[0], axes[1], axes[2]), num_channels


def _numeric(dtype: np.dtype) -> str:
    if dtype.kind not in "biuf":
        raise _UnsuitableError(f"voxels of type {dtype}; integers or real numbers are allowed; convert it")
    return dtype.str


def _nifti_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    # NIfTI puts vector components on the fifth axis, behind an empty time axis.
    return (*shape[:3], shape[4]) if len(shape) == 5 and shape[3] == 1 else shape


def _nifti_header(path: Path) -> Header:
    image = nib.load(path)
    if not isinstance(image, nib.Nifti1Image):
        raise _UnsuitableError(f"it holds {type(image).__name__}; NIfTI-1 or 2 is allowed; convert it")
    axes = _nifti_axes(tuple(int(n) for n in image.shape))
    shape, num_channels = _spatial(axes, channel_axis=-1)
    affine = np.asarray(image.affine, dtype=np.float64)
    return Header(shape, num_channels, affine, _numeric(image.get_data_dtype()), True, axes)


def _nifti_voxels(path: Path, header: Header) -> np.ndarray:
    image = nib.load(path)
    assert isinstance(image, nib.Nifti1Image), "the header was read as NIfTI"
    voxels = np.asarray(image.dataobj, dtype=np.float32).reshape(*header.shape, header.num_channels)
    return np.moveaxis(voxels, -1, 0)


def _npy_header(path: Path) -> Header:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return _numpy_header(array.shape, array.dtype)


def _numpy_header(axes: tuple[int, ...], dtype: np.dtype) -> Header:
    shape, num_channels = _spatial(axes, channel_axis=0)
    return Header(shape, num_channels, np.eye(4), _numeric(dtype), False, axes)


def _npy_voxels(path: Path, header: Header) -> np.ndarray:
    return np.load(path, allow_pickle=False).reshape(header.num_channels, *header.shape)


def _npz_member(names: list[str]) -> str:
    arrays = [name for name in names if name.endswith(".npy") and name != "affine.npy"]
    if "image.npy" in arrays:
        return "image.npy"
    if len(arrays) != 1:
        raise _UnsuitableError(f"{len(arrays)} arrays; one, or one named image, is allowed; write it again")
    return arrays[0]


def _npz_header(path: Path) -> Header:
    with zipfile.ZipFile(path) as archive:
        member = _npz_member(archive.namelist())
        with archive.open(member) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            axes, _, dtype = read(file)
        has_affine = "affine.npy" in archive.namelist() and archive.getinfo("affine.npy").file_size < 4096
    header = _numpy_header(axes, dtype)
    if not has_affine:
        return header
    with np.load(path, allow_pickle=False) as arrays:
        affine = np.asarray(arrays["affine"], dtype=np.float64)
    if affine.shape != (4, 4):
        raise _UnsuitableError(f"its array affine is of shape {affine.shape}; 4 x 4 is allowed; write it again")
    return Header(header.shape, header.num_channels, affine, header.dtype, True, header.axes)


def _npz_voxels(path: Path, header: Header) -> np.ndarray:
    with np.load(path, allow_pickle=False) as arrays:
        name = _npz_member([f"{name}.npy" for name in arrays.files]).removesuffix(".npy")
        return arrays[name].reshape(header.num_channels, *header.shape)


def _itk_reader(path: Path) -> SimpleITK.ImageFileReader:
    reader = SimpleITK.ImageFileReader()
    # Named, so that a file is never handed to another of ITK's readers because of its content.
    reader.SetImageIO("MetaImageIO" if path.name.lower().endswith(".mha") else "NrrdImageIO")
    reader.SetFileName(str(path))
    return reader


def _itk_header(path: Path) -> Header:
    if not path.is_file():
        raise FileNotFoundError(path)
    (vet_metaimage if path.name.lower().endswith(".mha") else vet_nrrd)(path)
    reader = _itk_reader(path)
    reader.ReadImageInformation()
    size, components = tuple(int(n) for n in reader.GetSize()), int(reader.GetNumberOfComponents())
    if components > 1 and len(size) > 3:
        raise _UnsuitableError(
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
    """Turn ITK's words ("vector of 16-bit signed integer", "32-bit float") into a numpy type."""
    words = pixel_name.removeprefix("vector of ").split()
    bits = next((int(word.removesuffix("-bit")) for word in words if word.endswith("-bit")), None)
    if bits is None or "complex" in words:
        raise _UnsuitableError(f"voxels of type {pixel_name}; integers or real numbers are allowed; convert it")
    kind = "f" if "float" in words else ("u" if "unsigned" in words else "i")
    return np.dtype(f"{kind}{bits // 8}").str


def _itk_voxels(path: Path, header: Header) -> np.ndarray:
    image = _itk_reader(path).Execute()
    array = SimpleITK.GetArrayFromImage(image)
    # ITK's arrays count backwards: (channel,) z, y, x (, component).
    if array.ndim == 4 and image.GetDimension() == 3:
        return array.transpose(3, 2, 1, 0)
    return array.transpose(0, 3, 2, 1) if array.ndim == 4 else array.transpose(2, 1, 0)[None]


def _reason(path: Path, error: Exception) -> str:
    """Say in one sentence what is wrong with a file that raised `error`, and what to do."""
    if isinstance(error, _UnsuitableError):
        return str(error)
    # A file that vanishes between two reads fails in the reader's own words, not in the system's.
    if isinstance(error, FileNotFoundError) or not path.exists():
        return "no such file; restore it or take it out of the data"
    if isinstance(error, PermissionError):
        return "not allowed to read it; change its permissions"
    if isinstance(error, IsADirectoryError):
        return "a folder, not a file; rename it"
    if isinstance(error, MemoryError):
        return "its voxels do not fit in memory; crop or downsample it first"
    suffix = suffix_of(path.name) or path.suffix
    text = _shortened(error)
    is_header = "ReadImageInformation" in str(error)
    if is_header or isinstance(error, gzip.BadGzipFile | ImageFileError | zipfile.BadZipFile):
        return f"not a {suffix} file ({text}); write it again or remove it"
    if isinstance(error, EOFError) or "Expected" in text or "ImageFileReader_Execute" in str(error):
        return f"truncated or damaged: its voxels cannot be read ({text}); copy or convert it again"
    return f"cannot be read as {suffix} ({text}); copy or convert it again"


def _shortened(error: Exception) -> str:
    """Return the one line of a library's error that says something, of bounded length."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # ITK's reports run from the place in its source to the cause, if they give one.
    text = lines[0]
    if "SimpleITK" in text:
        text = "ITK gives no reason" if lines[-1].startswith("Reason: ") else re.sub(r"^\[nrrd\] \w+: ", "", lines[-1])
    text = printable(text)
    return text if len(text) <= 160 else text[:157] + "..."


_HEADER_READERS = {".nii": _nifti_header, ".npy": _npy_header, ".npz": _npz_header} | dict.fromkeys(
    (".mha", ".nrrd"), _itk_header
)
_VOXEL_READERS = {".nii": _nifti_voxels, ".npy": _npy_voxels, ".npz": _npz_voxels} | dict.fromkeys(
    (".mha", ".nrrd"), _itk_voxels
)
