"""Reads volumes: NIfTI with nibabel, MetaImage and NRRD with ITK, numpy arrays, DICOM series; and writes NIfTI."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import nibabel.imageglobals
import numpy as np
import SimpleITK
from isal.igzip import IGzipFile

from data import dicom
from data.header import DamagedError, FileError, Header, Opened, Stored, UnsuitableError, header_of, library
from runtime.files import check_regular, counted, printable, reason, replacing, shortened
from runtime.host_memory import available_host_bytes

# nibabel and ITK report problems of files that we report ourselves.
nibabel.imageglobals.logger.setLevel("CRITICAL")
SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)

# Codes of the header for metres and micrometres; all others mean millimetres or nothing.
MM_PER_UNIT = {1: 1e3, 3: 1e-3}

LARGEST_HEADER = 64 * 1024
_MHA_END = re.compile(rb"^\s*ElementDataFile\s*[=:][ \t]*(\S*)[^\n]*\n", re.MULTILINE)
_MHA_AXES = re.compile(rb"^\s*NDims\s*[=:]\s*(\S*)", re.MULTILINE)
_NRRD_END = re.compile(rb"\r?\n\r?\n")
_NRRD_ELSEWHERE = re.compile(rb"^data ?file\s*:", re.MULTILINE | re.IGNORECASE)
_MHA_PACKED = re.compile(rb"^\s*CompressedDataSize\s*[=:]\s*(\d+)\s*$", re.MULTILINE)
_COMPRESSED = re.compile(rb"(?im)^\s*(?:CompressedData\s*[=:]\s*[t1]\w*|encoding:\s*gz(?:ip)?)\s*$")

# Four axes of which the first is at least this long and the last is at most that long have their channels last.
LEAST_OF_AXIS, MOST_CHANNELS_LAST = 16, 8

# Deflate cannot compress by more than 1032:1, so a header that promises more voxels than that is wrong.
LARGEST_COMPRESSION = 1032

# Headers hold rounded numbers. The axes of a DICOM series are sheared by a gantry tilt.
LARGEST_SHEAR_DEGREES = 1.0

# The most memory that reading a volume needs, in sizes of the volume as float32.
COPIES_WHILE_READING = 3


def _nifti(path: Path) -> Opened:
    """Open a NIfTI file; volumes along the fourth axis are channels, and so are vectors, which are on the fifth."""
    image = _load_nifti(path)
    axes = tuple(int(n) for n in image.shape)
    axes = (*axes[:3], axes[4]) if len(axes) == 5 and axes[3] == 1 else axes
    affine = np.array(image.affine, dtype=np.float64)
    affine[:3] *= MM_PER_UNIT.get(int(image.header["xyzt_units"]) % 8, 1.0)
    header = header_of(axes, -1, image.get_data_dtype(), affine)

    def read() -> Stored:
        proxy, count = image.dataobj, math.prod(axes)
        size = proxy.offset + count * proxy.dtype.itemsize
        # The suffix decides and not the content, as in nibabel.
        is_packed = path.name.lower().endswith(".gz")
        with library(), IGzipFile(path) if is_packed else path.open("rb") as file:
            content = file.read(size)
            # The checksum follows the last byte, so read to the end.
            while is_packed and file.read(1 << 20):
                pass
            if len(content) < size:
                raise EOFError(f"expected {size} bytes, got {len(content)}")
            flat = np.frombuffer(content, proxy.dtype, count, proxy.offset)
        array = np.moveaxis(flat.reshape((*header.shape, header.num_channels), order="F"), -1, 0)
        return Stored(array, float(proxy.slope), float(proxy.inter))

    return header, read


def _load_nifti(path: Path) -> Any:
    with library():
        image = nib.load(path)
    if not isinstance(image, nib.Nifti1Image):
        raise UnsuitableError(f"it holds {type(image).__name__}; NIfTI-1 or 2 is allowed; convert it")
    return image


def _itk(path: Path) -> Opened:
    """Open a MetaImage or NRRD file, without letting ITK see what it would hang on, or read as wrong voxels."""
    # SimpleITK terminates the process if a path is not UTF-8.
    if str(path).encode("utf-8", "replace").decode() != str(path):
        raise UnsuitableError("its path is not UTF-8, which this format's reader needs; rename it")
    is_mha = path.name.lower().endswith(".mha")
    with path.open("rb") as file:
        start = file.read(LARGEST_HEADER)
    end = (_MHA_END if is_mha else _NRRD_END).search(start)
    text = b"" if end is None else start[: end.end()]
    if end is None or (end[1].lower() != b"local" or b"HeaderSize" in text if is_mha else _NRRD_ELSEWHERE.search(text)):
        raise UnsuitableError("its header has no end, or puts the voxels into another file; write both into one")
    # ITK never returns from a negative number of axes, and writes past its arrays above 10.
    if is_mha and not {b""} < {b"", *_MHA_AXES.findall(text)} <= {b"", b"1", b"2", b"3", b"4"}:
        raise UnsuitableError("its header has no NDims from 1 to 4; write it again")
    reader = SimpleITK.ImageFileReader()
    # Set explicitly, because ITK would otherwise choose the reader by the content of the file.
    reader.SetImageIO("MetaImageIO" if is_mha else "NrrdImageIO")
    reader.SetFileName(str(path))
    with library():
        reader.ReadImageInformation()
    size, components = tuple(int(n) for n in reader.GetSize()), int(reader.GetNumberOfComponents())
    direction = np.array(reader.GetDirection()).reshape(len(size), len(size))[:3, :3]
    axes = (*size, components) if components > 1 and len(size) > 2 else size
    affine = np.eye(4)
    if len(direction) == 3:
        affine[:3, :3] = dicom.LPS_TO_RAS @ direction @ np.diag(reader.GetSpacing()[:3])
        affine[:3, 3] = dicom.LPS_TO_RAS @ np.array(reader.GetOrigin()[:3])
    header = header_of(axes, -1, _itk_dtype(SimpleITK.GetPixelIDValueAsString(reader.GetPixelID())), affine)

    def read() -> Stored:
        with library():
            if _COMPRESSED.search(text):
                # ITK does not compare the checksum.
                expected = math.prod(axes) * np.dtype(header.dtype).itemsize
                content = zlib.decompressobj(wbits=32 + 15)  # zlib or gzip
                with path.open("rb") as file:
                    file.seek(len(text))
                    packed = file.read()
                voxels = content.decompress(packed, expected + 1)
                if len(voxels) != expected or not content.eof:
                    raise EOFError(f"{len(voxels)} bytes of compressed voxels; {expected} expected")
                # Without their true size ITK returns whatever is in its memory.
                size_text = str(len(packed) - len(content.unused_data)).encode()
                if is_mha and _MHA_PACKED.findall(text) != [size_text]:
                    raise ValueError("its CompressedDataSize is not that of its voxels")
                del packed, voxels
            image = reader.Execute()
        # SimpleITK reverses the axes: (channel,) z, y, x (, component).
        array = SimpleITK.GetArrayViewFromImage(image).T
        if not (array.ndim == 4 and image.GetDimension() == 3):
            array = np.moveaxis(array, -1, 0) if array.ndim == 4 else array[None]
        return Stored(array, owner=image)

    return header, read


def _itk_dtype(pixel_name: str) -> str:
    """Convert ITK's type name ("vector of 16-bit signed integer", "32-bit float") to a numpy type."""
    kinds = {"float": "f", "signed integer": "i", "unsigned integer": "u"}
    bits, _, kind = pixel_name.removeprefix("vector of ").partition("-bit ")
    if kind not in kinds or not bits.isdecimal():  # as in "complex of 32"
        raise UnsuitableError(f"voxels of type {pixel_name}; integers or real numbers are allowed; convert it")
    return f"{kinds[kind]}{int(bits) // 8}"


