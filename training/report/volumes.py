"""Small copies of volumes for the report's slice viewer: saved at validation, read when the page is written.

A volume is one grey PNG with all slices of its first axis as tiles; the page reads the pixels back and cuts any plane.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pydantic import BaseModel, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from settings.files import check_regular
from training.run_folder import RunFolder

MAX_VOXELS = 500_000
MAX_COPIES = 4
"""Volumes of one validation that are kept, for instance samples."""
_FACTS = "volume"

# What Pillow raises for damaged pictures, and what a text chunk that is not ours gives.
PICTURE_ERRORS = (OSError, SyntaxError, ValueError, KeyError, EOFError, struct.error, Image.DecompressionBombError)
_NAME = re.compile(r"(?P<stage>[a-z]+)_(?P<step>\d{8})_(?P<role>[a-z0-9_]+)\.png")


@dataclass(frozen=True)
class ViewerVolume:
    """One channel as bytes (D, H, W), possibly smaller than the `grid` it was made from."""

    voxels: np.ndarray
    grid: tuple[int, ...]

    @classmethod
    def of(cls, volume: Tensor) -> ViewerVolume:
        """Copy the first channel of a (C, D, H, W) volume in [-1, 1] to the host, made small on its own device."""
        channel = (volume[0].detach().float() / 2 + 0.5).clamp(0, 1)
        shown = F.interpolate(channel[None, None], size=shown_grid(tuple(channel.shape)), mode="area")[0, 0]
        return cls((shown * 255).round().to(torch.uint8).cpu().numpy(), tuple(channel.shape))


@dataclass(frozen=True)
class Preview:
    """What a validation shows: one picture (H, W) in [0, 1], and volumes by role for the report's viewer."""

    picture: Tensor
    volumes: dict[str, ViewerVolume]


def shown_grid(grid: tuple[int, ...]) -> tuple[int, ...]:
    """Return the grid with its longest axes cut until it has at most MAX_VOXELS voxels."""
    longest = max(grid)
    while math.prod(min(axis, longest) for axis in grid) > MAX_VOXELS:
        longest -= 1
    return tuple(min(axis, longest) for axis in grid)


def save_viewer_volumes(run: RunFolder, stage: str, step: int, volumes: Mapping[str, ViewerVolume]) -> list[Path]:
    """Write volumes by role: input and reconstruction, or sample_0, sample_1, ...; return the files."""
    folder = viewer_folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for role, volume in list(volumes.items())[:MAX_COPIES]:
        facts = PngInfo()
        columns = _columns(volume.voxels.shape)
        facts.add_text(_FACTS, json.dumps({"shape": volume.voxels.shape, "grid": volume.grid, "columns": columns}))
        path = folder / f"{stage}_{step:08d}_{role}.png"
        temporary = path.with_suffix(".tmp")
        Image.fromarray(_tiles(volume.voxels, columns)).save(temporary, "PNG", pnginfo=facts, compress_level=6)
        temporary.replace(path)
        paths.append(path)
    return paths


def viewer_folder(run: RunFolder) -> Path:
    """Return where the viewer's volumes of a run lie."""
    return run.previews / "volumes"


class _Facts(BaseModel):
    """How the slices of a volume lie in its picture."""

    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    grid: tuple[PositiveInt, ...]
    columns: PositiveInt

    @property
    def picture_size(self) -> tuple[int, int]:
        """Return width and height of the picture."""
        depth, height, width = self.shape
        return self.columns * width, math.ceil(depth / self.columns) * height


@dataclass(frozen=True)
class StoredVolume:
    """A volume of the viewer on disk."""

    path: Path
    stage: str
    step: int
    role: str

    def to_page(self) -> dict[str, Any] | None:
        """Return shape, grid, tiles a row and the PNG as a data address; None for a file that is no such volume."""
        try:
            check_regular(self.path)
            content = self.path.read_bytes()
            with Image.open(io.BytesIO(content)) as picture:
                picture.load()
                facts = _Facts.model_validate_json(getattr(picture, "text", {})[_FACTS])
                is_whole = picture.size == facts.picture_size
        except PICTURE_ERRORS:
            return None
        encoded = base64.b64encode(content).decode("ascii")
        return {**facts.model_dump(), "source": f"data:image/png;base64,{encoded}"} if is_whole else None


def stored_volumes(run: RunFolder) -> list[StoredVolume]:
    """Return the viewer's volumes of a run, newest step first, in the order of their roles."""
    found = []
    for path in sorted(viewer_folder(run).glob("*.png")):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found.append(StoredVolume(path, match["stage"], int(match["step"]), match["role"]))
    return sorted(found, key=lambda volume: -volume.step)


def _columns(shape: tuple[int, ...]) -> int:
    """Return how many slices a row of tiles holds so that the picture is about square: browsers limit each side."""
    depth, height, width = shape
    return max(1, min(depth, round(math.sqrt(depth * height / width))))


def _tiles(voxels: np.ndarray, columns: int) -> np.ndarray:
    depth, height, width = voxels.shape
    rows = math.ceil(depth / columns)
    padded = np.zeros((rows * columns, height, width), dtype=np.uint8)
    padded[:depth] = voxels
    return padded.reshape(rows, columns, height, width).transpose(0, 2, 1, 3).reshape(rows * height, columns * width)
