"""Reads DICOM series: the images of one series in one folder are one volume, named by its first file."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from pydicom.config import IGNORE

from data.files.header import DAMAGE, DamagedError, Header, Stored, UnsuitableError, library
from data.files.images import LPS_TO_RAS
from runtime.files import printable

SUFFIXES = (".dcm", ".dicom", ".ima")

# Values that break the standard's rules are common; the ones that matter are checked here.
pydicom.config.settings.reading_validation_mode = IGNORE
# It logs the tracebacks of files whose problems we report ourselves.
pydicom.config.logger.setLevel("CRITICAL")

TAGS = [
    *("SOPClassUID", "SeriesInstanceUID", "ImageType", "Modality", "Rows", "Columns", "NumberOfFrames"),
    *("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "RescaleSlope", "RescaleIntercept"),
    *("SamplesPerPixel", "BitsAllocated", "BitsStored", "PixelRepresentation", "ModalityLUTSequence"),
    *("PhotometricInterpretation", "PixelPaddingValue", "PixelPaddingRangeLimit"),
]

# Modalities of files that hold no image.
WITHOUT_IMAGE = {"SR", "PR", "KO", "DOC", "RTSTRUCT", "RTPLAN", "RTRECORD", "REG", "FID", "AU", "ECG", "PLAN", "RWV"}


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


@dataclass(frozen=True)
class FolderOfImages:
    """The images of a folder by series, and the files that look like DICOM but cannot be read."""

    series: dict[str, tuple[Slice, ...]]
    unreadable: tuple[Path, ...]
    others: tuple[Path, ...]
    """Readable DICOM files without pixels, such as reports."""

    def series_of(self, path: Path) -> tuple[Slice, ...]:
        """Return the images of the series that a file belongs to; none if that is not known."""
        return next((images for images in self.series.values() if any(image.path == path for image in images)), ())


def is_dicom(path: Path) -> bool:
    """Return whether a file is DICOM by its suffix or, if it has none, by its first bytes."""
    if path.suffix.lower() in SUFFIXES:
        return True
    if path.suffix and not path.suffix[1:].isdigit():
        return False
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return False


def scan(folder: Path) -> FolderOfImages:
    """Read the headers of all DICOM files in a folder; unchanged folders are not read twice."""
    entries = []
    with os.scandir(folder) as listing:
        for entry in listing:
            if entry.name.startswith(".") or entry.is_dir():
                continue
            # A link to nothing may have been a slice; elsewhere than in a link only regular files are opened.
            is_broken = entry.is_symlink() and not os.path.exists(entry.path)
            if is_broken or entry.is_file():
                status = entry.stat(follow_symlinks=not is_broken)
                entries.append((entry.name, status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns))
    return _scan(folder, tuple(sorted(entries)))


@lru_cache(maxsize=4096)
def _scan(folder: Path, entries: tuple[tuple[Any, ...], ...]) -> FolderOfImages:
    series: dict[str, list[Slice]] = {}
    unreadable: list[Path] = []
    others: list[Path] = []
    for name, *_ in entries:
        path = folder / name
        if not is_dicom(path):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                values = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=TAGS)
                uid, kinds = str(values.get("SeriesInstanceUID", "")), values.get("ImageType") or ()
                has_image = bool(values.get("Rows")) and bool(values.get("Columns"))
                is_other = name.upper() == "DICOMDIR" or str(values.get("Modality")) in WITHOUT_IMAGE
        except DAMAGE["dicom"]:
            unreadable.append(path)
            continue
        if not has_image:
            # The header of an image may be cut before it says how large the image is.
            (others if is_other else unreadable).append(path)
            continue
        is_localizer = "LOCALIZER" in [str(kind).upper() for kind in ([kinds] if isinstance(kinds, str) else kinds)]
        series.setdefault(uid, []).append(Slice(path, uid, is_localizer, values))
    return FolderOfImages({uid: tuple(images) for uid, images in series.items()}, tuple(unreadable), tuple(others))


def slices_of(path: Path) -> tuple[Slice, ...]:
    """Return the images of the series that a file belongs to, without localizers unless there is nothing else."""
    folder = scan(path.parent)
    series = folder.series_of(path)
    if not series:
        with library("dicom"):
            pydicom.dcmread(path, stop_before_pixels=True)
        raise UnsuitableError("a DICOM file without an image; remove it")
    images = tuple(image for image in series if not image.is_localizer)
    if not images:
        raise UnsuitableError("a localizer, not a volume; remove it")
    if folder.unreadable:
        names = ", ".join(printable(bad.name) for bad in folder.unreadable[:3])
        raise UnsuitableError(
            f"{names} beside it cannot be read as DICOM and may be one of its slices; copy the folder again, or remove "
            "the file"
        )
    return images


def files_of(path: Path) -> list[Path]:
    """Return the files of the series that a file belongs to, or the file alone if that is not known."""
    try:
        folder = scan(path.parent)
    except OSError:
        return [path]
    images = folder.series_of(path)
    # A damaged neighbour makes the series unusable, so its repair must count as a change.
    return [*(image.path for image in images), *folder.unreadable] if images else [path]


def parted(paths: Iterable[Path]) -> dict[Path, str]:
    """Return which of these files stand for a part of a series only, each with a text that says where the rest is.

    Slices of one series in several folders belong together, unless some of them are at the same places: then the
    folders hold copies, or the phases of a 4D series.
    """
    parts: dict[str, dict[Path, tuple[Slice, ...]]] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            images = scan(path.parent).series_of(path)
            if images and images[0].series:
                parts.setdefault(images[0].series, {})[path] = images
    texts = {}
    for series in parts.values():
        places = [{str(image.get("ImagePositionPatient")) for image in images} for images in series.values()]
        folders = {path.parent for path in series}
        if len(folders) == len(places) > 1 and len(set.union(*places)) == sum(map(len, places)):
            for path, images in series.items():
                others = ", ".join(printable(folder.name) for folder in sorted(folders - {path.parent})[:3])
                texts[path] = (
                    f"{len(images)} slices of a series that goes on in {others}; the slices of a volume must be in one "
                    "folder; move them together, or give each scan a SeriesInstanceUID of its own"
                )
    return texts


def read_header(path: Path) -> Header:
    """Check that a series is one regular volume, and return its geometry."""
    images = ordered(slices_of(path))
    first = images[0]
    rows, columns = (int(first.numbers(name, 1)[0]) for name in ("Rows", "Columns"))
    row_mm, column_mm = first.numbers("PixelSpacing", 2)
    along_row, along_column = first.numbers("ImageOrientationPatient", 6).reshape(2, 3)
    positions = [image.numbers("ImagePositionPatient", 3) for image in images]
    affine = np.eye(4)
    step = (positions[-1] - positions[0]) / (len(images) - 1)
    affine[:3, :3] = LPS_TO_RAS @ np.column_stack([along_row * column_mm, along_column * row_mm, step])
    affine[:3, 3] = LPS_TO_RAS @ positions[0]
    shape = (columns, rows, len(images))
    return Header(shape, 1, affine, _dtype(images), True, shape)


def read_voxels(path: Path, header: Header) -> Stored:
    """Read the images of a series in the order of their positions."""
    images = ordered(slices_of(path))
    scales = {image.scale() for image in images}
    columns, rows, number = header.shape
    if number != len(images):
        raise UnsuitableError("it changed while it was read; run the same command again")
    # Slices with scales of their own become intensities one by one; otherwise they stay as they are stored.
    array = np.empty((number, rows, columns), np.dtype(header.dtype) if len(scales) == 1 else np.float32)
    has_padding = any(image.get("PixelPaddingValue") is not None for image in images)
    is_image = np.ones(array.shape, bool) if has_padding else None
    for number, image in enumerate(images):
        pixels = _pixels(image, (rows, columns))
        if is_image is not None:
            is_image[number] = ~image.is_padding(pixels)
        slope, intercept = image.scale()
        array[number] = pixels if len(scales) == 1 else pixels * slope + intercept
    slope, intercept = scales.pop() if len(scales) == 1 else (1.0, 0.0)
    if is_image is not None and is_image.any():
        # Padding lies outside the range of the scanner, such as -2000 in CT, and would stretch that of the volume.
        inside = array[is_image]
        array[~is_image] = inside.min() if slope > 0 else inside.max()
    return Stored(array.T[None], slope, intercept)


def _dtype(images: Sequence[Slice]) -> str:
    """Return the smallest type that holds the pixels of all slices."""
    kinds = []
    for image in images:
        bits = int(image.numbers("BitsAllocated", 1)[0])
        if bits not in (8, 16, 32):
            raise UnsuitableError(f"{printable(image.path.name)} has pixels of {bits} bits; 8, 16 or 32 are allowed")
        kinds.append(np.dtype(f"{'i' if image.get('PixelRepresentation') else 'u'}{bits // 8}"))
    return np.result_type(*kinds).str


def _pixels(image: Slice, shape: tuple[int, int]) -> np.ndarray:
    syntax = None
    try:
        with library("dicom"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = pydicom.dcmread(image.path)
            syntax = content.file_meta.get("TransferSyntaxUID")
            pixels = content.pixel_array
    except DamagedError as error:
        text = printable(" ".join(str(error.__cause__).split()))
        if "missing dependencies" in text and syntax is not None:
            raise UnsuitableError(
                f"its slices are compressed as {printable(syntax.name)}, which needs a decoder; run pip install "
                "python-gdcm, or export the series without compression"
            ) from error
        raise UnsuitableError(
            f"its slice {printable(image.path.name)} cannot be read ({text[:120]}); copy it again, or export it "
            "without compression"
        ) from error
    if pixels.shape != shape:
        raise UnsuitableError(f"{printable(image.path.name)} has other pixels than its header says; export it again")
    return pixels


def ordered(images: Sequence[Slice]) -> list[Slice]:
    """Return images in the order of their positions; raise UnsuitableError unless they are one regular stack."""
    _require_plain(images)
    if len(images) < 2:
        raise UnsuitableError("a single image; a volume needs two slices or more; remove it")
    for name, (count, relative, absolute) in SHARED.items():
        first = images[0].numbers(name, count)
        other = next((i for i in images if not np.allclose(i.numbers(name, count), first, relative, absolute)), None)
        if other is not None:
            raise UnsuitableError(
                f"its slices differ in {name}, for example {printable(images[0].path.name)} and "
                f"{printable(other.path.name)}; one value is allowed; separate them or remove the odd ones"
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
    # The lower one of two in the middle: if there are two distances only, a slice is missing in the larger.
    usual = float(np.sort(gaps)[(len(gaps) - 1) // 2])
    for gap, (one, two) in zip(gaps.tolist(), pairwise(images), strict=True):
        if usual <= 0 or abs(gap - usual) > LARGEST_IRREGULARITY * usual:
            raise UnsuitableError(
                f"{printable(one.path.name)} and {printable(two.path.name)} are {gap:.3g} mm apart, other slices "
                f"{usual:.3g} mm; equal distances are needed; copy the series again if slices are missing, remove "
                "doubled ones, or separate the phases of a 4D series"
            )
