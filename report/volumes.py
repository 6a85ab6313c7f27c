"""Read the small volumes of the slice viewer, which `evaluation.previews` saves at each validation.

A volume is one grey PNG with all slices along its first axis as tiles; the page reads the pixels and cuts any plane.
"""

from __future__ import annotations

import base64
import io
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import BaseModel, PositiveInt

from evaluation.previews import FACTS, viewer_folder
from storage.reading import check_regular
from storage.run_folder import RunFolder

# Errors that Pillow raises for damaged images, and errors from metadata that is missing or not ours.
PICTURE_ERRORS = (OSError, SyntaxError, ValueError, KeyError, EOFError, struct.error, Image.DecompressionBombError)
_NAME = re.compile(r"(?P<stage>[a-z]+)_(?P<step>\d{8})_(?P<role>[a-z0-9_]+)\.png")


class _Facts(BaseModel):
    """How the slices of a volume are laid out in its image."""

    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    grid: tuple[PositiveInt, ...]
    columns: PositiveInt

    @property
    def picture_size(self) -> tuple[int, int]:
        """Return the width and height of the image."""
        depth, height, width = self.shape
        return self.columns * width, math.ceil(depth / self.columns) * height


@dataclass(frozen=True)
class StoredVolume:
    """A saved volume of the slice viewer."""

    path: Path
    stage: str
    step: int
    role: str

    def to_page(self) -> dict[str, Any] | None:
        """Return shape, grid, tiles per row and the PNG as a data URL; None if the file is damaged."""
        try:
            check_regular(self.path)
            content = self.path.read_bytes()
            with Image.open(io.BytesIO(content)) as picture:
                picture.load()
                facts = _Facts.model_validate_json(getattr(picture, "text", {})[FACTS])
                is_whole = picture.size == facts.picture_size
        except PICTURE_ERRORS:
            return None
        encoded = base64.b64encode(content).decode("ascii")
        return {**facts.model_dump(), "source": f"data:image/png;base64,{encoded}"} if is_whole else None


def stored_volumes(run: RunFolder) -> list[StoredVolume]:
    """Return a run's saved volumes, newest step first, then by file name."""
    found = []
    for path in sorted(viewer_folder(run).glob("*.png")):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found.append(StoredVolume(path, match["stage"], int(match["step"]), match["role"]))
    return sorted(found, key=lambda volume: -volume.step)
