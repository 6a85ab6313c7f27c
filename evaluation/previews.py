"""Previews that validation leaves for the report: a picture, and downsampled volumes for the slice viewer.

A volume is stored as one grey PNG that tiles all slices along the first axis; the page cuts any plane from its pixels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from torch.nn import functional as F

from storage.atomic import replacing
from storage.run_folder import RunFolder

FACTS = "volume"
"""Key of the PNG text that holds shape, grid and columns as JSON."""

MAX_VOXELS = 500_000
"""Largest volume that the viewer gets; larger ones are downsampled."""

MAX_COPIES = 4
"""How many volumes of one validation are kept."""


@dataclass(frozen=True)
class ViewerVolume:
    """One channel as bytes (D, H, W), downsampled from `grid` if that is too large."""

    voxels: np.ndarray
    grid: tuple[int, ...]

    @classmethod
    def of(cls, volume: Tensor) -> ViewerVolume:
        """Downsample the first channel of a (C, D, H, W) volume in [-1, 1] on its device and copy it to the host."""
        channel = (volume[0].detach().float() / 2 + 0.5).clamp(0, 1)
        shown = F.interpolate(channel[None, None], size=shown_grid(tuple(channel.shape)), mode="area")[0, 0]
        return cls((shown * 255).round().to(torch.uint8).cpu().numpy(), tuple(channel.shape))


@dataclass(frozen=True)
class Preview:
    """One picture (H, W) in [0, 1], and volumes by role for the report's viewer."""

    picture: Tensor
    volumes: dict[str, ViewerVolume]


def shown_grid(grid: tuple[int, ...]) -> tuple[int, ...]:
    """Return the grid with its longest axes shortened until it has at most `MAX_VOXELS` voxels."""
    longest = max(grid)
    while math.prod(min(axis, longest) for axis in grid) > MAX_VOXELS:
        longest -= 1
    return tuple(min(axis, longest) for axis in grid)


def save_viewer_volumes(run: RunFolder, stage: str, step: int, volumes: Mapping[str, ViewerVolume]) -> list[Path]:
    """Write volumes by role (input and reconstruction, or sample_0, sample_1, ...); return the paths."""
    folder = viewer_folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for role, volume in list(volumes.items())[:MAX_COPIES]:
        facts = PngInfo()
        columns = _columns(volume.voxels.shape)
        facts.add_text(FACTS, json.dumps({"shape": volume.voxels.shape, "grid": volume.grid, "columns": columns}))
        path = folder / f"{stage}_{step:08d}_{role}.png"
        with replacing(path) as temporary:
            Image.fromarray(_tiles(volume.voxels, columns)).save(temporary, "PNG", pnginfo=facts, compress_level=6)
        paths.append(path)
    return paths


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
