"""What file names say: which files are labels of others, and which folder is a class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from data.formats import suffix_of

IMAGE_FOLDERS = {"images", "image", "imagestr", "imagests", "images_tr", "images_ts", "imgs", "img", "scans"}
LABEL_FOLDERS = {
    *("labels", "label", "labelstr", "labelsts", "labels_tr", "labels_ts", "labelmaps", "masks", "mask"),
    *("segmentations", "segmentation", "segs", "seg", "annotations", "rois"),
}
PATIENTS = (r"sub-[A-Za-z0-9]+", r"(?i)(?:patient|subject|subj|pat)[-_ ]?\d+")
"""Patterns that people name patients by, the most telling first."""
CASES = (*PATIENTS, r"(?i)(?:case|id|p|s)[-_ ]?\d+")
"""Patterns that say as much only if a folder has no other name."""
FEWEST_CASES = 2  # two folders with one volume each may still be two classes
LABEL_ENDINGS = (
    *("seg", "segmentation", "mask", "label", "labels", "labelmap", "gt", "roi"),
    *("dseg", "aseg", "aparc", "aparc+aseg"),  # as BIDS and FreeSurfer name them
)


def label_files(names: Sequence[str]) -> dict[str, str]:
    """Return the files that are labels of other files, each with the reason.

    A folder such as labels/ counts only beside one such as images/, and a name such as a_seg.nii.gz only beside another
    file whose name begins with a.
    """
    folders = sorted({parent for name in names for parent in PurePosixPath(name).parents})
    images = {folder.parent: folder.name for folder in reversed(folders) if folder.name.lower() in IMAGE_FOLDERS}
    stems: dict[PurePosixPath, list[str]] = {}
    for name in names:
        stems.setdefault(PurePosixPath(name).parent, []).append(_stem(name))
    result = {}
    for name in names:
        labels = next((p for p in PurePosixPath(name).parents if p.name.lower() in LABEL_FOLDERS), None)
        start = _labelled(_stem(name))
        if labels is not None and labels.parent in images:
            result[name] = f"labels of {images[labels.parent]}/ by the name of the folder"
        elif start is not None and any(
            other.startswith(start) and _labelled(other) is None for other in stems[PurePosixPath(name).parent]
        ):
            result[name] = "a label map by its name"
    return result


def class_folder(name: str) -> str | None:
    """Return the top folder of a name as its class; folders such as images/ say nothing about a class."""
    parents = [part for part in PurePosixPath(name).parts[:-1] if part.lower() not in IMAGE_FOLDERS]
    return parents[0] if parents else None


def folder_classes(names: Sequence[str]) -> dict[str, str] | None:
    """Return the class of each volume by its top folder, or None where folders say nothing about classes.

    They do only if every volume lies in one. Folders are cases if they are named after patients, hold one volume each,
    or give their names to the volumes in them.
    """
    classes = {name: folder for name in names if (folder := class_folder(name)) is not None}
    folders = set(classes.values())
    if len(classes) < len(names) or all(_is_case(folder) for folder in folders):
        return None
    if len(folders) > 1 and all(PurePosixPath(name).name.startswith(folder) for name, folder in classes.items()):
        return None
    return None if len(folders) == len(names) > FEWEST_CASES else classes


def _is_case(folder: str) -> bool:
    return any(re.fullmatch(pattern, folder) for pattern in CASES)


def _stem(name: str) -> str:
    file_name = PurePosixPath(name).name
    return file_name[: len(file_name) - len(suffix_of(file_name) or "")].lower()


def _labelled(stem: str) -> str | None:
    """Return what comes before an ending such as _seg, or None if there is no such ending."""
    for mark in "_-.":
        start, _, ending = stem.rpartition(mark)
        if start and ending in LABEL_ENDINGS:
            return start
    return None
