"""File names as text that can be printed."""

from __future__ import annotations


def printable(text: object) -> str:
    """Return text with whatever could break a line, a terminal or an encoding escaped: file names may hold it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
