"""Settings that this program stored: in checkpoints, in weight files and in the config.yaml of a run.

They hold every key, so a default may change without changing an old run. This is the one place where settings of an
earlier version are upgraded, or refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from settings.dotted import has_key
from settings.errors import CheckpointError, ConfigError
from settings.load import known_keys, validate
from settings.root import Settings
from settings.section import is_section

VERSION = 1
"""Raise this when a key is added, renamed or removed, and add what upgrades the version before."""

UPGRADES: dict[int, Callable[[dict[str, Any]], None]] = {}
"""By version: what turns the values of that version into those of the next, in place."""


def stored(settings: Settings) -> dict[str, Any]:
    """Return the settings as they are stored: every key, and the version."""
    return {"version": VERSION, **settings.model_dump(mode="json")}


def restored(values: dict[str, Any], where: object) -> Settings:
    """Return stored settings; raise `CheckpointError` unless this version has, or gives them, the same meaning."""
    values = upgraded(values, where)
    missing = [dotted for dotted, field in known_keys() if not is_section(field) and not has_key(values, dotted)]
    if missing:
        raise CheckpointError(f"{where}: its settings lack {missing[0]}; {_WAY_OUT}")
    try:
        return validate(values)
    except ConfigError as error:
        raise CheckpointError(f"{where}: its settings cannot be used; {_WAY_OUT}: {error}") from None


_WAY_OUT = "use the version of the program that wrote them, or start a new run"


def upgraded(values: dict[str, Any], where: object) -> dict[str, Any]:
    """Return stored values with the keys of this version; raise `CheckpointError` if that is not known how."""
    version = values.get("version")
    if type(version) is not int or version > VERSION or not all(old in UPGRADES for old in range(version, VERSION)):
        oldest = min(UPGRADES, default=VERSION)
        found = "no version" if version is None else f"version {version}"
        allowed = f"allowed: {oldest} to {VERSION}" if oldest < VERSION else f"allowed: {VERSION}"
        raise CheckpointError(f"{where}: its settings have {found}; {allowed}; {_WAY_OUT}")
    values = {name: copy.deepcopy(value) for name, value in values.items() if name != "version"}
    for old in range(version, VERSION):
        UPGRADES[old](values)
    return values
