"""Settings that this program stored: in checkpoints, in weight files and in the config.yaml of a run.

They hold every key, so a default may change without changing an old run. This is the one place where the keys of an
earlier version are upgraded, or refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from settings.errors import CheckpointError

VERSION = 2
"""Raise this when a key is added, renamed or removed, and add what upgrades the version before."""

WAY_OUT = "use the version of the program that wrote them, or start a new run"


def _use_all_volumes(values: dict[str, Any]) -> None:
    """Version 2 can choose volumes by name."""
    for name in ("include", "exclude"):
        values.setdefault("data", {}).setdefault(name, [])


UPGRADES: dict[int, Callable[[dict[str, Any]], None]] = {1: _use_all_volumes}
"""By version: what turns the values of that version into those of the next, in place."""


def upgraded(values: dict[str, Any], where: object) -> dict[str, Any]:
    """Return stored values with the keys of this version; raise `CheckpointError` if that is not known how."""
    version = values.get("version")
    if type(version) is not int or version > VERSION or not all(old in UPGRADES for old in range(version, VERSION)):
        oldest = min(UPGRADES, default=VERSION)
        found = "no version" if version is None else f"version {version}"
        allowed = f"allowed: {oldest} to {VERSION}" if oldest < VERSION else f"allowed: {VERSION}"
        raise CheckpointError(f"{where}: its settings have {found}; {allowed}; {WAY_OUT}")
    values = {name: copy.deepcopy(value) for name, value in values.items() if name != "version"}
    for old in range(version, VERSION):
        UPGRADES[old](values)
    return values
