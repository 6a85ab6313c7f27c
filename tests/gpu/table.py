"""The table that the GPU tests fill: what was measured on this GPU beside what was predicted or what stock takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One comparison; `expected` is a prediction, or stock MONAI's figure in the same units."""

    what: str
    expected: float
    measured: float

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the texts of the row."""
        ratio = f"{self.measured / self.expected:.2f}" if self.expected else "-"
        return self.what, f"{self.expected:.3f}", f"{self.measured:.3f}", ratio


def as_table(title: str, rows: Sequence[Row], expected: str) -> list[str]:
    """Return the lines of a Markdown table; `expected` heads the second column. No rows, no lines."""
    if not rows:
        return []
    lines = [f"| {title} | {expected} | measured | ratio |", "|---|---:|---:|---:|"]
    return [*lines, *(f"| {' | '.join(row.cells)} |" for row in rows)]
