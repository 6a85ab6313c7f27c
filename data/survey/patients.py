"""Which volumes belong together: groups for the split, and names that suggest one patient."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from data.discovery import Found, column_of
from data.survey.names import PATIENTS
from runtime.files.names import counted, printable
from settings import DataError
from settings.data import DataSettings

log = logging.getLogger(__name__)

FOLDER = "folder"
COLUMN = "column:"

# A folder of a case; or a number in a file's or folder's name, and what may follow it: the number of a scan, of a
# channel (0000, 0001), of a visit, or a modality. A pattern names what it matches, its first group if it has one.
_NUMBERED = (
    r"(?i)(?:^|/)((?:case|id|p|s)[-_ ]?\d+)/",
    *(
        rf"(?i)(?:^|/)([^/]*\d[^/]*?){following}(?:\.|$)"
        for following in (
            r"[-_]\d{1,2}",
            r"[-_]000\d",
            r"[-_/](?:scan|ses|session|visit|tp|t)[-_]?\d{1,2}",
            r"[-_/](?:t[12]\w{0,2}|flair|dwi|adc|pd|ct|pet|mri?)",
        )
    ),
)
# With more scans each on average, what these patterns find are sets and not patients.
MOST_SCANS = 12

MOST_SECONDS = 10
"""What searching all names for `data.group_by` may take."""
_SEARCH = "import json, re, sys; pattern, names = json.load(sys.stdin); [re.search(pattern, name) for name in names]"


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
    _require_quick(s.group_by, [item.name for item in found])
    groups = {item: group for item in found if (group := _group(pattern, item.name)) is not None}
    unmatched = [item for item in found if item not in groups]
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


def _require_quick(pattern: str, names: Sequence[str]) -> None:
    """Raise DataError if a search takes too long, as with (a+)+$; tried in a process that can be stopped."""
    command = [sys.executable, "-I", "-c", _SEARCH]
    try:
        subprocess.run(command, input=json.dumps([pattern, names]).encode(), check=False, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"data.group_by: {printable(pattern)} takes more than {MOST_SECONDS} seconds to search "
            f"{counted(len(names), 'name')}; a pattern without repetitions inside repetitions is allowed; simplify it"
        ) from error


def _by_column(found: Sequence[Found], s: DataSettings) -> dict[Found, str]:
    if s.class_labels is None:
        raise DataError(
            f"data.group_by: {printable(s.group_by)} without data.class_labels; it names a column of that table; set it"
        )
    assert s.group_by is not None, "a column was asked for"
    values = column_of(s.class_labels, s.group_by.removeprefix(COLUMN).strip(), "data.group_by")
    groups = {item: values.get(item.name) or values.get(PurePosixPath(item.name).name) for item in found}
    missing = [item.name for item, group in groups.items() if not group]
    if missing:
        raise DataError(
            f"data.group_by: {printable(s.class_labels)} gives {len(missing)} of {len(found)} volumes no group, for "
            f"example {printable(missing[0])}; each volume needs one; complete the column"
        )
    return {item: group for item, group in groups.items() if group}


def parted_patients(train: Sequence[Found], val: Sequence[Found]) -> str | None:
    """Return a warning if names suggest that scans of one patient are on both sides of the split, else None."""
    for patients, group_by in suspected_groups([*train, *val]):
        sides = [{patients[item] for item in side if item in patients} for side in (train, val)]
        parted = sorted(sides[0] & sides[1])
        if parted:
            some = ", ".join(printable(patient) for patient in parted[:3]) + (" ..." if len(parted) > 3 else "")
            return (
                f"names suggest that scans of the same patient are in training and in validation ({some}); "
                f"set data.group_by: {_quoted(group_by)} to keep them together"
            )
    return None


def suspected_patients(found: Sequence[Found]) -> str | None:
    """Return a line on patients with several scans, by their names; None if names suggest none."""
    for patients, group_by in suspected_groups(found):
        several = {patient: count for patient, count in Counter(patients.values()).items() if count > 1}
        most = max(several, key=lambda patient: several[patient])
        return (
            f"{counted(len(several), 'patient')} {'seems' if len(several) == 1 else 'seem'} to have several scans by "
            f"{'its name' if len(several) == 1 else 'their names'} (for example {printable(most)}: {several[most]}); "
            f"data.group_by: {_quoted(group_by)} keeps each on one side of the split"
        )
    return None


def suspected_groups(found: Sequence[Found]) -> list[tuple[dict[Found, str], str]]:
    """Return the patients that names suggest, some with several scans, and the `data.group_by` that finds them.

    The most telling come first. One patient alone is none: nothing could be split.
    """
    named = [_matched(pattern, found) for pattern in PATIENTS]
    # Of the others, the one that covers most volumes: names may end in t1, t2 and flair.
    numbered = sorted((_matched(pattern, found) for pattern in _NUMBERED), key=lambda match: -len(match[0]))
    numbered = [(patients, by) for patients, by in numbered if len(patients) <= MOST_SCANS * len({*patients.values()})]
    several = [(p, by) for p, by in (*named, *numbered) if 1 < len({*p.values()}) < len(p)]
    return [(patients, _by_folder(patients, found) or by) for patients, by in several]


def _matched(pattern: str, found: Sequence[Found]) -> tuple[dict[Found, str], str]:
    """Return the patient of each volume that a pattern matches, and the pattern."""
    groups = {item: _group(re.compile(pattern), item.name) for item in found}
    return {item: group for item, group in groups.items() if group is not None}, pattern


def _by_folder(patients: Mapping[Found, str], found: Sequence[Found]) -> str | None:
    """Return `folder` if each patient has a folder and no volume lies elsewhere."""
    pairs = {(patients.get(item), PurePosixPath(item.name).parent) for item in found}
    return FOLDER if len(pairs) == len({*patients.values()}) == len({folder for _, folder in pairs}) else None


def _quoted(group_by: str) -> str:
    """Return a value of `data.group_by` as YAML."""
    return group_by if group_by == FOLDER else f"'{group_by}'"


def _group(pattern: re.Pattern[str], name: str) -> str | None:
    match = pattern.search(name)
    if match is None:
        return None
    return match.group(1) if pattern.groups and match.group(1) is not None else match.group()
