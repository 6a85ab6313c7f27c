"""Reads the voxels, channels and geometry of every volume format, and writes NIfTI."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import psutil

from data.files import dicom, images
from data.files.header import DamagedError, FileError, Header, Stored, UnsuitableError
from runtime.files import check_regular, counted, printable, replacing, shortened

# Deflate cannot compress by more than 1032:1, so a header that promises more voxels than that is wrong.
LARGEST_COMPRESSION = 1032

# Headers hold rounded numbers. DICOM series may be tilted by as much.
LARGEST_SHEAR_DEGREES = 1.0

# The most memory that reading a volume needs, in sizes of the volume as float32.
COPIES_WHILE_READING = 3

HeaderReader = Callable[[Path], Header]
VoxelReader = Callable[[Path, Header], Stored]
READERS: dict[str, tuple[HeaderReader, VoxelReader]] = {
    ".nii": (images.read_nifti_header, images.read_nifti_voxels),
    ".nii.gz": (images.read_nifti_header, images.read_nifti_voxels),
    ".npy": (images.read_npy_header, images.read_npy_voxels),
    ".npz": (images.read_npz_header, images.read_npz_voxels),
    ".mha": (images.read_itk_header, images.read_itk_voxels),
    ".nrrd": (images.read_itk_header, images.read_itk_voxels),
    ".dcm": (dicom.read_header, dicom.read_voxels),
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
    try:
        # Opening a pipe would block.
        check_regular(path)
        header = _readers_of(path)[0](path)
        size = sum(part.stat().st_size for part in parts_of(path))
    except (OSError, UnsuitableError, DamagedError) as error:
        raise FileError(path, _reason(path, error)) from error
    return _plausible(path, header, size)


def read_stored(path: Path) -> tuple[Stored, Header]:
    """Read a volume as it is stored; raise DataError, naming the file, if that fails."""
    header = read_header(path)
    try:
        with np.errstate(all="ignore"):
            stored = _readers_of(path)[1](path, header)
    except (MemoryError, UnsuitableError, DamagedError) as error:
        raise FileError(path, _reason(path, error)) from error
    if stored.array.shape != (header.num_channels, *header.shape):
        raise FileError(path, f"voxels of shape {stored.array.shape} do not fit its own header; write the file again")
    return stored, header


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
    return texts[0] if len(texts) == 1 else hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()


def parts_of(path: Path) -> list[Path]:
    """Return the files of a volume: the slices of a DICOM series, or the file itself."""
    return dicom.files_of(path) if dicom.is_dicom(path) else [path]


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
            raise FileError(part, f"cannot be read ({error.strerror}); check the file") from error
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


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
        return bytes(images.load_nifti(path).header["descrip"].item()).decode("utf-8", "replace").strip("\0 ")
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


def _readers_of(path: Path) -> tuple[HeaderReader, VoxelReader]:
    suffix = ".dcm" if dicom.is_dicom(path) else suffix_of(path.name)
    if suffix is None:
        raise UnsuitableError(f"unknown file type; {' '.join(SUFFIXES)} are read; rename or convert it")
    return READERS[suffix]


def _plausible(path: Path, header: Header, size: int) -> Header:
    stored = math.prod(header.axes) * max(np.dtype(header.dtype).itemsize, 1)
    # A plain .nii or .npy is at least as large as its voxels; the others may be compressed.
    is_plain = path.name.lower().endswith((".nii", ".npy"))
    if stored > size * (1 if is_plain else LARGEST_COMPRESSION):
        raise FileError(
            path,
            f"truncated or damaged: its header promises {stored:,} bytes of voxels in a file of {size:,}; "
            "copy or convert it again",
        )
    available = psutil.virtual_memory().available
    needed = COPIES_WHILE_READING * header.num_bytes
    if needed > available:
        raise FileError(
            path,
            f"{' x '.join(map(str, header.axes))} voxels need {needed / 2**30:.1f} GiB to be read; "
            f"{available / 2**30:.1f} GiB of memory is free; crop or downsample it first",
        )
    if not np.isfinite(header.affine).all() or not _is_invertible(header.affine[:3, :3]):
        raise FileError(path, "its affine has no inverse; give it voxel sizes above zero and an orientation")
    shear = _shear_degrees(header.affine[:3, :3])
    if shear > LARGEST_SHEAR_DEGREES:
        raise FileError(
            path,
            f"its axes are {shear:.0f} degrees from being perpendicular (a sheared affine); straight grids "
            "are allowed; resample it to one first",
        )
    return header


def _shear_degrees(matrix: np.ndarray) -> float:
    """Return by how much the angle between two axes differs from a right angle at most."""
    axes = matrix / np.linalg.norm(matrix, axis=0)
    cosines = np.abs(axes.T @ axes)[np.triu_indices(3, 1)]
    return float(np.degrees(np.arcsin(min(1.0, cosines.max()))))


def _is_invertible(matrix: np.ndarray) -> bool:
    # Relative to the voxel size, which may be nanometres. Axes that lie almost in one plane are rejected too.
    lengths = np.linalg.norm(matrix, axis=0)
    return bool((lengths > 0).all() and np.isfinite(lengths).all() and abs(np.linalg.det(matrix / lengths)) > 1e-3)


def _reason(path: Path, error: Exception) -> str:
    """Return what is wrong with a file that raised `error`, and what to do, in one sentence."""
    if isinstance(error, UnsuitableError):
        return str(error)
    if isinstance(error, DamagedError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    # A file that vanishes between two reads raises an error of the library, not FileNotFoundError.
    if isinstance(error, FileNotFoundError) or not os.path.exists(path):
        return "no such file; restore it or take it out of the data"
    if isinstance(error, PermissionError):
        return "not allowed to read it; change its permissions"
    if isinstance(error, IsADirectoryError):
        return "a folder, not a file; rename it, or name a file in it (one slice stands for a DICOM series)"
    if isinstance(error, MemoryError):
        return "its voxels do not fit in memory; crop or downsample it first"
    if not path.is_file():
        return "not a regular file; remove it"
    return f"cannot be read as {suffix_of(path.name) or path.suffix} ({_cause(error)}); copy or convert it again"


def _cause(error: Exception) -> str:
    """Return the informative line of a library's error, cut to a bounded length."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # ITK reports the place in its source first and the cause, if any, last.
    text = lines[0]
    if "SimpleITK" in text:
        text = "ITK gives no reason" if lines[-1].startswith("Reason: ") else re.sub(r"^\[nrrd\] \w+: ", "", lines[-1])
    return shortened(printable(text), 160)
