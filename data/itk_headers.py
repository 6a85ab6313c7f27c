"""Vets headers before ITK parses them.

ITK 5 writes past its arrays when a MetaImage's NDims is above 10, and both formats may keep voxels in another file.
"""

from __future__ import annotations

import re
from pathlib import Path

LARGEST_HEADER = 64 * 1024
MOST_AXES = 4

# How many numbers each of these keys may hold, given the number of axes.
LENGTHS = {
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


def vet_metaimage(path: Path) -> None:
    """Raise ValueError unless the header is plain text of known lengths with the voxels in the same file."""
    with path.open("rb") as file:
        start = file.read(LARGEST_HEADER)
    fields: dict[str, str] = {}
    for line in start.split(b"\n"):
        name, equals, value = line.decode("latin-1").partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name.isascii() or not name.isidentifier() or not value.isprintable():
            raise ValueError("its header is not lines of key = value")
        if name in fields:
            raise ValueError(f"its header gives {name} twice")
        fields[name] = value
        if name == "ElementDataFile":
            break
    else:
        raise ValueError("its header does not end in ElementDataFile")
    if fields["ElementDataFile"] not in ("LOCAL", "Local", "local"):
        raise ValueError(f"its voxels are in another file, {fields['ElementDataFile']!r}")
    if fields.get("ObjectType", "Image") != "Image":
        raise ValueError(f"it holds {fields['ObjectType']!r}, not an Image")
    _vet_lengths(fields)


def vet_nrrd(path: Path) -> None:
    """Raise ValueError unless the voxels are in the same file."""
    with path.open("rb") as file:
        header = re.split(rb"\r?\n\r?\n", file.read(LARGEST_HEADER), maxsplit=1)[0]
    if re.search(rb"^data ?file\s*:", header, re.IGNORECASE | re.MULTILINE):
        raise ValueError("its voxels are in another file")


def _vet_lengths(fields: dict[str, str]) -> None:
    num_axes = fields.get("NDims", "")
    if num_axes not in [str(n) for n in range(1, MOST_AXES + 1)]:
        raise ValueError(f"NDims is {num_axes or 'missing'}; 1 to {MOST_AXES} is allowed")
    if list(fields).index("NDims") > min(map(list(fields).index, LENGTHS.keys() & fields.keys()), default=99):
        raise ValueError("NDims stands behind a key that needs it")
    if "DimSize" not in fields:
        raise ValueError("DimSize is missing")
    for name, power in LENGTHS.items():
        values = fields.get(name, "").split()
        if name in fields and len(values) != int(num_axes) ** power:
            raise ValueError(f"{name} holds {len(values)} numbers; {int(num_axes) ** power} are needed")
        if any(abs(float(value)) > 1e12 for value in values):
            raise ValueError(f"{name} holds a number without sense")
    channels = fields.get("ElementNumberOfChannels", "1")
    if not channels.isdecimal() or not 1 <= int(channels) <= 1024:
        raise ValueError(f"ElementNumberOfChannels is {channels}; 1 to 1024 is allowed")
