"""Read the small volumes of the slice viewer, which `training.validation.previews` saves at each validation.

A volume is one grey PNG with all slices along its first axis as tiles; the page reads the pixels and cuts any plane.
"""

from __future__ import annotations

import base64
import io
import math
import re
import struct
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from runtime.files import RunFolder, check_regular
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


def viewer_data(run: RunFolder, budget: int) -> dict[str, Any]:
    """Return the sets of volumes for the slice viewer, newest first, and their images.

    The first volumes of the newest set of each stage are always included, all others while the budget allows.
    """
    sets: dict[tuple[str, int], dict[str, Any]] = {}
    pictures: dict[str, int] = {}
    used = 0
    for match, is_needed in _by_importance(run):
        content = _content(viewer_folder(run) / match.string)
        source = f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"
        # The inputs and the real volumes are the same images at every validation, so they are embedded only once.
        size = 0 if source in pictures else len(source)
        # Decoding takes longest, so it comes last.
        if (not is_needed and used + size > budget) or (volume := _facts(content)) is None:
            continue
        used += size
        volume["picture"] = pictures.setdefault(source, len(pictures))
        stage, step = match["stage"], int(match["step"])
        entry: dict[str, Any] = {"stage": stage, "step": step, "volumes": {}}
        sets.setdefault((stage, step), entry)["volumes"][match["role"]] = volume
    for entry in sets.values():
        entry["volumes"] = _whole_columns(entry["volumes"])
    shown = sorted((entry for entry in sets.values() if entry["volumes"]), key=lambda entry: -entry["step"])
    return {"sets": shown, "pictures": list(pictures)}


def _by_importance(run: RunFolder) -> list[tuple[re.Match[str], bool]]:
    """Return the names of the saved volumes in the order in which the page takes them, and whether it always does."""
    found = [match for path in viewer_folder(run).glob("*.png") if (match := _NAME.fullmatch(path.name))]
    newest = {match["stage"]: match["step"] for match in sorted(found, key=lambda match: match["step"])}
    ranked = [(m["step"] != newest[m["stage"]], -int(m["step"]), int(m["place"]), m.string, m) for m in found]
    return [(match, not is_older and place == 0) for is_older, _, place, _, match in sorted(ranked)]


def _content(path: Path) -> bytes:
    """Return the bytes of a file; none if it cannot be read."""
    try:
        check_regular(path)
        return path.read_bytes()
    except OSError:
        return b""


def _facts(content: bytes) -> dict[str, Any] | None:
    """Return what a PNG says about its volume; None if it is damaged."""
    try:
        with Image.open(io.BytesIO(content)) as picture:
            picture.load()
            facts = _Facts.model_validate_json(getattr(picture, "text", {})[FACTS])
            depth, height, width = facts.shape
            size = facts.columns * width, math.ceil(depth / facts.columns) * height
            return facts.model_dump() if picture.size == size else None
    except PICTURE_ERRORS:
        return None


def _whole_columns(volumes: dict[str, Any]) -> dict[str, Any]:
    """Leave out inputs without their reconstructions, the reverse, and what only accompanies samples."""
    partners = {"input": "reconstruction", "reconstruction": "input", "sample": "sample"}
    kept = {}
    for role, volume in volumes.items():
        kind, place = role.split("_")
        if f"{partners.get(kind, 'sample')}_{0 if kind == 'real' else place}" in volumes:
            kept[role] = volume
    return kept
