"""Remembers what was measured in each file, so that only new and changed files are read again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from data.formats import signature
from data.preparation.store import facts_from
from data.reading import VolumeFacts
from runtime.files.atomic import write_text
from settings.data import DataSettings

log = logging.getLogger(__name__)

# Part of the name of the file that holds results: change it whenever `VolumeFacts` changes.
VERSION = 5


class Records:
    """One line per file, added as soon as it is measured; a killed process loses nothing that it finished."""

    def __init__(self, folder: Path, paths: Sequence[Path], s: DataSettings) -> None:
        self.path = folder / f"{_key(paths, s)}.jsonl"
        self.lock = self.path.with_suffix(".lock")
        self._facts: dict[str, VolumeFacts] = {}
        self._is_writable = True

    def load(self) -> None:
        """Read what earlier commands found; lines that are damaged count as not written."""
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError:
            return
        for line in lines:
            try:
                name, values = json.loads(line)
                self._facts[str(name)] = facts_from(values)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                continue

    def get(self, key: str) -> VolumeFacts | None:
        """Return the facts of a file by its `record_key`."""
        return self._facts.get(key)

    def add(self, key: str, facts: VolumeFacts) -> None:
        """Remember the facts of a file; call it from one thread."""
        self._facts[key] = facts
        if self._is_writable:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(_line(key, facts))
            except OSError as error:
                self._is_writable = False
                log.warning(
                    "data: %s cannot be written (%s); the volumes will be read again next time", self.path, error
                )

    def tidy(self, keys: Sequence[str]) -> None:
        """Drop what is known of earlier contents of these files; other configs may use the other files."""
        current, names = {*keys}, {_file_of(key) for key in keys}
        kept = {key: facts for key, facts in self._facts.items() if key in current or _file_of(key) not in names}
        if kept != self._facts and self._is_writable:
            self._facts = kept
            try:
                write_text(self.path, "".join(_line(key, facts) for key, facts in kept.items()))
            except OSError:
                log.warning("data: %s cannot be written; it keeps what is no longer needed", self.path)


def record_key(path: Path) -> str:
    """Return the key under which a file's facts are remembered; it changes when the file does."""
    return f"{os.path.abspath(path)}\n{signature(path)}"


def _file_of(key: str) -> str:
    return key.rsplit("\n", 1)[0]


def _line(key: str, facts: VolumeFacts) -> str:
    return json.dumps([key, asdict(facts)]) + "\n"


def _key(paths: Sequence[Path], s: DataSettings) -> str:
    folder = os.path.commonpath([os.path.abspath(path) for path in paths])
    intensity = f"{s.intensity.mode} {s.intensity.lower!r} {s.intensity.upper!r} {s.frame}"
    return hashlib.sha256(f"{VERSION}\n{folder}\n{intensity}".encode("utf-8", "surrogateescape")).hexdigest()[:24]
