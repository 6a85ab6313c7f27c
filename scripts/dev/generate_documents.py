"""Generate configs/schema.json and docs/configuration.md from the settings."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runtime.cli import parser, run
from scripts.dev.documents.reference import configuration_reference, json_schema

ROOT = Path(__file__).resolve().parents[2]


def generate(options: argparse.Namespace) -> None:
    """Write both files and print their names."""
    for path, text in (("configs/schema.json", json_schema()), ("docs/configuration.md", configuration_reference())):
        (ROOT / path).write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    sys.exit(run(generate, parser(str(__doc__)).parse_args()))