def _npy(path: Path) -> Opened:
    with library():
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise UnsuitableError("it holds several arrays; one is allowed; name it .npz")

    def read() -> Stored:
        with library():
            return _channels_first(np.load(path, allow_pickle=False))

    return _array_header(array.shape, array.dtype), read


def _npz(path: Path) -> Opened:
    """Open the array named image, or the only one, of an archive, with the affine if it has one."""
    with library(), zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".npy")]
        arrays = [name for name in names if name != "affine.npy"]
        if len(arrays) != 1 and "image.npy" not in arrays:
            raise UnsuitableError(f"{len(arrays)} arrays; one, or one named image, is allowed; write it again")
        chosen = "image.npy" if "image.npy" in arrays else arrays[0]
        with archive.open(chosen) as file:
            version = np.lib.format.read_magic(file)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            axes, _, dtype = read_header(file)
        affine = None
        if "affine.npy" in names and archive.getinfo("affine.npy").file_size < 4096:
            with np.load(path, allow_pickle=False) as content:
                # numpy returns an entry that is not an array as bytes.
                affine = np.asarray(content["affine"])
    if affine is not None and (affine.shape != (4, 4) or affine.dtype.kind not in "biuf"):
        found = f"of shape {affine.shape} and type {affine.dtype}"
        raise UnsuitableError(f"its array affine is {found}; 4 x 4 numbers are allowed; write it again")

    def read() -> Stored:
        with library(), np.load(path, allow_pickle=False) as content:
            return _channels_first(np.asarray(content[chosen.removesuffix(".npy")]))

    return _array_header(axes, dtype, affine), read


