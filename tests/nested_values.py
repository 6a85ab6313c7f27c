"""Nested values of a config as dotted keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of nested values, and what they are set to."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
