"""What every reader returns, what is said about files that cannot be used, and the checks that all formats share."""

from __future__ import annotations

import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError
from nibabel.volumeutils import apply_read_scaling
from nibabel.wrapstruct import WrapStructError
from pydantic import PlainValidator
from pydicom.errors import BytesLengthException, InvalidDicomError

from runtime.files import printable
from settings import DataError

# What the libraries raise for damaged files, found by damaging files of every format at random and field by field. Only
# calls into a library are guarded, so that a bug of ours is never reported as a damaged file.
DAMAGE = (
    *(OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError, SyntaxError),
    *(MemoryError, tokenize.TokenError, zlib.error, lzma.LZMAError, struct.error, zipfile.BadZipFile),
    *(ImageFileError, HeaderDataError, WrapStructError, InvalidDicomError, BytesLengthException),
)


class DamagedError(Exception):
    """A file that its library could not read; `__cause__` is the library's error."""


class UnsuitableError(Exception):
    """A file that must not be used; the text says why and what to do."""


@contextmanager
def library() -> Iterator[None]:
    """Turn what a library raises for a damaged file into `DamagedError`."""
    try:
        yield
    except DAMAGE as error:
        raise DamagedError from error


MOST_OF_A_KIND = 3
"""Files with the same remark that are named one by one."""


@dataclass(frozen=True)
class Note:
    """What is said about a file."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


class FileError(DataError):
    """A file cannot be used; `note` says why."""

    def __init__(self, path: object, text: str) -> None:
        self.note = Note(printable(path), text)
        super().__init__(str(self.note))


def left_out(name: object, why: str) -> Note:
    """Return the note on a file that is not used."""
    return Note(printable(name), f"left out, {why}")


def grouped(notes: Iterable[Note]) -> list[str]:
    """Return notes as lines, with those of one text in one line if there are many."""
    names: dict[str, list[str]] = {}
    for note in sorted(notes, key=str):
        names.setdefault(note.text, []).append(note.name)
    lines = []
    for text, same in names.items():
        if len(same) > MOST_OF_A_KIND:
            same = [f"{same[0]}, {same[1]} and {len(same) - 2} more"]
        lines += [f"{name}: {text}" for name in same]
    return lines


def problem_lines(problems: Iterable[Note]) -> str:
    """Return problems below each other, with those of one text in one line if there are many."""
    return "\n".join(f"  {line}" for line in grouped(problems))


@dataclass(frozen=True)
class Header:
    """The shape, type and geometry of a volume, read without its voxels.

    `affine` maps voxel indices to millimetres (RAS+). `has_spacing` is False for numpy arrays, which store no spacing.
    `axes` is the shape of the stored array, for messages.
    """

    axes: tuple[int, ...]
    shape: tuple[int, int, int]
    num_channels: int
    affine: Annotated[np.ndarray, PlainValidator(lambda rows: np.array(rows, np.float64).reshape(4, 4))]
    dtype: str
    has_spacing: bool

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        """Return the distance between neighbouring voxels along each stored axis."""
        x, y, z = np.linalg.norm(self.affine[:3, :3], axis=0).tolist()
        return x, y, z

    @property
    def num_bytes(self) -> int:
        """Return the size of the volume as float32."""
        return 4 * self.num_channels * math.prod(self.shape)


@dataclass(frozen=True)
class Stored:
    """Voxels as they are stored, channels first in any memory layout; intensity = slope * stored + intercept.

    They stay in the file's own type: converting part by part needs no second copy of the whole volume. `owner` is
    whatever must live as long as the array.
    """

    array: np.ndarray
    slope: float = 1.0
    intercept: float = 0.0
    owner: Any = None

    def values(self, part: np.ndarray) -> np.ndarray:
        """Return the intensities of part of `array` as float32, in the memory layout of the part."""
        with np.errstate(all="ignore"):
            if (self.slope, self.intercept) != (1.0, 0.0):
                part = apply_read_scaling(part, np.asarray(self.slope), np.asarray(self.intercept))
            return np.asarray(part).astype(np.float32, order="K")

    def channel(self, number: int) -> Stored:
        """Return one channel alone."""
        return replace(self, array=self.array[number : number + 1])


def header_of(
    axes: tuple[int, ...], channel_axis: int, dtype: object, affine: np.ndarray, has_spacing: bool = True
) -> Header:
    """Return the header of an array of three axes, or four with channels; raise UnsuitableError for any other."""
    shape, num_channels = axes, 1
    if len(axes) == 4:
        num_channels = axes[channel_axis]
        shape = axes[1:] if channel_axis == 0 else axes[:3]
    if len(shape) != 3 or min(axes) < 1 or 1 in shape:
        raise UnsuitableError(
            f"{' x '.join(map(str, axes))} voxels; a volume has three axes of 2 or more voxels, and one more if it has "
            "channels; stack the slices of 2D images, split what has more axes, or remove it"
        )
    kind = np.dtype(dtype)  # type: ignore[call-overload]
    if kind.kind not in "biuf":
        raise UnsuitableError(f"voxels of type {kind}; integers or real numbers are allowed; convert it")
    x, y, z = shape
    return Header(axes, (x, y, z), num_channels, affine, kind.str, has_spacing)


Opened = tuple[Header, Callable[[], Stored]]
"""A header, and what reads the voxels that belong to it."""
