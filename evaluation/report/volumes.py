"""Read the small volumes of the slice viewer, which `training.validation.previews` saves at each validation.

A volume is one grey PNG with all slices along its first axis as tiles; the page reads the pixels and cuts any plane.
"""

from __future__ import annotations

import base64
import io
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from runtime.files.reading import check_regular
from runtime.files.run_folder import RunFolder
from training.validation.previews import FACTS, ROLE, viewer_folder

# Errors that Pillow raises for damaged images, and errors from metadata that is missing or not ours.
PICTURE_ERRORS = (OSError, SyntaxError, ValueError, KeyError, EOFError, struct.error, Image.DecompressionBombError)
_NAME = re.compile(rf"(?P<stage>[a-z]+)_(?P<step>\d{{8}})_(?P<role>{ROLE.pattern})\.png")


class _Facts(BaseModel):
    """How the slices of a volume are laid out in its image, and what is known about the volume."""

    model_config = ConfigDict(allow_inf_nan=False)

    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    grid: tuple[PositiveInt, PositiveInt, PositiveInt]
    columns: PositiveInt
    spacing_mm: tuple[PositiveFloat, PositiveFloat, PositiveFloat]
    orientation: str = Field(pattern=r"^[RL][AP][SI]$")
    name: str
    note: str

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
    place: int

    def content(self) -> bytes | None:
        """Return the bytes of the file; None if it cannot be read."""
        try:
            check_regular(self.path)
            return self.path.read_bytes()
        except OSError:
            return None


def _facts(content: bytes) -> dict[str, Any] | None:
    """Return what a PNG says about its volume; None if it is damaged."""
    try:
        with Image.open(io.BytesIO(content)) as picture:
            picture.load()
            facts = _Facts.model_validate_json(getattr(picture, "text", {})[FACTS])
            return facts.model_dump() if picture.size == facts.picture_size else None
    except PICTURE_ERRORS:
        return None


def stored_volumes(run: RunFolder) -> list[StoredVolume]:
    """Return a run's saved volumes by file name."""
    matches = [(path, _NAME.fullmatch(path.name)) for path in sorted(viewer_folder(run).glob("*.png"))]
    return [StoredVolume(p, m["stage"], int(m["step"]), m["role"], int(m["place"])) for p, m in matches if m]


def viewer_data(run: RunFolder, budget: int) -> dict[str, Any]:
    """Return the sets of volumes for the slice viewer, newest first, and their images.

    The first volumes of the newest set of each stage are always included, all others while the budget allows.
    """
    sets: dict[tuple[str, int], dict[str, Any]] = {}
    pictures: dict[str, int] = {}
    used = 0
    for stored, is_needed in _by_importance(stored_volumes(run)):
        content = stored.content()
        source = f"data:image/png;base64,{base64.b64encode(content or b'').decode('ascii')}"
        # The inputs and the real volumes are the same images at every validation, so they are embedded only once.
        size = 0 if source in pictures else len(source)
        # Decoding takes longest, so it comes last.
        if content is None or (not is_needed and used + size > budget) or (volume := _facts(content)) is None:
            continue
        used += size
        volume["picture"] = pictures.setdefault(source, len(pictures))
        entry: dict[str, Any] = {"stage": stored.stage, "step": stored.step, "volumes": {}}
        sets.setdefault((stored.stage, stored.step), entry)["volumes"][stored.role] = volume
    for entry in sets.values():
        entry["volumes"] = _whole_columns(entry["volumes"])
    shown = sorted((entry for entry in sets.values() if entry["volumes"]), key=lambda entry: -entry["step"])
    return {"sets": shown, "pictures": list(pictures)}


def _by_importance(volumes: Sequence[StoredVolume]) -> list[tuple[StoredVolume, bool]]:
    """Return the volumes in the order in which the page takes them, and whether it always takes them."""
    newest: dict[str, int] = {}
    for volume in volumes:
        newest[volume.stage] = max(newest.get(volume.stage, 0), volume.step)
    ordered = sorted(volumes, key=lambda volume: (volume.step != newest[volume.stage], -volume.step, volume.place))
    return [(volume, volume.step == newest[volume.stage] and volume.place == 0) for volume in ordered]


def _whole_columns(volumes: dict[str, Any]) -> dict[str, Any]:
    """Leave out inputs without their reconstructions, the reverse, and what only accompanies samples."""
    partners = {"input": "reconstruction", "reconstruction": "input"}
    partners |= dict.fromkeys(("nearest", "real", "labelmap", "volume", "target"), "sample")
    kept = {}
    for role, volume in volumes.items():
        kind, place = role.split("_")
        partner = f"{partners.get(kind, kind)}_{0 if kind == 'real' else place}"
        if partner in volumes:
            kept[role] = volume
    return kept
