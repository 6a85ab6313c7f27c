"""Reads volumes that are one file: NIfTI with nibabel, MetaImage and NRRD with ITK, and numpy arrays."""

from __future__ import annotations

import gzip
import math
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import nibabel as nib
import nibabel.imageglobals
import numpy as np
import SimpleITK
from isal.igzip import IGzipFile

from data.files.header import Header, HeaderError, Stored, UnsuitableError, library, numeric, shaped, spatial

# nibabel logs header repairs of files whose problems we report ourselves.
nibabel.imageglobals.logger.setLevel("CRITICAL")

# Codes of the header for metres and micrometres; all others mean millimetres or nothing.
MM_PER_UNIT = {1: 1e3, 3: 1e-3}

# ITK uses LPS coordinates (left, posterior, superior), NIfTI uses RAS (right, anterior, superior).
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0])

# ITK prints warnings about files whose problems we report ourselves.
SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)

LARGEST_HEADER = 64 * 1024
# The first line of each kind; ITK never returns from a negative NDims, and writes past its arrays above 10.
_DATA_FILE = re.compile(rb"^\s*ElementDataFile\s*=\s*(\S*)", re.MULTILINE)
_MHA_END = re.compile(rb"^\s*ElementDataFile\s*=[^\n]*\n", re.MULTILINE)
_NRRD_END = re.compile(rb"\r?\n\r?\n")
_COMPRESSED = re.compile(rb"^\s*(?:CompressedData\s*=\s*True|encoding:\s*gz(?:ip)?)\s*$", re.MULTILINE | re.IGNORECASE)
_NUM_AXES = re.compile(rb"^\s*NDims\s*=\s*(\S*)", re.MULTILINE)

# Four axes of which the first is at least this long and the last is at most that long have their channels last.
LEAST_OF_AXIS, MOST_CHANNELS_LAST = 16, 8


def read_nifti_header(path: Path) -> Header:
    """Read the header; volumes along the fourth axis are channels."""
    image = load_nifti(path)
    axes = tuple(int(n) for n in image.shape)
    # NIfTI stores vector components on the fifth axis, after a time axis of length 1.
    axes = (*axes[:3], axes[4]) if len(axes) == 5 and axes[3] == 1 else axes
    shape, num_channels = spatial(axes, channel_axis=-1)
    return Header(shape, num_channels, _affine(image), numeric(image.get_data_dtype()), True, axes)


def read_nifti_voxels(path: Path, header: Header) -> Stored:
    """Read the voxels without a second copy of them."""
    image = load_nifti(path)
    proxy = image.dataobj
    dtype = proxy.dtype
    count = header.num_channels * math.prod(header.shape)
    with library("nifti"):
        size = proxy.offset + count * dtype.itemsize
        # The suffix decides and not the content, as in nibabel.
        raw = _inflated(path, size) if path.name.lower().endswith(".gz") else np.fromfile(path, np.uint8, size)
        if raw.size < size:
            raise OSError(f"Expected {size} bytes, got {raw.size} bytes from the file")
        flat = raw[proxy.offset : size].view(dtype)
    array = np.moveaxis(flat.reshape((*header.shape, header.num_channels), order="F"), -1, 0)
    return Stored(array, float(proxy.slope), float(proxy.inter))


def load_nifti(path: Path) -> Any:
    """Return the image without its voxels; raise UnsuitableError if the file is of another format."""
    with library("nifti"):
        image = nib.load(path)
    if not isinstance(image, nib.Nifti1Image):
        raise UnsuitableError(f"it holds {type(image).__name__}; NIfTI-1 or 2 is allowed; convert it")
    return image


def _affine(image: Any) -> np.ndarray:
    affine = np.array(image.affine, dtype=np.float64)
    affine[:3] *= MM_PER_UNIT.get(int(image.header["xyzt_units"]) % 8, 1.0)
    return affine


