"""Pieces of HTML. All outside text on the page passes through `escaped`."""

from __future__ import annotations

import html
from collections.abc import Sequence

from memory.predict.prediction import GIB
from runtime.files.names import printable


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of escaped text."""
    top = f"<thead><tr>{''.join(f'<th>{escaped(cell)}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def gib(nbytes: float) -> str:
    """Return bytes as GiB or MiB."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 10 else f"{nbytes / (1 << 20):.1f} MiB"


def escaped(value: object) -> str:
    """Return outside text as HTML."""
    # File names may contain characters that cannot be encoded.
    return html.escape(printable(value, keep="\n\t"), quote=True)
