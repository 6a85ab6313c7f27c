"""Orders the images of a DICOM series, and says why they are not a regular stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data.files.header import DAMAGE, UnsuitableError
from runtime.files.names import printable

# Elements that all slices share: how many numbers they hold, and by how much (relative, absolute) these may differ,
# because scanners write rounded numbers.
SHARED = {
    "Rows": (1, 0.0, 0.0),
    "Columns": (1, 0.0, 0.0),
    "PixelSpacing": (2, 1e-3, 0.0),
    "ImageOrientationPatient": (6, 0.0, 1e-3),
}

# Relative to the distance between slices.
LARGEST_IRREGULARITY = 0.05
LARGEST_TILT_DEGREES = 1.0


@dataclass(frozen=True)
class Slice:
    """One image of a series: its file and the elements of its header that place and scale it."""

    path: Path
    series: str
    is_localizer: bool
    values: Any
    """The header without its pixels."""

    def get(self, name: str) -> Any:
        """Return an element, None if it is missing, or its text if it is not of its own type."""
        try:
            return self.values.get(name)
        except DAMAGE["dicom"]:
            raw = self.values.get_item(name).value
            return raw.decode("latin-1") if isinstance(raw, bytes) else str(raw)

    def numbers(self, name: str, count: int) -> np.ndarray:
        """Return an element as `count` finite numbers; raise UnsuitableError if it is not that."""
        value = self.get(name)
        try:
            numbers = np.array(value, dtype=np.float64).reshape(-1)
        except (TypeError, ValueError):
            numbers = np.empty(0)
        if numbers.size != count or not np.isfinite(numbers).all():
            raise UnsuitableError(
                f"{printable(self.path.name)} has {name} {printable(value)[:40]}; {count} finite "
                f"{'number is' if count == 1 else 'numbers are'} needed; export the series again"
            )
        return numbers

    def scale(self) -> tuple[float, float]:
        """Return slope and intercept; 1 and 0 where the header gives none."""
        slope = self.numbers("RescaleSlope", 1)[0] if self.get("RescaleSlope") is not None else 1.0
        shift = self.numbers("RescaleIntercept", 1)[0] if self.get("RescaleIntercept") is not None else 0.0
        if slope == 0:
            raise UnsuitableError(f"{printable(self.path.name)} has RescaleSlope 0; export the series again")
        if str(self.get("PhotometricInterpretation")).strip() == "MONOCHROME1" and str(self.get("Modality")) != "CT":
            # Low pixels are bright. Those of CT are Hounsfield units, however they are displayed.
            bits = int(self.numbers("BitsStored", 1)[0])
            ends = -1.0 if self.get("PixelRepresentation") else 2.0**bits - 1  # the lowest plus the highest pixel
            slope, shift = -slope, shift + slope * ends
        return float(slope), float(shift)

    def is_padding(self, pixels: np.ndarray) -> np.ndarray:
        """Return where pixels, as they are stored, are padding by PixelPaddingValue and PixelPaddingRangeLimit."""
        if self.get("PixelPaddingValue") is None:
            return np.zeros(pixels.shape, bool)
        names = [name for name in ("PixelPaddingValue", "PixelPaddingRangeLimit") if self.get(name) is not None]
        # Signed values are often written as unsigned ones of the same bits.
        ends = [np.int64(self.numbers(name, 1)[0]).astype(pixels.dtype) for name in names]
        return (pixels >= min(ends)) & (pixels <= max(ends))


def ordered(images: Sequence[Slice]) -> list[Slice]:
    """Return images in the order of their positions; raise UnsuitableError unless they are one regular stack."""
    _require_plain(images)
    if len(images) < 2:
        raise UnsuitableError("a single image; a volume needs two slices or more; remove it")
    for name in SHARED:
        kinds = _kinds(images, name)
        if len(kinds) > 1:
            what = "orientations" if name == "ImageOrientationPatient" else f"values of {name}"
            raise UnsuitableError(
                f"its {len(images)} slices have {len(kinds)} {what}, for example {printable(kinds[1][0].path.name)}; "
                "one is allowed; separate them or remove the odd ones"
            )
    spacing = images[0].numbers("PixelSpacing", 2)
    if (spacing <= 0).any():
        raise UnsuitableError(
            f"its PixelSpacing is {spacing[0]:g} and {spacing[1]:g} mm; two numbers above 0 are needed; export the "
            "series again"
        )
    along_row, along_column = images[0].numbers("ImageOrientationPatient", 6).reshape(2, 3)
    normal = np.cross(along_row, along_column)
    places = {image.path: float(normal @ image.numbers("ImagePositionPatient", 3)) for image in images}
    result = sorted(images, key=lambda image: (places[image.path], image.path.name))
    _require_regular(result, [places[image.path] for image in result])
    step = result[-1].numbers("ImagePositionPatient", 3) - result[0].numbers("ImagePositionPatient", 3)
    tilt = np.degrees(np.arccos(min(1.0, abs(float(normal @ step)) / float(np.linalg.norm(step)))))
    if tilt > LARGEST_TILT_DEGREES:
        raise UnsuitableError(
            f"its slices are shifted against each other (gantry tilt of {tilt:.0f} degrees); straight stacks are "
            "allowed; resample it first"
        )
    return result


def _kinds(images: Sequence[Slice], name: str) -> list[list[Slice]]:
    """Group images by an element that they should share, the largest group first."""
    count, relative, absolute = SHARED[name]
    kinds: list[tuple[np.ndarray, list[Slice]]] = []
    for image in images:
        values = image.numbers(name, count)
        for first, group in kinds:
            if np.allclose(values, first, relative, absolute):
                group.append(image)
                break
        else:
            kinds.append((values, [image]))
    return sorted((group for _, group in kinds), key=len, reverse=True)


def _require_plain(images: Sequence[Slice]) -> None:
    for image in images:
        name = printable(image.path.name)
        if image.get("NumberOfFrames") is not None and image.numbers("NumberOfFrames", 1)[0] > 1:
            raise UnsuitableError(
                f"{name} holds many frames in one file; one image per file is read; convert it to NIfTI"
            )
        if image.get("SamplesPerPixel") is not None and image.numbers("SamplesPerPixel", 1)[0] > 1:
            raise UnsuitableError(f"{name} is a colour image; single intensities are read; remove it")
        if image.get("ModalityLUTSequence"):
            raise UnsuitableError(f"{name} is scaled by a table (ModalityLUTSequence); convert it to NIfTI")


def _require_regular(images: Sequence[Slice], places: Sequence[float]) -> None:
    """Raise UnsuitableError, naming the slices, unless all distances are equal."""
    gaps = np.diff(places)
    named = [
        (gap, f"{printable(one.path.name)} and {printable(two.path.name)}")
        for gap, (one, two) in zip(gaps.tolist(), pairwise(images), strict=True)
    ]
    for gap, names in named:
        if gap <= LARGEST_IRREGULARITY * max(float(np.median(gaps)), 1e-6):
            raise UnsuitableError(
                f"two slices at one place, {names}; one is allowed; remove the doubled one, or separate the phases of "
                "a 4D series"
            )
    # The lower one of two in the middle: if there are two distances only, a slice is missing in the larger.
    usual = float(np.sort(gaps)[(len(gaps) - 1) // 2])
    for gap, names in named:
        missing = round(gap / usual) - 1
        if missing >= 1:
            raise UnsuitableError(
                f"{missing} {'slice is' if missing == 1 else 'slices are'} missing between {names} ({gap:.3g} mm "
                f"apart, the others {usual:.3g} mm); copy or export the series again"
            )
        if abs(gap - usual) > LARGEST_IRREGULARITY * usual:
            raise UnsuitableError(
                f"the distance between slices varies ({gap:.3g} mm between {names}, usually {usual:.3g} mm); equal "
                "distances are needed; resample it first"
            )
