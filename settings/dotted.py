"""Dotted keys, such as data.num_workers, in settings and in nested dictionaries."""

from __future__ import annotations

from typing import Any

from settings.section import Section


def look_up(values: Any, dotted: str) -> Any:
    """Return the value of a dotted key; None where nested dictionaries do not have it."""
    for part in dotted.split("."):
        if isinstance(values, Section):
            values = getattr(values, part)
        else:
            values = values.get(part) if isinstance(values, dict) else None
    return values


def has_key(values: dict[str, Any], dotted: str) -> bool:
    """Return whether nested dictionaries have a dotted key."""
    parent, _, last = dotted.rpartition(".")
    section = look_up(values, parent) if parent else values
    return isinstance(section, dict) and last in section


def assign(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key in nested dictionaries, adding missing sections; raise `KeyError` if a parent holds a value."""
    *parents, last = dotted.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise KeyError(dotted)
    values[last] = value


def remove(values: dict[str, Any], dotted: str) -> None:
    """Remove a dotted key from nested dictionaries, if they have it."""
    parent, _, last = dotted.rpartition(".")
    section = look_up(values, parent) if parent else values
    if isinstance(section, dict):
        section.pop(last, None)


def overlap(one: str, other: str) -> bool:
    """Return whether two dotted keys are equal or one contains the other."""
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")
