"""The measured figures, in docs/measured.json, each beside its prediction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[3] / "docs" / "measured.json"


def read(what: str) -> dict[str, dict[str, Any]]:
    """Return the kept rows of one part by their names."""
    return json.loads(PATH.read_text(encoding="utf-8")).get(what, {}) if PATH.is_file() else {}


def keep(what: str, row: dict[str, Any]) -> None:
    """Write a row, in place of an older one with its name."""
    known = json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {}
    known.setdefault(what, {})[row["name"]] = {name: value for name, value in row.items() if name != "name"}
    PATH.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