def _inflated(path: Path, size: int) -> np.ndarray:
    """Return the first `size` bytes of a gzip file's content as uint8, after checking all of it.

    Damage raises OSError, EOFError, ValueError or zlib.error; a shorter content raises EOFError.
    """
    out = np.empty(size, np.uint8)
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            raise gzip.BadGzipFile("Not a gzipped file")
        file.seek(0)
        with IGzipFile(fileobj=file, mode="rb") as content:
            done = 0
            while done < size:
                count = content.readinto(out.data[done:])
                if not count:
                    raise EOFError(f"Expected {size} bytes, got {done} bytes")
                done += count
            # The checksum follows the last byte, so read to the end.
            while content.read(1 << 20):
                pass
    return out


def _reader(path: Path) -> SimpleITK.ImageFileReader:
    reader = SimpleITK.ImageFileReader()
    # Set explicitly, because ITK would otherwise choose the reader by the content of the file.
    reader.SetImageIO("MetaImageIO" if path.name.lower().endswith(".mha") else "NrrdImageIO")
    reader.SetFileName(str(path))
    return reader


def read_itk_header(path: Path) -> Header:
    """Read the header."""
    # SimpleITK terminates the process if a path is not UTF-8.
    if str(path).encode("utf-8", "replace").decode() != str(path):
        raise UnsuitableError("its path is not UTF-8, which this format's reader needs; rename it")
    reader = _reader(path)
    with library("itk"):
        _check_header(path)
        reader.ReadImageInformation()
    size, components = tuple(int(n) for n in reader.GetSize()), int(reader.GetNumberOfComponents())
    if components > 1 and len(size) > 3:
        raise UnsuitableError(
            f"{len(size)} axes and {components} components; channels on one of the two are allowed; split it"
        )
    shape, num_channels = spatial(size, channel_axis=-1)
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


def read_itk_voxels(path: Path, header: Header) -> Stored:
    """Return a view of ITK's own array."""
    with library("itk"):
        _check_compressed(path)
        image = _reader(path).Execute()
    # SimpleITK reverses the axes: (channel,) z, y, x (, component).
    array = SimpleITK.GetArrayViewFromImage(image).T
    if not (array.ndim == 4 and image.GetDimension() == 3):
        array = np.moveaxis(array, -1, 0) if array.ndim == 4 else array[None]
    return Stored(array, owner=image)


def _check_header(path: Path) -> None:
    """Raise `HeaderError` unless the voxels are in the same file, and a MetaImage has at most four axes."""
    with path.open("rb") as file:
        start = file.read(LARGEST_HEADER)
    if path.name.lower().endswith(".mha"):
        num_axes, place = _NUM_AXES.findall(start), _DATA_FILE.search(start)
        if not num_axes or not {*num_axes} <= {b"1", b"2", b"3", b"4"}:
            raise HeaderError("its header has no NDims from 1 to 4")
        is_elsewhere = place is None or place[1].lower() != b"local"
    else:
        header = re.split(rb"\r?\n\r?\n", start, maxsplit=1)[0]
        is_elsewhere = re.search(rb"^data ?file\s*:", header, re.IGNORECASE | re.MULTILINE) is not None
    if is_elsewhere:
        raise HeaderError("its voxels are in another file")


def _check_compressed(path: Path) -> None:
    """Raise `HeaderError` if compressed voxels do not match their checksum, which ITK does not compare."""
    with path.open("rb") as file:
        start = file.read(LARGEST_HEADER)
        end = (_MHA_END if path.name.lower().endswith(".mha") else _NRRD_END).search(start)
        if end is None or not _COMPRESSED.search(start[: end.end()]):
            return
        file.seek(end.end())
        content = zlib.decompressobj(wbits=32 + 15)  # zlib or gzip
        try:
            while not content.eof and (part := content.unconsumed_tail or file.read(1 << 20)):
                content.decompress(part, 1 << 24)
        except zlib.error as error:
            raise HeaderError(f"its compressed voxels are damaged, {error}") from None
    if not content.eof:
        raise HeaderError("its compressed voxels end too early")


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
