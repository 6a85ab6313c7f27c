"""Splits volumes into training and validation; groups stay together."""

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


def suspected_pattern(volumes: Sequence[DiscoveredVolume]) -> str | None:
    """Return a `data.group_by` by which names say, as in BIDS, that patients have several scans; None without."""
    return next((pattern for pattern in PATIENTS if _num_repeated(pattern, volumes)), None)


def suspected_patients(volumes: Sequence[DiscoveredVolume]) -> str | None:
    """Return a line on patients with several scans, by their names; None if names suggest none."""
    pattern = suspected_pattern(volumes)
    if pattern is None:
        return None
    return (
        f"{counted(_num_repeated(pattern, volumes), 'patient')} seem to have several scans by their names; "
        f"data.group_by: '{pattern}' keeps each on one side of the split"
    )


def _num_repeated(pattern: str, volumes: Sequence[DiscoveredVolume]) -> int:
    """Return how many of at least two names that a pattern finds are found more than once."""
    groups = Counter(_group(re.compile(pattern), volume.name) for volume in volumes)
    del groups[None]
    return sum(count > 1 for count in groups.values()) if len(groups) > 1 else 0


def _group(pattern: re.Pattern[str], name: str) -> str | None:
    match = pattern.search(name)
    if match is None:
        return None
    return match.group(1) if pattern.groups and match.group(1) is not None else match.group()
