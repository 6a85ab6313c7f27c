"""Reads NIfTI-1 and NIfTI-2, plain and gzipped; gzip is inflated by ISA-L, several times faster than by zlib."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import nibabel as nib
import nibabel.imageglobals
import numpy as np
from isal.igzip import IGzipFile

from data.files.header import Header, Stored, UnsuitableError, library, numeric, spatial

# nibabel logs header repairs of files whose problems we report ourselves.
nibabel.imageglobals.logger.setLevel("CRITICAL")

# Codes of the header for metres and micrometres; all others mean millimetres or nothing.
MM_PER_UNIT = {1: 1e3, 3: 1e-3}


def read_header(path: Path) -> Header:
    """Read the header; volumes along the fourth axis are channels."""
    image = load(path)
    axes = tuple(int(n) for n in image.shape)
    # NIfTI stores vector components on the fifth axis, after a time axis of length 1.
    axes = (*axes[:3], axes[4]) if len(axes) == 5 and axes[3] == 1 else axes
    shape, num_channels = spatial(axes, channel_axis=-1)
    return Header(shape, num_channels, _affine(image), numeric(image.get_data_dtype()), True, axes)


def read_voxels(path: Path, header: Header) -> Stored:
    """Read the voxels without a second copy of them."""
    image = load(path)
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


def load(path: Path) -> Any:
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
