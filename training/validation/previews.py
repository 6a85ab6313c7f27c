"""What a validation shows: labelled pictures, and downsampled volumes for the slice viewer.

A volume for the viewer is one grey PNG that tiles all slices along the first axis; the page cuts any plane from it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from torch.nn import functional as F

from data.loading import to_unit
from runtime.files import RunFolder, printable, replacing

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
        """Cut the planes of a (D, H, W) volume through a voxel, the middle one unless given, in a size easy to see.

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
        return cls(label, planes)


def picture_of(rows: Sequence[Row]) -> Tensor:
    """Return one (H, W) picture: a line of plane names, then for each volume its label and its three planes."""
    width = PLANE_PIXELS
    lines = [torch.cat([_text_line(name, width + GAP) for name in PLANE_NAMES], dim=1)]
    for row in rows:
        height = max(plane.shape[0] for plane in row.planes)
        lines.append(_text_line(row.label, 3 * (width + GAP)))
        centred = []
        for plane in row.planes:
            top, left = (height - plane.shape[0]) // 2, (width - plane.shape[1]) // 2
            right, bottom = width - plane.shape[1] - left, height - plane.shape[0] - top
            centred.append(F.pad(plane, (left, right + GAP, top, bottom + GAP), value=0.0))
        lines.append(torch.cat(centred, dim=1))
    return torch.cat(lines, dim=0)[:-GAP, :-GAP]


def reconstruction_rows(name: str, image: Tensor, reconstruction: Tensor, spacing_mm: Sequence[float]) -> list[Row]:
    """Return rows for input, reconstruction and error; volumes are (C, D, H, W) in [-1, 1]."""
    source, result = (to_unit(volume[0].float()) for volume in (image, reconstruction))
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


FACTS = "volume"
"""Key of the PNG text that holds shape, grid, columns, spacing, orientation, name and note as JSON."""

MAX_VOXELS = 400_000
"""Size of the first volume of each kind that the viewer gets; larger ones are downsampled."""

MAX_VOXELS_OF_OTHERS = 120_000
"""Size of the volumes after the first, so that a page with all of them stays small."""

MAX_COPIES = 4
"""How many volumes of each kind one validation keeps."""

ROLE = re.compile(r"(?P<kind>[a-z]+)_(?P<place>\d+)")
"""What a volume is, such as sample or target, or the kind of condition, and its place among those."""


@dataclass(frozen=True)
class ViewerVolume:
    """One channel as bytes (D, H, W), downsampled from `grid` if that is too large; its axes point to RAS.

    `spacing_mm` is the distance between neighbouring voxels of `grid`. `name` says which volume this is, and `note`
    adds to it, for example its class.
    """

    voxels: np.ndarray
    grid: tuple[int, ...]
    spacing_mm: tuple[float, ...]
    name: str
    note: str = ""

    @classmethod
    def of(
        cls, volume: Tensor, spacing_mm: tuple[float, ...], name: str, note: str = "", place: int = 0
    ) -> ViewerVolume:
        """Downsample the first channel of a (C, D, H, W) volume in [-1, 1] on its device and copy it to the host.

        `place` counts the volumes of one kind; only the first is kept in its full size.
        """
        channel = to_unit(volume[0].detach().float())
        size = shown_grid(tuple(channel.shape), MAX_VOXELS_OF_OTHERS if place else MAX_VOXELS)
        shown = F.interpolate(channel[None, None], size=size, mode="area")[0, 0]
        voxels = (shown * 255).round().to(torch.uint8).cpu().numpy()
        return cls(voxels, tuple(channel.shape), spacing_mm, printable(name), printable(note))


@dataclass(frozen=True)
class Preview:
    """One picture (H, W) in [0, 1], and volumes by role for the report's viewer."""

    picture: Tensor
    volumes: dict[str, ViewerVolume]


def shown_grid(grid: tuple[int, ...], max_voxels: int = MAX_VOXELS) -> tuple[int, ...]:
    """Return the grid with its longest axes shortened until it has at most `max_voxels` voxels."""
    longest = max(grid)
    while math.prod(min(axis, longest) for axis in grid) > max_voxels:
        longest -= 1
    return tuple(min(axis, longest) for axis in grid)


def save_viewer_volumes(run: RunFolder, stage: str, step: int, volumes: Mapping[str, ViewerVolume]) -> None:
    """Write volumes by role (input_0, reconstruction_0, sample_0, nearest_0, real_0, ...)."""
    folder = viewer_folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    for role, volume in volumes.items():
        assert ROLE.fullmatch(role), f"{role} is not a role of a volume"
        depth, height, width = volume.voxels.shape
        # About square, because browsers limit each side.
        columns = max(1, min(depth, round(math.sqrt(depth * height / width))))
        rows = math.ceil(depth / columns)
        tiles = np.zeros((rows * columns, height, width), dtype=np.uint8)
        tiles[:depth] = volume.voxels
        tiles = tiles.reshape(rows, columns, height, width).transpose(0, 2, 1, 3)
        picture = Image.fromarray(tiles.reshape(rows * height, columns * width))
        layout = {"shape": volume.voxels.shape, "grid": volume.grid, "columns": columns}
        names = {"orientation": "RAS", "name": volume.name, "note": volume.note}
        facts = PngInfo()
        facts.add_text(FACTS, json.dumps({**layout, "spacing_mm": volume.spacing_mm, **names}))
        with replacing(folder / f"{stage}_{step:08d}_{role}.png") as temporary:
            picture.save(temporary, "PNG", pnginfo=facts, compress_level=6)


def viewer_folder(run: RunFolder) -> Path:
    """Return the folder of a run's viewer volumes."""
    return run.previews / "volumes"
