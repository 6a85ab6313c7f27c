"""Previews that validation leaves for the report: a picture, and downsampled volumes for the slice viewer.

A volume is stored as one grey PNG that tiles all slices along the first axis; the page cuts any plane from its pixels.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from torch.nn import functional as F

from runtime.files.atomic import replacing
from runtime.files.names import printable
from runtime.files.run_folder import RunFolder

FACTS = "volume"
"""Key of the PNG text that holds shape, grid, columns, spacing, orientation, name and note as JSON."""

MAX_VOXELS = 400_000
"""Size of the first volume of each kind that the viewer gets; larger ones are downsampled."""

MAX_VOXELS_OF_OTHERS = 120_000
"""Size of the volumes after the first, so that a page with all of them stays small."""

MAX_COPIES = 4
"""How many volumes of each kind one validation keeps."""

ROLE = re.compile(r"(?P<kind>input|reconstruction|sample|nearest|real|labelmap|volume|target)_(?P<place>\d+)")
"""The kind of a volume and its place among those of its kind."""


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
        channel = (volume[0].detach().float() / 2 + 0.5).clamp(0, 1)
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
        columns = _columns(volume.voxels.shape)
        layout = {"shape": volume.voxels.shape, "grid": volume.grid, "columns": columns}
        names = {"orientation": "RAS", "name": volume.name, "note": volume.note}
        facts = PngInfo()
        facts.add_text(FACTS, json.dumps({**layout, "spacing_mm": volume.spacing_mm, **names}))
        with replacing(folder / f"{stage}_{step:08d}_{role}.png") as temporary:
            Image.fromarray(_tiles(volume.voxels, columns)).save(temporary, "PNG", pnginfo=facts, compress_level=6)


def viewer_folder(run: RunFolder) -> Path:
    """Return the folder of a run's viewer volumes."""
    return run.previews / "volumes"


def _columns(shape: tuple[int, ...]) -> int:
    """Return the number of slices per row that makes the picture about square, because browsers limit each side."""
    depth, height, width = shape
    return max(1, min(depth, round(math.sqrt(depth * height / width))))


def _tiles(voxels: np.ndarray, columns: int) -> np.ndarray:
    depth, height, width = voxels.shape
    rows = math.ceil(depth / columns)
    padded = np.zeros((rows * columns, height, width), dtype=np.uint8)
    padded[:depth] = voxels
    return padded.reshape(rows, columns, height, width).transpose(0, 2, 1, 3).reshape(rows * height, columns * width)
