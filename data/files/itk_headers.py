"""Checks headers before ITK parses them.

ITK 5 writes past its arrays if a MetaImage's NDims is above 10, and both formats can point to voxels in another file.
"""

from __future__ import annotations

import re
from pathlib import Path

LARGEST_HEADER = 64 * 1024
MOST_AXES = 4
MOST_CHANNELS = 1024

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)

# Each key holds (number of axes) ** power numbers; the value here is the power.
POWERS = {
    "DimSize": 1,
    "ElementSpacing": 1,
    "ElementSize": 1,
    "Offset": 1,
    "Position": 1,
    "Origin": 1,
    "CenterOfRotation": 1,
    "TransformMatrix": 2,
    "Rotation": 2,
    "Orientation": 2,
}


class HeaderError(Exception):
    """A header that must not be passed to ITK."""


def check_metaimage(path: Path) -> None:
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


def check_nrrd(path: Path) -> None:
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
