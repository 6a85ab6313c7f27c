"""Splits volumes into training and validation: groups that stay together, and names that suggest one patient."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from data.discovery import PATIENTS, DiscoveredVolume
from data.tables import by_volume, read_table
from runtime.files import counted, printable
from settings import DataError
from settings.data import LEAST_HELD_OUT, DataSettings

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

Groups = dict[DiscoveredVolume, str]


def split(
    volumes: Sequence[DiscoveredVolume], s: DataSettings, seed: int
) -> tuple[list[DiscoveredVolume], list[DiscoveredVolume]]:
    """Return the volumes to train on and those held out; raise DataError if either side has too few.

    Held out are those with the lowest hashes of (seed, name), so adding or removing a volume moves at most one other.
    Volumes of one group of `data.group_by` stay together, by hashes of (seed, group). A dataset.json with a
    "validation" list decides the split itself.
    """
    groups = groups_of(volumes, s)
    where, remedy = "data.source", "add volumes"
    if any(volume.split for volume in volumes):
        remedy = 'change its lists "training" and "validation"'
        train, val = ([volume for volume in volumes if volume.split == side] for side in ("training", "validation"))
    else:
        names = groups or {volume: volume.name for volume in volumes}
        ranked = sorted({*names.values()}, key=lambda name: _hash(seed, name))
        held_out = {*ranked[: s.num_held_out(len(ranked))]}
        train = [volume for volume in volumes if names[volume] not in held_out]
        val = [volume for volume in volumes if names[volume] in held_out]
        if groups is not None:
            where, remedy = f"data.group_by: {counted(len(ranked), 'group')}", "change it, or add volumes"
    if not train or len(val) < LEAST_HELD_OUT:
        raise DataError(
            f"{where}: {printable(s.source)} has {counted(len(volumes), 'volume')}, {len(train)} to train on and "
            f"{len(val)} held out; at least 1 and {LEAST_HELD_OUT} are needed; {remedy}"
        )
    return train, val


def _hash(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}\n{name}".encode("utf-8", "surrogateescape")).digest()[:7]


def groups_of(volumes: Sequence[DiscoveredVolume], s: DataSettings) -> Groups | None:
    """Return the group of each volume by `data.group_by`, or None if it is not set; raise DataError if it fits none.

    A volume that a pattern does not match is a group of its own.
    """
    if s.group_by is None:
        return None
    if s.group_by == FOLDER:
        return {volume: PurePosixPath(volume.name).parent.as_posix() for volume in volumes}
    if s.group_by.startswith(COLUMN):
        return _by_column(volumes, s.group_by.removeprefix(COLUMN), s.class_labels)
    try:
        pattern = re.compile(s.group_by)
    except (re.error, OverflowError, RecursionError) as error:
        raise DataError(
            f"data.group_by: {printable(s.group_by)} is not a pattern ({error}); folder, column:NAME or a regular "
            "expression is allowed; correct it"
        ) from error
    _require_quick(s.group_by, [volume.name for volume in volumes])
    groups = {volume: group for volume in volumes if (group := _group(pattern, volume.name)) is not None}
    unmatched = [volume for volume in volumes if volume not in groups]
    if not groups:
        raise DataError(
            f"data.group_by: {printable(s.group_by)} matches 0 of {len(volumes)} volumes, not "
            f"{printable(unmatched[0].name)}; change the pattern, or use folder or column:NAME"
        )
    if unmatched:
        log.warning(
            "data.group_by: %s matches %d of %d volumes, not %s; each of the others is a group of its own",
            printable(s.group_by),
            len(groups),
            len(volumes),
            printable(unmatched[0].name),
        )
    return groups | {volume: f"{volume.name}/" for volume in unmatched}


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


def _by_column(volumes: Sequence[DiscoveredVolume], column: str, table: str | None) -> Groups:
    if table is None:
        raise DataError(
            f"data.group_by: {COLUMN}{printable(column)} without data.class_labels; it names a column of that table; "
            "set it"
        )
    column = column.strip().lower()
    rows = read_table(table, [column], "data.group_by", "change one of the two")
    values: dict[str, str] = {}
    for _, name, row in rows:
        if values.setdefault(name, row[column]) != row[column]:
            raise DataError(
                f"data.group_by: {printable(table)} gives {printable(name)} two groups, {printable(values[name])} and "
                f"{printable(row[column])}; a volume has one; correct the table"
            )
    found = by_volume({name: [value] for name, value in values.items()}, [volume.name for volume in volumes])
    groups = {volume: next(iter(own), "") for volume, own in zip(volumes, found, strict=True)}
    missing = [volume.name for volume, group in groups.items() if not group]
    if missing:
        raise DataError(
            f"data.group_by: {printable(table)} gives {len(missing)} of {len(volumes)} volumes no group, for example "
            f"{printable(missing[0])}; each volume needs one; complete the column"
        )
    return groups


def parted_patients(train: Sequence[DiscoveredVolume], val: Sequence[DiscoveredVolume]) -> str | None:
    """Return a warning if names suggest that scans of one patient are on both sides of the split, else None."""
    for patients, group_by in suspected_groups([*train, *val]):
        sides = [{patients[volume] for volume in side if volume in patients} for side in (train, val)]
        parted = sorted(sides[0] & sides[1])
        if parted:
            some = ", ".join(printable(patient) for patient in parted[:3]) + (" ..." if len(parted) > 3 else "")
            return (
                f"names suggest that scans of the same patient are in training and in validation ({some}); "
                f"set data.group_by: {_quoted(group_by)} to keep them together"
            )
    return None


def suspected_patients(volumes: Sequence[DiscoveredVolume]) -> str | None:
    """Return a line on patients with several scans, by their names; None if names suggest none."""
    for patients, group_by in suspected_groups(volumes):
        several = {patient: count for patient, count in Counter(patients.values()).items() if count > 1}
        most = max(several, key=lambda patient: several[patient])
        return (
            f"{counted(len(several), 'patient')} {'seems' if len(several) == 1 else 'seem'} to have several scans by "
            f"{'its name' if len(several) == 1 else 'their names'} (for example {printable(most)}: {several[most]}); "
            f"data.group_by: {_quoted(group_by)} keeps each on one side of the split"
        )
    return None


def suspected_groups(volumes: Sequence[DiscoveredVolume]) -> list[tuple[Groups, str]]:
    """Return the patients that names suggest, some with several scans, and the `data.group_by` that finds them.

    The most telling come first. One patient alone is none: nothing could be split.
    """
    named = [_matched(pattern, volumes) for pattern in PATIENTS]
    # Of the others, the one that covers most volumes: names may end in t1, t2 and flair.
    numbered = sorted((_matched(pattern, volumes) for pattern in _NUMBERED), key=lambda match: -len(match[0]))
    numbered = [(patients, by) for patients, by in numbered if len(patients) <= MOST_SCANS * len({*patients.values()})]
    several = [(p, by) for p, by in (*named, *numbered) if 1 < len({*p.values()}) < len(p)]
    return [(patients, _by_folder(patients, volumes) or by) for patients, by in several]


def _matched(pattern: str, volumes: Sequence[DiscoveredVolume]) -> tuple[Groups, str]:
    """Return the patient of each volume that a pattern matches, and the pattern."""
    groups = {volume: _group(re.compile(pattern), volume.name) for volume in volumes}
    return {volume: group for volume, group in groups.items() if group is not None}, pattern


def _by_folder(patients: Groups, volumes: Sequence[DiscoveredVolume]) -> str | None:
    """Return `folder` if each patient has a folder and no volume lies elsewhere."""
    pairs = {(patients.get(volume), PurePosixPath(volume.name).parent) for volume in volumes}
    return FOLDER if len(pairs) == len({*patients.values()}) == len({folder for _, folder in pairs}) else None


def _quoted(group_by: str) -> str:
    """Return a value of `data.group_by` as YAML."""
    return group_by if group_by == FOLDER else f"'{group_by}'"


def _group(pattern: re.Pattern[str], name: str) -> str | None:
    match = pattern.search(name)
    if match is None:
        return None
    return match.group(1) if pattern.groups and match.group(1) is not None else match.group()
