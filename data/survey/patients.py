"""Which volumes belong together: groups for the split, and names that suggest one patient."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from data.discovery import Found, column_of
from data.formats import suffix_of
from data.survey.names import PATIENTS
from settings import DataError
from settings.data import DataSettings
from storage.names import printable

log = logging.getLogger(__name__)

FOLDER = "folder"
COLUMN = "column:"

# Each names what it matched, its first group if it has one.
SUGGESTED = (*PATIENTS, r"(.*\d.*?)[-_](?:scan|ses|session|visit|tp|t)?[-_]?\d{1,2}$")


def groups_of(found: Sequence[Found], s: DataSettings) -> dict[Found, str] | None:
    """Return the group of each volume by `data.group_by`, or None if it is not set; raise DataError if it fits none.

    A volume that a pattern does not match is a group of its own.
    """
    if s.group_by is None:
        return None
    if s.group_by == FOLDER:
        return {item: PurePosixPath(item.name).parent.as_posix() for item in found}
    if s.group_by.startswith(COLUMN):
        return _by_column(found, s)
    try:
        pattern = re.compile(s.group_by)
    except re.error as error:
        raise DataError(
            f"data.group_by: {printable(s.group_by)} is not a pattern ({error}); folder, column:NAME or a regular "
            "expression is allowed; correct it"
        ) from error
    groups: dict[Found, str] = {}
    unmatched: list[Found] = []
    for item in found:
        match = pattern.search(item.name)
        if match is None:
            unmatched.append(item)
        else:
            groups[item] = match.group(1) if match.re.groups and match.group(1) is not None else match.group()
    if not groups:
        raise DataError(
            f"data.group_by: {printable(s.group_by)} matches 0 of {len(found)} volumes, not "
            f"{printable(unmatched[0].name)}; change the pattern, or use folder or column:NAME"
        )
    if unmatched:
        log.warning(
            "data.group_by: %s matches %d of %d volumes, not %s; each of the others is a group of its own",
            printable(s.group_by),
            len(groups),
            len(found),
            printable(unmatched[0].name),
        )
    return groups | {item: f"{item.name}/" for item in unmatched}


def _by_column(found: Sequence[Found], s: DataSettings) -> dict[Found, str]:
    if s.labels is None:
        raise DataError(
            f"data.group_by: {printable(s.group_by)} without data.labels; it names a column of that table; set it"
        )
    assert s.group_by is not None, "a column was asked for"
    values = column_of(s.labels, s.group_by.removeprefix(COLUMN).strip(), "data.group_by")
    groups = {item: values.get(item.name) or values.get(PurePosixPath(item.name).name) for item in found}
    missing = [item.name for item, group in groups.items() if not group]
    if missing:
        raise DataError(
            f"data.group_by: {printable(s.labels)} gives {len(missing)} of {len(found)} volumes no group, for example "
            f"{printable(missing[0])}; each volume needs one; complete the column"
        )
    return {item: group for item, group in groups.items() if group}


def parted_patients(train: Sequence[Found], val: Sequence[Found]) -> str | None:
    """Return a warning if names suggest that scans of one patient are on both sides of the split, else None."""
    for pattern in SUGGESTED:
        sides = [{_patient(pattern, item.name) for item in side} - {None} for side in (train, val)]
        parted = sorted(str(patient) for patient in sides[0] & sides[1])
        if parted:
            some = ", ".join(printable(patient) for patient in parted[:3]) + (" ..." if len(parted) > 3 else "")
            return (
                f"names suggest that scans of the same patient are in training and in validation ({some}); "
                f"set data.group_by: '{pattern.removesuffix('$')}' to keep them together"
            )
    return None


def suspected_patients(found: Sequence[Found]) -> str | None:
    """Return a line on patients with several scans, by their names; None if names suggest none."""
    for pattern in SUGGESTED:
        counts: dict[str, int] = {}
        for item in found:
            patient = _patient(pattern, item.name)
            if patient is not None:
                counts[patient] = counts.get(patient, 0) + 1
        several = {patient: count for patient, count in counts.items() if count > 1}
        if several and len(counts) > 1:
            most = max(several, key=lambda patient: several[patient])
            return (
                f"{len(several)} patients seem to have several scans by their names (for example {printable(most)}: "
                f"{several[most]}); data.group_by: '{pattern.removesuffix('$')}' keeps each on one side of the split"
            )
    return None


def _patient(pattern: str, name: str) -> str | None:
    suffix = suffix_of(name)
    match = re.search(pattern, name[: len(name) - len(suffix or "")])
    if match is None:
        return None
    return match.group(1) if match.re.groups else match.group()
