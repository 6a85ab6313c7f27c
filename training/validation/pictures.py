"""Labelled pictures of volumes: the three middle planes in true proportions, one row per volume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

from runtime.files.atomic import replacing
from runtime.files.names import printable

PLANE_NAMES = ("sagittal", "coronal", "axial")
"""Names of the planes, in the order of the axis that they cut, for volumes in an orientation such as RAS."""

PLANE_PIXELS = 240
"""Length of the longest side of a plane."""

GAP = 6
LINE = 22
"""Pixels between planes, and the height of a line of text."""


@dataclass(frozen=True)
class Row:
    """One volume of a picture: a label, and its planes with values in [0, 1] in the order of `PLANE_NAMES`."""

    label: str
    planes: list[Tensor]

    @classmethod
    def of(cls, label: str, volume: Tensor, spacing_mm: Sequence[float], at: Sequence[int] | None = None) -> Row:
        """Cut three planes of a (D, H, W) volume as `planes_at` does, in a size that is easy to see."""
        return cls(label, planes_at(volume, spacing_mm, at))


def planes_at(volume: Tensor, spacing_mm: Sequence[float], at: Sequence[int] | None = None) -> list[Tensor]:
    """Return the planes of a (D, H, W) volume through a voxel, the middle one unless given.

    They have true proportions, each with its last axis pointing up.
    """
    place = [length // 2 for length in volume.shape] if at is None else at
    extents = [length * spacing for length, spacing in zip(volume.shape, spacing_mm, strict=True)]
    scale = PLANE_PIXELS / max(extents)
    planes = []
    for axis in range(3):
        plane = torch.rot90(volume.select(axis, place[axis])).float().cpu()
        across, up = (max(1, round(extents[other] * scale)) for other in range(3) if other != axis)
        planes.append(F.interpolate(plane[None, None], size=(up, across), mode="nearest-exact")[0, 0])
    return planes


def picture_of(rows: Sequence[Row]) -> Tensor:
    """Return one (H, W) picture: a line of plane names, then for each volume its label and its three planes."""
    width = PLANE_PIXELS
    lines = [torch.cat([_text_line(name, width + GAP) for name in PLANE_NAMES], dim=1)]
    for row in rows:
        height = max(plane.shape[0] for plane in row.planes)
        lines.append(_text_line(row.label, 3 * (width + GAP)))
        lines.append(torch.cat([_pad(plane, height, width) for plane in row.planes], dim=1))
    return torch.cat(lines, dim=0)[:-GAP, :-GAP]


def reconstruction_rows(name: str, image: Tensor, reconstruction: Tensor, spacing_mm: Sequence[float]) -> list[Row]:
    """Return rows for input, reconstruction and error; volumes are (C, D, H, W) in [-1, 1]."""
    source, result = ((volume[0].float() / 2 + 0.5).clamp(0, 1) for volume in (image, reconstruction))
    error = ((result - source).abs() * 2).clamp(0, 1)
    labels = (f"{name}, input", "reconstruction", "absolute error, twice as bright")
    return [Row.of(label, volume, spacing_mm) for label, volume in zip(labels, (source, result, error), strict=True)]


def save_picture(path: Path, picture: Tensor, title: str = "") -> Tensor:
    """Write a picture with values in [0, 1] as a PNG, under a line with its title; return its grey values (uint8)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if title:
        picture = torch.cat([_text_line(title, picture.shape[1]), picture], dim=0)
    pixels = (picture.clamp(0, 1) * 255).round().to(torch.uint8)
    with replacing(path) as temporary:
        Image.fromarray(np.ascontiguousarray(pixels.numpy()), mode="L").save(temporary, "PNG")
    return pixels


def _pad(plane: Tensor, height: int, width: int) -> Tensor:
    top, left = (height - plane.shape[0]) // 2, (width - plane.shape[1]) // 2
    right, bottom = width - plane.shape[1] - left, height - plane.shape[0] - top
    return F.pad(plane, (left, right + GAP, top, bottom + GAP), value=0.0)


def _text_line(text: str, width: int) -> Tensor:
    """Return a line of light text on black; long text is cut at the start, because names differ at the end."""
    font = ImageFont.load_default(13)
    line = Image.new("L", (width, LINE))
    shown = text = printable(text)
    while shown and font.getlength(shown) > width - 8:
        text = text[1:]
        shown = f"...{text}"
    ImageDraw.Draw(line).text((4, 3), shown, fill=210, font=font)
    return torch.from_numpy(np.asarray(line).copy()).float() / 255
