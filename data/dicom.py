"""Reads DICOM series: the images of one series in one folder are one volume, named by its first file."""

from __future__ import annotations

import contextlib
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

from data.header import DAMAGE, DamagedError, Opened, Stored, UnsuitableError, header_of, library
from runtime.files import printable, shortened

SUFFIXES = (".dcm", ".dicom", ".ima")

# ITK and DICOM use LPS coordinates (left, posterior, superior), NIfTI uses RAS (right, anterior, superior).
LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0])

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


@dataclass(frozen=True)
class Slice:
    """One image of a series: its file and the elements of its header that place and scale it."""

    path: Path
    values: dict[str, Any]

    @property
    def is_localizer(self) -> bool:
        """Return whether it is a picture to plan the scan with."""
        kinds = self.get("ImageType") or ()
        return "LOCALIZER" in [str(kind).upper() for kind in ([kinds] if isinstance(kinds, str) else kinds)]

    def get(self, name: str) -> Any:
        """Return an element, or None if it is missing."""
        return self.values[name]

    def refuse(self, name: str, allowed: str) -> UnsuitableError:
        """Return the error for an element that makes the series unusable."""
        found = f"{printable(self.path.name)} has {name} {shortened(printable(self.get(name)), 40)}"
        return UnsuitableError(f"{found}; {allowed}; export the series again, or convert it to NIfTI")

    def numbers(self, name: str, count: int) -> np.ndarray:
        """Return an element as `count` finite numbers; raise UnsuitableError if it is not that."""
        try:
            numbers = np.array(self.get(name), dtype=np.float64).reshape(-1)
        except (TypeError, ValueError):
            numbers = np.empty(0)
        if numbers.size != count or not np.isfinite(numbers).all():
            raise self.refuse(name, f"finite numbers are needed, {count} of them")
        return numbers

    def number(self, name: str, default: float) -> float:
        """Return an element that is one number."""
        return default if self.get(name) is None else float(self.numbers(name, 1)[0])

    def scale(self) -> tuple[float, float]:
        """Return slope and intercept; 1 and 0 where the header gives none."""
        slope, shift = self.number("RescaleSlope", 1.0), self.number("RescaleIntercept", 0.0)
        if slope == 0:
            raise self.refuse("RescaleSlope", "a number other than 0 is needed")
        if str(self.get("PhotometricInterpretation")).strip() == "MONOCHROME1" and str(self.get("Modality")) != "CT":
            # Low pixels are bright. Those of CT are Hounsfield units, however they are displayed.
            bits = int(self.numbers("BitsStored", 1)[0])
            ends = -1.0 if self.get("PixelRepresentation") else 2.0**bits - 1  # the lowest plus the highest pixel
            slope, shift = -slope, shift + slope * ends
        return slope, shift

    def is_padding(self, pixels: np.ndarray) -> np.ndarray:
        """Return where pixels, as they are stored, are padding by PixelPaddingValue and PixelPaddingRangeLimit."""
        if self.get("PixelPaddingValue") is None:
            return np.zeros(pixels.shape, bool)
        names = [name for name in ("PixelPaddingValue", "PixelPaddingRangeLimit") if self.get(name) is not None]
        # Signed values are often written as unsigned ones of the same bits.
        ends = [np.int64(self.numbers(name, 1)[0]).astype(pixels.dtype) for name in names]
        return (pixels >= min(ends)) & (pixels <= max(ends))

    def pixels(self, shape: tuple[int, int]) -> np.ndarray:
        """Read the image itself."""
        syntax = None
        try:
            with library(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                content = pydicom.dcmread(self.path)
                syntax = content.file_meta.get("TransferSyntaxUID")
                pixels = content.pixel_array
        except DamagedError as error:
            text = printable(" ".join(str(error.__cause__).split()))
            if "missing dependencies" in text and syntax is not None:
                text = f"pip install python-gdcm decodes its {printable(syntax.name)}"
            raise UnsuitableError(
                f"its slice {printable(self.path.name)} cannot be read ({shortened(text, 120)}); copy it again, or "
                "export it without compression"
            ) from error
        if pixels.shape != shape:
            raise self.refuse("Rows", f"its pixels are of shape {pixels.shape}")
        return pixels


@dataclass(frozen=True)
class FolderOfImages:
    """The images of a folder by series, and the files that look like DICOM but cannot be read."""

    series: dict[str, tuple[Slice, ...]]
    unreadable: tuple[Path, ...]
    others: tuple[Path, ...]
    """Readable DICOM files without pixels, such as reports."""

    def series_of(self, path: Path) -> tuple[str, tuple[Slice, ...]]:
        """Return the series that a file belongs to and its images; none if that is not known."""
        found = (item for item in self.series.items() if any(image.path == path for image in item[1]))
        return next(found, ("", ()))


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
    for path in sorted(folder.iterdir()):
        # A link to nothing may have been a slice; elsewhere than in a link only regular files are opened.
        is_there = path.exists()
        if not path.name.startswith(".") and (path.is_file() or not is_there):
            status = path.stat(follow_symlinks=is_there)
            entries.append((path, status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns))
    return _scan(tuple(entries))


@lru_cache(maxsize=4096)
def _scan(entries: tuple[tuple[Any, ...], ...]) -> FolderOfImages:
    series: dict[str, list[Slice]] = {}
    unreadable: list[Path] = []
    others: list[Path] = []
    for path in (path for path, *_ in entries if is_dicom(path)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=TAGS)
                values = {name: header.get(name) for name in TAGS}
        except DAMAGE:
            unreadable.append(path)
            continue
        if values["Rows"] and values["Columns"]:
            series.setdefault(str(values["SeriesInstanceUID"] or ""), []).append(Slice(path, values))
        elif path.name.upper() == "DICOMDIR" or str(values["Modality"]) in WITHOUT_IMAGE:
            others.append(path)
        else:
            # The header of an image may be cut before it says how large the image is.
            unreadable.append(path)
    return FolderOfImages({uid: tuple(images) for uid, images in series.items()}, tuple(unreadable), tuple(others))


def files_of(path: Path) -> list[Path]:
    """Return the files of the series that a file belongs to, or the file alone if that is not known."""
    try:
        folder = scan(path.parent)
    except OSError:
        return [path]
    _, images = folder.series_of(path)
    # A damaged neighbour makes the series unusable, so its repair must count as a change.
    return [*(image.path for image in images), *folder.unreadable] if images else [path]


def split_series(paths: Iterable[Path]) -> dict[Path, str]:
    """Return which of these files stand for a part of a series only, each with a text that says where the rest is.

    Slices of one series in several folders belong together, unless some of them are at the same places: then the
    folders hold copies, or the phases of a 4D series.
    """
    parts: dict[str, dict[Path, list[str]]] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            uid, images = scan(path.parent).series_of(path)
            if uid:
                parts.setdefault(uid, {})[path] = [str(image.get("ImagePositionPatient")) for image in images]
    texts = {}
    for series in parts.values():
        places = [{*own} for own in series.values()]
        num_folders = len({path.parent for path in series})
        if num_folders == len(places) > 1 and len(set.union(*places)) == sum(map(len, places)):
            for path, own in series.items():
                others = ", ".join(sorted(printable(other.parent.name) for other in series if other != path)[:3])
                texts[path] = (
                    f"{len(own)} slices of a series that goes on in {others}; the slices of a volume must be in one "
                    "folder; move them together, or give each scan a SeriesInstanceUID of its own"
                )
    return texts


def open_series(path: Path) -> Opened:
    """Check that the series of a file is one regular volume; return its geometry, and what reads its images."""
    images = _ordered(_slices_of(path))
    first = images[0]
    rows, columns = (int(first.numbers(name, 1)[0]) for name in ("Rows", "Columns"))
    row_mm, column_mm = first.numbers("PixelSpacing", 2)
    along_row, along_column = first.numbers("ImageOrientationPatient", 6).reshape(2, 3)
    start, end = (image.numbers("ImagePositionPatient", 3) for image in (first, images[-1]))
    affine = np.eye(4)
    step = (end - start) / (len(images) - 1)
    affine[:3, :3] = LPS_TO_RAS @ np.column_stack([along_row * column_mm, along_column * row_mm, step])
    affine[:3, 3] = LPS_TO_RAS @ start
    header = header_of((columns, rows, len(images)), -1, _dtype(images), affine)

    def read() -> Stored:
        scales = {image.scale() for image in images}
        # Slices with scales of their own become intensities one by one; otherwise they stay as they are stored.
        array = np.empty((len(images), rows, columns), np.dtype(header.dtype) if len(scales) == 1 else np.float32)
        is_image = np.ones(array.shape, bool)
        for number, image in enumerate(images):
            pixels = image.pixels((rows, columns))
            is_image[number] = ~image.is_padding(pixels)
            slope, intercept = image.scale()
            array[number] = pixels if len(scales) == 1 else pixels * slope + intercept
        slope, intercept = scales.pop() if len(scales) == 1 else (1.0, 0.0)
        if is_image.any() and not is_image.all():
            # Padding lies outside the range of the scanner, such as -2000 in CT, and would stretch that of the volume.
            inside = array[is_image]
            array[~is_image] = inside.min() if slope > 0 else inside.max()
        return Stored(array.T[None], slope, intercept)

    return header, read


def _slices_of(path: Path) -> tuple[Slice, ...]:
    """Return the images of the series that a file belongs to, without localizers."""
    folder = scan(path.parent)
    _, series = folder.series_of(path)
    if not series:
        with library():
            pydicom.dcmread(path, stop_before_pixels=True)
        raise UnsuitableError("a DICOM file without an image; remove it")
    if folder.unreadable:
        names = ", ".join(printable(bad.name) for bad in folder.unreadable[:3])
        raise UnsuitableError(
            f"{names} beside it cannot be read as DICOM and may be one of its slices; copy the folder again, or remove "
            "the file"
        )
    return tuple(image for image in series if not image.is_localizer)


def _dtype(images: Sequence[Slice]) -> np.dtype:
    """Return the smallest type that holds the pixels of all slices."""
    kinds = []
    for image in images:
        bits = int(image.numbers("BitsAllocated", 1)[0])
        if bits not in (8, 16, 32):
            raise image.refuse("BitsAllocated", "8, 16 or 32 are allowed")
        kinds.append(np.dtype(f"{'i' if image.get('PixelRepresentation') else 'u'}{bits // 8}"))
    return np.result_type(*kinds)


def _ordered(images: Sequence[Slice]) -> list[Slice]:
    """Return images in the order of their positions; raise UnsuitableError unless they are one regular stack."""
    if len(images) < 2:
        raise UnsuitableError("a single image or a localizer; a volume needs two slices or more; remove it")
    for image in images:
        if image.get("ModalityLUTSequence"):
            raise image.refuse("ModalityLUTSequence", "intensities scaled by slope and intercept are read")
        for name in ("NumberOfFrames", "SamplesPerPixel"):
            if image.number(name, 1) > 1:
                raise image.refuse(name, "one image of single intensities per file is read")
    for name, (count, relative, absolute) in SHARED.items():
        first = images[0].numbers(name, count)
        other = next((i for i in images if not np.allclose(i.numbers(name, count), first, relative, absolute)), None)
        if other is not None:
            raise other.refuse(name, f"{printable(images[0].path.name)} of the same series has {first.tolist()}")
    if (images[0].numbers("PixelSpacing", 2) <= 0).any():
        raise images[0].refuse("PixelSpacing", "numbers above 0 are needed")
    normal = np.cross(*images[0].numbers("ImageOrientationPatient", 6).reshape(2, 3))
    places = {image.path: float(normal @ image.numbers("ImagePositionPatient", 3)) for image in images}
    result = sorted(images, key=lambda image: (places[image.path], image.path.name))
    gaps = np.diff([places[image.path] for image in result])
    # The lower one of two in the middle: if there are two distances only, a slice is missing in the larger.
    usual = float(np.sort(gaps)[(len(gaps) - 1) // 2])
    for gap, (one, two) in zip(gaps.tolist(), pairwise(result), strict=True):
        if usual <= 0 or abs(gap - usual) > LARGEST_IRREGULARITY * usual:
            raise UnsuitableError(
                f"{printable(one.path.name)} and {printable(two.path.name)} are {gap:.3g} mm apart, other slices "
                f"{usual:.3g} mm; equal distances are needed; copy the series again if slices are missing, remove "
                "doubled ones, or separate the phases of a 4D series"
            )
    return result
