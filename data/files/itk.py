"""Reads MetaImage (.mha) and NRRD (.nrrd) with ITK, unless they point to voxels in another file."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import SimpleITK

from data.files.header import Header, HeaderError, Stored, UnsuitableError, library, spatial

# ITK uses LPS coordinates (left, posterior, superior), NIfTI uses RAS (right, anterior, superior).
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0])

# ITK prints warnings about files whose problems we report ourselves.
SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)

LARGEST_HEADER = 64 * 1024
# The first line of each kind; ITK never returns from a negative NDims, and writes past its arrays above 10.
_DATA_FILE = re.compile(rb"^\s*ElementDataFile\s*=\s*(\S*)", re.MULTILINE)
_NUM_AXES = re.compile(rb"^\s*NDims\s*=\s*(\S*)", re.MULTILINE)


def _reader(path: Path) -> SimpleITK.ImageFileReader:
    reader = SimpleITK.ImageFileReader()
    # Set explicitly, because ITK would otherwise choose the reader by the content of the file.
    reader.SetImageIO("MetaImageIO" if path.name.lower().endswith(".mha") else "NrrdImageIO")
    reader.SetFileName(str(path))
    return reader


def read_header(path: Path) -> Header:
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
    return Header(shape, num_channels, affine, _dtype(name), True, axes)


def _dtype(pixel_name: str) -> str:
    """Convert ITK's type name ("vector of 16-bit signed integer", "32-bit float") to a numpy type."""
    words = pixel_name.removeprefix("vector of ").split()
    bits = next((int(word.removesuffix("-bit")) for word in words if word.endswith("-bit")), None)
    if bits is None or "complex" in words:
        raise UnsuitableError(f"voxels of type {pixel_name}; integers or real numbers are allowed; convert it")
    kind = "f" if "float" in words else ("u" if "unsigned" in words else "i")
    return np.dtype(f"{kind}{bits // 8}").str


def read_voxels(path: Path, header: Header) -> Stored:
    """Return a view of ITK's own array."""
    with library("itk"):
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
