"""Remarks on files: why one was left out or cannot be used, and several of one kind in one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from runtime.files import printable
from settings import DataError

MOST_OF_A_KIND = 3
"""Files with the same remark that are named one by one."""


@dataclass(frozen=True)
class Note:
    """What is said about a file; `is_label_map` if it was left out because it is one."""

    name: str
    text: str
    is_label_map: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


class FileError(DataError):
    """A file cannot be used; `note` says why."""

    def __init__(self, path: object, text: str) -> None:
        self.note = Note(printable(path), text)
        super().__init__(str(self.note))


def left_out(name: object, why: str, is_label_map: bool = False) -> Note:
    """Return the note on a file that is not used."""
    return Note(printable(name), f"left out, {why}", is_label_map)


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
