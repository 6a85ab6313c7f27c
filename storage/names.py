"""File names as printable text."""

from __future__ import annotations


def printable(text: object, keep: str = "") -> str:
    """Return text with unprintable characters escaped, except those in `keep`.

    A file name may hold line breaks, terminal codes and bytes that no encoding can represent.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in str(text))
