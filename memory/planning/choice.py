"""One value of a plan, with the reason for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Choice:
    """The value of a dotted key and why it was chosen; `is_weak`: it rests on little evidence."""

    key: str
    value: Any
    reason: str
    is_weak: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {"value": self.value, "reason": self.reason, "inferred_from_little": self.is_weak}
