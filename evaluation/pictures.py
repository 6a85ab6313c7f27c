"""Pictures of volumes: the three middle planes, and comparisons of input, reconstruction and error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from storage.atomic import replacing

GAP = 2  # pixels between planes


def middle_planes(volume: Tensor) -> list[Tensor]:
    """Return the three middle planes of a (D, H, W) volume, each rotated so that its last axis points up."""
    return [torch.rot90(volume.select(axis, volume.shape[axis] // 2)) for axis in range(3)]


def tile(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return one (H, W) picture of rows of planes with values in [0, 1]."""
    height = max(plane.shape[0] for row in rows for plane in row)
    width = max(plane.shape[1] for row in rows for plane in row)
    padded = [torch.cat([_pad(plane, height, width) for plane in row], dim=1) for row in rows]
    return torch.cat(padded, dim=0)[:-GAP, :-GAP]


def _pad(plane: Tensor, height: int, width: int) -> Tensor:
    top, left = (height - plane.shape[0]) // 2, (width - plane.shape[1]) // 2
    right, bottom = width - plane.shape[1] - left, height - plane.shape[0] - top
    return F.pad(plane.float().cpu(), (left, right + GAP, top, bottom + GAP), value=0.0)


def reconstruction_picture(image: Tensor, reconstruction: Tensor) -> Tensor:
    """Return one row of planes each for input, reconstruction and error; volumes are (C, D, H, W) in [-1, 1]."""
    source, result = ((volume[0].float() / 2 + 0.5).clamp(0, 1) for volume in (image, reconstruction))
    error = ((result - source).abs() * 2).clamp(0, 1)
    return tile([middle_planes(volume) for volume in (source, result, error)])


def save_picture(path: Path, picture: Tensor) -> Tensor:
    """Write a picture with values in [0, 1] as a PNG and return its grey values (uint8)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = (picture.clamp(0, 1) * 255).round().to(torch.uint8)
    with replacing(path) as temporary:
        Image.fromarray(np.ascontiguousarray(pixels.numpy()), mode="L").save(temporary, "PNG")
    return pixels
