"""File names and numbers as text for people."""

from __future__ import annotations


def printable(text: object, keep: str = "") -> str:
    """Return text with unprintable characters escaped, except those in `keep`.

    A file name may hold line breaks, terminal codes and bytes that no encoding can represent.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in str(text))


def shortened(text: str, longest: int = 60) -> str:
    """Return text, cut to a number of characters."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 entry, 2 entries, 2 keys."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and not noun.endswith(("ay", "ey", "oy", "uy")):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def size_text(num_bytes: int) -> str:
    """Return a number of bytes in GiB, or in MiB if it is small."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 // 10 else f"{num_bytes / 2**20:.2f} MiB"
