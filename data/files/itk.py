"""Reads MetaImage (.mha) and NRRD (.nrrd) with ITK, after checking their headers.

ITK 5 writes past its arrays if a MetaImage's NDims is above 10, and both formats can point to voxels in another file.
"""

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
MOST_AXES = 4
MOST_CHANNELS = 1024

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)

# Each key holds (number of axes) ** power numbers; the value here is the power.
_VECTORS = ("DimSize", "ElementSpacing", "ElementSize", "Offset", "Position", "Origin", "CenterOfRotation")
POWERS = dict.fromkeys(_VECTORS, 1) | dict.fromkeys(("TransformMatrix", "Rotation", "Orientation"), 2)


def _reader(path: Path) -> SimpleITK.ImageFileReader:
    reader = SimpleITK.ImageFileReader()
    # Set explicitly, because ITK would otherwise choose the reader by the content of the file.
    reader.SetImageIO("MetaImageIO" if path.name.lower().endswith(".mha") else "NrrdImageIO")
    reader.SetFileName(str(path))
    return reader


def read_header(path: Path) -> Header:
    """Read the header, after checks that keep ITK from writing past its arrays."""
    # SimpleITK terminates the process if a path is not UTF-8.
    if str(path).encode("utf-8", "replace").decode() != str(path):
        raise UnsuitableError("its path is not UTF-8, which this format's reader needs; rename it")
    reader = _reader(path)
    with library("itk"):
        (_check_metaimage if path.name.lower().endswith(".mha") else _check_nrrd)(path)
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


def _check_metaimage(path: Path) -> None:
    """Raise `HeaderError` unless the header is plain text of the right lengths and the voxels are in the same file."""
    with path.open("rb") as file:
        start = file.read(LARGEST_HEADER)
    fields: dict[str, str] = {}
    for line in start.split(b"\n"):
        name, equals, value = line.decode("latin-1").partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name.isascii() or not name.isidentifier() or not value.isprintable():
            raise HeaderError("its header is not lines of key = value")
        if name in fields:
            raise HeaderError(f"its header gives {name} twice")
        fields[name] = value
        if name == "ElementDataFile":
            break
    else:
        raise HeaderError("its header does not end in ElementDataFile")
    if fields["ElementDataFile"] not in ("LOCAL", "Local", "local"):
        raise HeaderError(f"its voxels are in another file, {fields['ElementDataFile']!r}")
    if fields.get("ObjectType", "Image") != "Image":
        raise HeaderError(f"it holds {fields['ObjectType']!r}, not an Image")
    _check_lengths(fields)


def _check_nrrd(path: Path) -> None:
    """Raise `HeaderError` unless the voxels are in the same file."""
    with path.open("rb") as file:
        header = re.split(rb"\r?\n\r?\n", file.read(LARGEST_HEADER), maxsplit=1)[0]
    if re.search(rb"^data ?file\s*:", header, re.IGNORECASE | re.MULTILINE):
        raise HeaderError("its voxels are in another file")


def _check_lengths(fields: dict[str, str]) -> None:
    num_axes = fields.get("NDims", "")
    if num_axes not in [str(n) for n in range(1, MOST_AXES + 1)]:
        raise HeaderError(f"NDims is {num_axes or 'missing'}; 1 to {MOST_AXES} is allowed")
    if list(fields).index("NDims") > min(map(list(fields).index, POWERS.keys() & fields.keys()), default=99):
        raise HeaderError("NDims comes after a key that depends on it")
    if "DimSize" not in fields:
        raise HeaderError("DimSize is missing")
    for name, power in POWERS.items():
        values = fields.get(name, "").split()
        if name in fields and len(values) != int(num_axes) ** power:
            raise HeaderError(f"{name} holds {len(values)} numbers; {int(num_axes) ** power} are needed")
        if not all(NUMBER.fullmatch(value) and abs(float(value)) <= 1e12 for value in values):
            raise HeaderError(f"{name} holds something that is not a number of at most 1e12")
    channels = fields.get("ElementNumberOfChannels", "1")
    if channels not in [str(n) for n in range(1, MOST_CHANNELS + 1)]:
        raise HeaderError(f"ElementNumberOfChannels is {channels[:20]}; 1 to {MOST_CHANNELS} is allowed")
