"""Reads MetaImage (.mha) and NRRD (.nrrd) with ITK."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import SimpleITK

from data.files.header import Header, Stored, UnsuitableError, library, spatial
from data.files.itk_headers import check_metaimage, check_nrrd

# ITK uses LPS coordinates (left, posterior, superior), NIfTI uses RAS (right, anterior, superior).
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0])

# ITK prints warnings about files whose problems we report ourselves.
SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _reader(path: Path) -> SimpleITK.ImageFileReader:
    reader = SimpleITK.ImageFileReader()
    # Set explicitly, because ITK would otherwise choose the reader by the content of the file.
    reader.SetImageIO("MetaImageIO" if path.name.lower().endswith(".mha") else "NrrdImageIO")
    reader.SetFileName(str(path))
    return reader


def read_header(path: Path) -> Header:
    """Read the header, after checks that keep ITK from writing past its arrays."""
    # SimpleITK terminates the process if a path is not UTF-8.
    if not _is_utf8(str(path)):
        raise UnsuitableError("its path is not UTF-8, which this format's reader needs; rename it")
    reader = _reader(path)
    with library("itk"):
        (check_metaimage if path.name.lower().endswith(".mha") else check_nrrd)(path)
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
