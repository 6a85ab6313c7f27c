"""Conditions that a command asks for: its files make cases, its class and its numbers hold for all samples."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from data import dicom
from data.discovery import expanded, series_in
from data.formats import SUFFIXES, content_digest, read_header, stem, suffix_of
from data.geometry import mismatch
from data.partners import named_after
from diffusion.conditioning import KINDS, ConditionBatch, kinds_of
from diffusion.conditioning.class_label import class_number
from diffusion.conditioning.kind import Asked, Case, Sample
from diffusion.conditioning.volume import MAIN
from models.volume_codec import VolumeCodec
from runtime.files import printable
from settings import DataError, UserError


def title_of(files: Mapping[str, str]) -> str | None:
    """Return the name of the condition volumes, or else of other files, without its ending; None without any."""
    place = files.get(MAIN) or next(iter(files.values()), None)
    return None if place is None else stem(expanded(place).absolute().name)


class AskedConditions:
    """The conditions of samples that a command asks for: `num` of each case, or without cases any number.

    `numbers` are texts such as age=63. Files of different options belong together if they have the same name, but for
    endings as in training; a single file belongs to any. Raises `UserError` for what does not go with the run, and
    DataError, naming the file, if one does not suit.
    """

    def __init__(self, asked: Asked, numbers: Sequence[str], codec: VolumeCodec | None) -> None:
        if asked.class_name is not None:
            class_number(asked.class_name, asked.class_names)
        _check_options(asked)
        kinds = kinds_of(asked.settings.ldm.conditioning)
        known = [name for kind in kinds for name in kind.number_names(asked)]
        asked = replace(asked, numbers=_parsed(numbers, known))
        self.cases = _cases(asked, codec)
        self.of_kind = {kind.name: kind.from_command_line(asked, bool(self.cases)) for kind in kinds}

    def batch(self, positions: Sequence[int], num: int, spacing_mm: Sequence[float]) -> ConditionBatch:
        """Return the conditions of samples; without cases the samples' grid has this spacing."""
        samples = [Sample(position, spacing_mm) for position in positions]
        if self.cases:
            cases = [self.cases[position // num] for position in positions]
            spacings = [case.space.geometry.spacing_mm.tolist() for case in cases]
            samples = [Sample(*values) for values in zip(positions, spacings, cases, strict=True)]
        parts = {name: [of_sample(sample) for sample in samples] for name, of_sample in self.of_kind.items()}
        return ConditionBatch({name: torch.stack(rows) for name, rows in parts.items()})


def _parsed(texts: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Return the values of texts such as age=63 by name; raise `UserError` for names that are not known, or twice."""
    if texts and not known:
        raise UserError(f"--number: {printable(texts[0])}, but the run was trained without numbers; leave it out")
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or name not in known or name in values:
            what = "given twice" if name in values else "not a number of the run"
            raise UserError(
                f"--number: {printable(text)}, {what}; allowed: {', '.join(map(printable, known))}, each once; write "
                f"{printable(known[0])}=VALUE"
            )
        values[name] = value
    return values


def _check_options(asked: Asked) -> None:
    """Raise `UserError` if an option is given that the run cannot use, or left out that it needs."""
    s, given = asked.settings.ldm.conditioning, asked.files
    kinds = kinds_of(s)
    for option, what in ((option, what) for cls in KINDS for option, what in cls.all_options.items()):
        if option in given and not any(option in kind.options for kind in kinds):
            raise UserError(f"{option}: the run was trained without {what}; leave it out")
    for kind in kinds:
        taken = kind.options
        missing = [option for option in taken if option not in given]
        if missing and len(missing) < len(taken):
            raise UserError(f"{missing[0]}: not given; the run takes {' and '.join(taken)} together; give both")
        if missing and f"ldm.conditioning.{kind.section}" in s.always_given:
            raise UserError(
                f"{missing[0]}: not given, but the run was trained with {taken[missing[0]]} for every volume (dropout: "
                "0); give a file or a folder of them"
            )


def _cases(asked: Asked, codec: VolumeCodec | None) -> list[Case]:
    """Return the cases of files in the order of their names."""
    listed = {option: _files_of(asked.files.get(option), option) for kind in KINDS for option in kind.all_options}
    files = {option: named_after(paths, listed[MAIN]) for option, paths in listed.items()}
    first = [files[option] for kind in KINDS for option in list(kind.all_options)[:1]]
    several = {name for paths in first if len(paths) > 1 for name in paths}
    names = sorted(several or files[MAIN] or {name for paths in first for name in paths})
    kinds = kinds_of(asked.settings.ldm.conditioning)
    cases = []
    for name in names:
        found = {option: _partner(name, paths, option) for option, paths in files.items()}
        paths = {option: path for option, path in found.items() if path is not None}
        read = {kind.name: kind.read_files(paths, asked, codec) for kind in kinds}
        parts = {kind: part for kind, part in read.items() if part is not None}
        # The space of condition volumes, if there are any, else of the only other files.
        _, space = [*parts.values()][-1]
        volume, labels = paths.get(MAIN), paths.get("--labels")
        if volume is not None and labels is not None:
            x, y, z = space.geometry.shape
            header = replace(read_header(volume), shape=(x, y, z), affine=space.geometry.affine)
            if problem := mismatch(labels, read_header(labels), volume, header, asked.settings.data):
                raise DataError(problem)
        digests = [content_digest(path) if path is not None else "" for path in found.values()]
        digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()
        cases.append(Case(name, {kind: part for kind, (part, _) in parts.items()}, space, digest))
    return cases


def _files_of(place: str | None, option: str) -> dict[str, Path]:
    """Return the volume file that an option names, or those of the folder that it names, by name without its ending.

    A DICOM series is a folder: the one that is named, or a folder in it. Several series of one folder are distinguished
    by the names of their first files.
    """
    if place is None:
        return {}
    path = expanded(place)
    found = [(stem(path.name), path)] if path.is_file() else []
    if path.is_dir():
        items = sorted(item for item in path.iterdir() if not item.name.startswith("."))
        files = [item for item in items if suffix_of(item.name) and not item.is_dir() and not dicom.is_dicom(item)]
        found = [(stem(item.name), item) for item in files]
        for folder in (path, *(item for item in items if item.is_dir())):
            if any(dicom.is_dicom(item) for item in folder.iterdir()):
                series, _ = series_in(folder.parent, folder, option)
                found += [(name.replace("/", "_"), first) for name, first in series.items()]
    if not found:
        what = "holds no volume" if path.is_dir() else "does not exist"
        needed = f"a file ({' '.join(SUFFIXES)}) or a folder of them is needed"
        raise UserError(f"{option}: {printable(place)} {what}; {needed}")
    twice = next((name for name, count in Counter(name for name, _ in found).items() if count > 1), None)
    if twice is not None:
        raise UserError(
            f"{option}: {printable(place)} has two volumes named {printable(twice)}, but for the ending; rename one of "
            "the files, or of the folders of DICOM series"
        )
    return dict(found)


def _partner(name: str, files: dict[str, Path], option: str) -> Path | None:
    """Return the file of a case: the one of its name, or the only one."""
    if not files or name in files:
        return files.get(name)
    if len(files) == 1:
        return next(iter(files.values()))
    raise UserError(f"{option}: no file named {printable(name)} as the other files of the case are; add or rename it")
