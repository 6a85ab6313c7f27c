"""Finds the volumes of a folder or of a dataset.json, and what their names and entries say about classes."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from data import dicom
from data.formats import SUFFIXES, stem, suffix_of
from data.header import FileError, Note, left_out
from runtime.files import RUNS, counted, printable, read_text, reason
from settings import DataError
from settings.data import DataSettings
from settings.section import WITHOUT_NUL

log = logging.getLogger(__name__)

IMAGE_FOLDERS = {"images", "image", "imagestr", "imagests", "images_tr", "images_ts", "imgs", "img", "scans"}
LABEL_FOLDERS = {
    *("labels", "label", "labelstr", "labelsts", "labels_tr", "labels_ts", "labelmaps", "masks", "mask"),
    *("segmentations", "segmentation", "segs", "seg", "annotations", "rois"),
}
# As people, BIDS and FreeSurfer name them.
_ENDINGS = r"seg|segmentation|mask|label|labels|labelmap|gt|roi|dseg|aseg|aparc|aparc\+aseg"
LABEL_ENDING = re.compile(rf"[-_.](?:{_ENDINGS})$", re.IGNORECASE)
"""Ends the name of a label map before the ending of its type."""
PATIENTS = (r"sub-[A-Za-z0-9]+", r"(?i)(?:patient|subject|subj|pat)[-_ ]?\d+")
"""Patterns that people name patients by, the most telling first."""
CASES = (*PATIENTS, r"(?i)(?:case|id|p|s)[-_ ]?\d+")
"""Patterns that say as much only if a folder has no other name."""
FEWEST_CASES = 2  # two folders with one volume each may still be two classes


@dataclass(frozen=True)
class DiscoveredVolume:
    """A volume that was found, its file not yet opened; `split` is "training", "validation", or None if undecided."""

    path: Path
    name: str
    class_name: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class VolumeFile:
    """One volume: its path, its name relative to the data root, its class number and its channels.

    `digest` is the hash of the file's bytes at the time of the check; empty if it was not checked.
    """

    path: Path
    name: str
    label: int | None = None
    num_channels: int = 1
    digest: str = ""


_Label = Annotated[str, Field(pattern=r"\S")] | Annotated[int, Field(gt=-(2**63), lt=2**63)]


def find(source: str) -> tuple[list[DiscoveredVolume], list[Note]]:
    """Return the volumes of a source, sorted by name, and a note on each file that was left out.

    If a folder has a dataset.json at its top, only the volumes listed there count, because such folders also hold
    segmentations and test images. Raises DataError if there is no volume.
    """
    path = expanded(source)
    # os.path, not Path: for a name that no file system can hold it returns False instead of raising.
    if is_plain_folder(source):
        return _in_folder(path)
    if os.path.isdir(path):
        log.info("data: %s lists the volumes of %s", path / "dataset.json", path)
        path /= "dataset.json"
    if path.suffix.lower() == ".json" and os.path.exists(path):
        return _in_dataset_json(path)
    what = "is a single file" if os.path.exists(path) else "does not exist"
    raise DataError(f"data.source: {printable(path)} {what}; a folder, a dataset.json or phantoms is allowed; check it")


def is_plain_folder(source: str) -> bool:
    """Return whether a source is a folder that has no dataset.json, so that every volume in it counts."""
    return os.path.isdir(expanded(source)) and not os.path.lexists(expanded(source) / "dataset.json")


def expanded(path: str) -> Path:
    """Return a path with its ~ replaced by the home folder."""
    return Path(os.path.expanduser(path))


def class_names_of(volumes: Sequence[DiscoveredVolume]) -> tuple[str, ...]:
    """Return the class names, indexed by label number; empty unless every volume has a class.

    If all names are whole numbers they are sorted as numbers, else as text.
    """
    names = {volume.class_name for volume in volumes if volume.class_name is not None}
    if any(volume.class_name is None for volume in volumes):
        return ()
    # A longer run of digits is a name; Python refuses to convert thousands of digits.
    is_number = all(re.fullmatch(r"-?\d{1,19}", name) for name in names)
    return tuple(sorted(names, key=(lambda name: (int(name), name)) if is_number else None))


def with_folders(volumes: Sequence[DiscoveredVolume]) -> list[DiscoveredVolume]:
    """Return the volumes of a folder with its subfolders as classes, if that is what they are.

    That takes every volume to lie in one. Folders are cases if they are named after patients, hold one volume each, or
    give their names to the volumes in them.
    """
    # Folders such as images/ say nothing about a class.
    parents = [[part for part in Path(v.name).parts[:-1] if part.lower() not in IMAGE_FOLDERS] for v in volumes]
    if not all(parents):
        return [*volumes]
    found = [replace(volume, class_name=folders[0]) for volume, folders in zip(volumes, parents, strict=True)]
    tops = {folders[0] for folders in parents}
    are_cases = (
        all(any(re.fullmatch(pattern, top) for pattern in CASES) for top in tops)
        or len(tops) == len(volumes) > FEWEST_CASES
        or (len(tops) > 1 and all(Path(volume.name).name.startswith(str(volume.class_name)) for volume in found))
    )
    return [*volumes] if are_cases else found


def _label_map_by(name: str) -> str | None:
    """Return what in its name says that a file is a label map."""
    path = PurePosixPath(name)
    if any(parent.name.lower() in LABEL_FOLDERS for parent in path.parents):
        return "the name of its folder"
    return "its name" if LABEL_ENDING.search(stem(path.name)) else None


def _in_folder(root: Path) -> tuple[list[DiscoveredVolume], list[Note]]:
    paths, notes = volumes_under(root, "data.source")
    if RUNS.is_dir() and root.resolve() in RUNS.resolve().parents:
        notes.append(left_out(RUNS, "it holds what runs wrote"))
    maps = {name: why for name, path in paths.items() if (why := _label_map_by(name)) and not dicom.is_dicom(path)}
    # Where nothing else is left, they are what is trained on.
    for name, why in maps.items() if len(maps) < len(paths) else ():
        notes.append(left_out(name, f"a label map by {why}; rename it, or list it in a dataset.json, to train on it"))
        del paths[name]
    if not paths:
        raise DataError(
            f"data.source: {printable(root)} holds no volume; {' '.join(SUFFIXES)} are read, subfolders too; check it"
        )
    return [DiscoveredVolume(paths[name], name) for name in sorted(paths)], notes


def volumes_under(root: Path, key: str) -> tuple[dict[str, Path], list[Note]]:
    """Return the volumes under a folder of the setting `key` by name, and what is none.

    A DICOM series is its first file, with the name of its folder. What runs wrote is skipped, unless the folder is
    there. Each link is followed once, and names with a leading dot are skipped (macOS creates them).
    """
    paths: dict[str, Path] = {}
    notes, dicom_folders = [], []
    seen = {os.path.realpath(RUNS)} if not root.resolve().is_relative_to(RUNS.resolve()) else set()
    for folder, folders, files in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(folder) / name for name in files if not name.startswith(".")):
            name = path.relative_to(root).as_posix()
            if dicom.is_dicom(path):
                dicom_folders.append(path.parent)
            elif suffix_of(path.name):
                paths[name] = path
            elif path.is_symlink() and not os.path.exists(path):
                notes.append(left_out(name, "a link to nothing"))
    for folder_of_series in sorted({*dicom_folders}):
        series, unused = series_in(root, folder_of_series, key)
        paths |= series
        notes += unused
    return paths, notes


def series_in(root: Path, folder: Path, key: str) -> tuple[dict[str, Path], list[Note]]:
    """Return the DICOM series in a folder of the setting `key` by name, each as its first file, and what is none."""
    try:
        scanned = dicom.scan(folder)
    except OSError as error:
        raise DataError(f"{key}: {printable(folder)} cannot be read ({reason(error)}); check it") from error
    # At the top a series is named by its first file, since a folder may have the name of the top.
    prefix = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    firsts, notes = [], []
    for images in scanned.series.values():
        localizers = [image.path.name for image in images if image.is_localizer]
        if localizers:
            why = f"a localizer ({counted(len(localizers), 'image')}), not a volume"
            notes.append(left_out(f"{prefix}{localizers[0]}", why))
        firsts += [image.path for image in images if not image.is_localizer][:1]
    notes += [left_out(f"{prefix}{path.name}", "DICOM without an image") for path in scanned.others]
    if prefix and len(firsts) == 1:
        return {prefix[:-1]: firsts[0]}, notes
    # Without a series, unreadable files are named as a problem, because they may have been slices.
    return {f"{prefix}{path.name}": path for path in firsts or scanned.unreadable}, notes


class _Entry(BaseModel):
    """An entry of a dataset.json, or the path that is all of it; `label` may be the path of a segmentation, or several.

    A list of files as an image, one per channel, is refused: only one of them would be read.
    """

    model_config = ConfigDict(strict=True)
    image: Annotated[str, Field(min_length=1, pattern=WITHOUT_NUL)]
    label: _Label | list[Any] | None = None
    kind: _Label | None = Field(None, alias="class")

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, entry: Any) -> Any:
        return {"image": entry} if isinstance(entry, str) else entry

    @property
    def class_name(self) -> str | None:
        """Return the "class", or the "label" unless that is the path of a segmentation, or several."""
        label = self.label if self.kind is None else self.kind
        is_path = self.kind is None and isinstance(label, str) and ("/" in label or suffix_of(label))
        return None if label is None or isinstance(label, list) or is_path else str(label).strip()


class _Listing(BaseModel):
    training: Annotated[list[_Entry], Field(min_length=1)]
    validation: list[_Entry] = []


def _in_dataset_json(listing: Path) -> tuple[list[DiscoveredVolume], list[Note]]:
    try:
        listed = _Listing.model_validate_json(read_text(listing))
    except OSError as error:
        raise FileError(listing, f"cannot be read ({reason(error)}); a UTF-8 file is allowed; repair it") from error
    except ValidationError as error:
        where = f"{printable(listing)}: volumes are listed as training: [PATH or {{image: PATH}}, ...]; repair it"
        lines = {".".join(map(str, e["loc"][:3])): e["msg"] for e in reversed(error.errors(include_input=False))}
        texts = [f"  {printable(place) or 'the file'}: {printable(text)}" for place, text in reversed(lines.items())]
        raise DataError("\n".join([f"{where}:", *texts])) from None
    volumes, problems = [], []
    sides = [("training" if listed.validation else None, entry) for entry in listed.training]
    for side, entry in [*sides, *(("validation", entry) for entry in listed.validation)]:
        name = os.path.normpath(entry.image).replace(os.sep, "/")
        if os.path.isabs(entry.image) or name.split("/")[0] == "..":
            problems.append(
                f"  {printable(entry.image)} leads out of {printable(listing.parent)}; only files inside it are "
                "allowed; move it there, or put a link to it there"
            )
        else:
            volumes.append(DiscoveredVolume(listing.parent / entry.image, name, entry.class_name, side))
    twice = [name for name, count in Counter(volume.name for volume in volumes).items() if count > 1]
    problems += [f"  {printable(name)}: listed more than once; remove all but one" for name in twice]
    if problems:
        raise DataError("\n".join([f"{printable(listing)}: {counted(len(problems), 'problem')}:", *problems]))
    without = [volume.name for volume in volumes if volume.class_name is None]
    notes = []
    if 0 < len(without) < len(volumes):
        share = f"{len(without)} of {len(volumes)} volumes have none, for example {printable(without[0])}"
        notes.append(Note(printable(listing), f"classes left out, {share}"))
    return sorted(volumes, key=lambda volume: volume.name), notes


MODALITY = re.compile(r"(?i)(?<![a-z0-9])(t1ce|t1gd|t1c|t1w|t1|t2w|t2|flair|dwi|adc|swi|pd|cta?|pet)(?![a-z0-9])")
"""Words for modalities in the names of files."""


def chosen(volumes: Sequence[DiscoveredVolume], s: DataSettings) -> tuple[list[DiscoveredVolume], list[Note]]:
    """Return the volumes that `data.include` and `data.exclude` leave, and a note on each of the others."""

    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(text, pattern) for pattern in patterns for text in (name, PurePosixPath(name).name))

    kept, notes = [], []
    for volume in volumes:
        if s.include and not matches(volume.name, s.include):
            notes.append(left_out(volume.name, "no pattern of data.include matches its name"))
        elif matches(volume.name, s.exclude):
            notes.append(left_out(volume.name, "a pattern of data.exclude matches its name"))
        else:
            kept.append(volume)
    if volumes and not kept:
        raise DataError(
            f"data.include, data.exclude: leave none of {len(volumes)} volumes, such as {printable(volumes[0].name)}; "
            "patterns have * for any text and are matched with the name below the source or the file's name alone"
        )
    return kept, notes


def mixed_modalities(names: Sequence[str]) -> str | None:
    """Return a line if the names of the files say that there are several modalities."""
    words = [found[1] for name in names if (found := MODALITY.search(PurePosixPath(name).name))]
    several = [(word, n) for word, n in Counter(map(str.upper, words)).most_common() if n >= FEWEST_CASES]
    if len(several) < 2:
        return None
    listed = ", ".join(f"{word} ({number})" for word, number in several)
    first = next(word for word in words if word.upper() == several[0][0])
    return f"by their names, volumes are of several modalities: {listed}; data.include: ['*{first}*'] takes one"