def _array_header(axes: tuple[int, ...], dtype: np.dtype, affine: np.ndarray | None = None) -> Header:
    if len(axes) == 4 and axes[0] >= LEAST_OF_AXIS and axes[3] <= MOST_CHANNELS_LAST:
        raise UnsuitableError(
            "its last of four axes is short as if it held channels; .npy and .npz hold channels first (channels, x, y, "
            "z); save np.moveaxis(array, -1, 0), or a NIfTI file, which holds them last"
        )
    return header_of(axes, 0, dtype, np.eye(4) if affine is None else affine.astype(np.float64), affine is not None)


def _channels_first(array: np.ndarray) -> Stored:
    return Stored(array if array.ndim == 4 else array[None])


READERS: dict[str, Callable[[Path], Opened]] = {
    ".nii": _nifti,
    ".nii.gz": _nifti,
    ".npy": _npy,
    ".npz": _npz,
    ".mha": _itk,
    ".nrrd": _itk,
    ".dcm": dicom.open_series,
}
SUFFIXES = tuple(READERS)


def suffix_of(name: str) -> str | None:
    """Return the volume suffix of a file name, or None if it has none."""
    lower = name.lower()
    return next((suffix for suffix in SUFFIXES if lower.endswith(suffix)), None)


def stem(name: str) -> str:
    """Return the name of a volume without the ending of its type."""
    return name[: len(name) - len(suffix_of(name) or "")]


def read_header(path: Path) -> Header:
    """Read shape, channels and geometry without the voxels; raise DataError, naming the file, if that fails."""
    return _opened(path)[0]


def read_stored(path: Path) -> tuple[Stored, Header]:
    """Read a volume as it is stored; raise DataError, naming the file, if that fails."""
    header, read = _opened(path)
    try:
        with np.errstate(all="ignore"):
            stored = read()
    except (UnsuitableError, DamagedError) as error:
        raise FileError(path, _reason(path, error)) from error
    if stored.array.shape != (header.num_channels, *header.shape):
        raise FileError(path, f"voxels of shape {stored.array.shape} do not fit its own header; write the file again")
    return stored, header


def _opened(path: Path) -> Opened:
    try:
        # Opening a pipe would block.
        check_regular(path)
        suffix = ".dcm" if dicom.is_dicom(path) else suffix_of(path.name)
        if suffix is None:
            raise UnsuitableError(f"unknown file type; {' '.join(SUFFIXES)} are read; rename or convert it")
        header, read = READERS[suffix](path)
        size = sum(part.stat().st_size for part in parts_of(path))
    except (OSError, UnsuitableError, DamagedError) as error:
        raise FileError(path, _reason(path, error)) from error
    problem = _implausible(header, size, is_plain=suffix in (".nii", ".npy"))
    if problem is not None:
        raise FileError(path, problem)
    return header, read


def _implausible(header: Header, size: int, is_plain: bool) -> str | None:
    """Return what cannot be true of a file of `size` bytes, or cannot be read here; None if there is nothing."""
    promised = math.prod(header.axes) * np.dtype(header.dtype).itemsize
    if promised > size * (1 if is_plain else LARGEST_COMPRESSION):
        return (
            f"truncated or damaged: its header promises {promised:,} bytes of voxels in a file of {size:,}; copy or "
            "convert it again"
        )
    needed, available = COPIES_WHILE_READING * header.num_bytes, available_host_bytes()
    if needed > available:
        return (
            f"{' x '.join(map(str, header.axes))} voxels need {needed / 2**30:.1f} GiB to be read; "
            f"{available / 2**30:.1f} GiB of memory is free; crop or downsample it first"
        )
    # NaN if an axis has no length.
    with np.errstate(all="ignore"):
        directions = header.affine[:3, :3] / np.linalg.norm(header.affine[:3, :3], axis=0)
        cosine = np.abs(directions.T @ directions)[np.triu_indices(3, 1)].max()
        shear = np.degrees(np.arcsin(np.minimum(cosine, 1.0)))
    if not (np.isfinite(header.affine).all() and shear <= LARGEST_SHEAR_DEGREES):
        return (
            f"the axes of its affine are {shear:.0f} degrees from being perpendicular (a shear or a gantry tilt; nan: "
            "an axis without length); straight grids are allowed; resample it to one, or repair its affine"
        )
    return None


def parts_of(path: Path) -> list[Path]:
    """Return the files of a volume: the slices of a DICOM series, or the file itself."""
    return dicom.files_of(path) if dicom.is_dicom(path) else [path]


def signature(path: Path) -> str:
    """Return a text that changes whenever the file does, as far as that can be known without reading it.

    It includes ctime, which programs cannot set: ctime reveals new content even if size and mtime are the same.
    """
    texts = []
    for part in parts_of(path):
        try:
            status = part.stat()
            texts.append(f"{status.st_size} {status.st_mtime_ns} {status.st_ino} {status.st_ctime_ns}")
        except (OSError, ValueError):
            return "missing"
    return _joined(texts)


def content_digest(path: Path) -> str:
    """Return the hash of a volume's bytes, which identifies it; raise DataError if it cannot be read.

    That of a DICOM series is the hash of the hashes of its files, whatever their names and order.
    """
    digests = []
    for part in parts_of(path):
        try:
            with part.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise FileError(part, _reason(part, error)) from error
    return _joined(digests)


def _joined(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()


def write_nifti(path: Path, voxels: np.ndarray, affine: np.ndarray, note: str = "") -> None:
    """Write a channels-first volume as .nii or .nii.gz, atomically; create the folder if it does not exist.

    The bytes depend on the arguments only. One channel is written as 3D, several as 4D with the channels last. The
    note, of at most 79 bytes, becomes the description in the header.
    """
    array = voxels[0] if voxels.shape[0] == 1 else np.moveaxis(voxels, 0, -1)
    image = nib.Nifti1Image(array, affine)
    image.header.set_xyzt_units("mm")
    image.header["descrip"] = note.encode()
    content = image.to_bytes()
    if path.name.lower().endswith(".gz"):
        content = gzip.compress(content, compresslevel=1, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def note_of(path: Path) -> str:
    """Return the note that `write_nifti` put into a file; raise DataError, naming the file, if it cannot be read."""
    try:
        check_regular(path)
        return bytes(_load_nifti(path).header["descrip"].item()).decode("utf-8", "replace").strip("\0 ")
    except (OSError, UnsuitableError, DamagedError) as error:
        raise FileError(path, _reason(path, error)) from error


def channels_text(header: Header, num_channels: int) -> str:
    """Return the message for a file whose number of channels is not that of the autoencoder."""
    remedy = "change one of the two"
    if header.num_channels > 1:
        remedy += f", or set data.frame: 0 to {header.num_channels - 1} to read one of its volumes"
    return (
        f"{counted(header.num_channels, 'channel')} ({' x '.join(map(str, header.axes))}); autoencoder.in_channels is "
        f"{num_channels}; {remedy}"
    )


def _reason(path: Path, error: Exception) -> str:
    """Return what is wrong with a file that raised `error`, and what to do, in one sentence."""
    if isinstance(error, UnsuitableError):
        return str(error)
    cause = error.__cause__ if isinstance(error, DamagedError) else error
    # A file that vanishes between two reads raises an error of the library, not FileNotFoundError.
    if isinstance(cause, FileNotFoundError) or not os.path.exists(path):
        return "no such file; restore it or take it out of the data"
    text = reason(cause) if isinstance(cause, OSError) else str(cause)
    lines = text.strip().splitlines() or [type(cause).__name__]
    # ITK reports the place in its source first and the cause last.
    line = shortened(printable(lines[-1 if "SimpleITK" in lines[0] else 0]), 160)
    return f"cannot be read as {suffix_of(path.name) or path.suffix} ({line}); copy or convert it again"
