"""Write every generated document again: schema, configuration reference, memory guide, preset headers, READMEs."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
import sys
from pathlib import Path

from runtime.cli import parser, run
from scripts.dev.documents.predictions import NUM_WORKERS, Predictions
from settings import UserError, load_settings

ROOT = Path(__file__).resolve().parents[3]
READMES = ("README.md", "README.zh-CN.md")
TABLE = re.compile(r"(<!-- table: (?P<name>.+?) -->\n)(?:\|.*\n)*")
OUTPUT = re.compile(r"(<!-- output of: (?P<command>.+?) -->\n```text\n)(?P<output>.*?)(```\n)", re.DOTALL)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python -m scripts.dev.documents", "python -m scripts.dev.documents --settings"])
    result.add_argument(
        "--settings", action="store_true", help="only schema, reference and figure, which nothing is predicted for"
    )
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Write every document whose text changes."""
    from memory.predict import Predictor

    texts = of_settings()
    if not options.settings:
        with Predictor(NUM_WORKERS) as predictor:
            texts |= of_predictions(Predictions(predictor))
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


def of_settings() -> dict[Path, str]:
    """Return the current text of the documents that follow from the settings and from docs/benchmarks.json."""
    from scripts.dev.documents.figure import memory_figure
    from scripts.dev.documents.reference import configuration_reference, json_schema

    return {
        ROOT / "configs" / "schema.json": json_schema(),
        ROOT / "docs" / "configuration.md": configuration_reference(),
        ROOT / "docs" / "images" / "memory.svg": memory_figure(),
    }


def of_predictions(ask: Predictions) -> dict[Path, str]:
    """Return the current text of the documents that show predictions."""
    from scripts.dev.documents.guide import guide_tables
    from scripts.dev.documents.presets import preset_table, preset_texts

    texts = preset_texts(ask)
    tables = {"presets": preset_table(ask), **guide_tables(ask)}
    for name in (*READMES, "docs/memory_guide.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        text = TABLE.sub(lambda block: block[1] + tables[block["name"]], text)
        texts[ROOT / name] = OUTPUT.sub(lambda block: block[1] + output_of(block["command"]) + block[4], text)
    return texts


@functools.cache
def output_of(command: str) -> str:
    """Return what a ladder prints now."""
    from memory.kernels.gpus import chosen_gpu
    from memory.ladder.text import describe_ladder
    from memory.ladder.walk import walk
    from memory.predict.prediction import GIB
    from scripts import oom_ladder

    python, script, *words = shlex.split(command)
    if (python, script) != ("python", "scripts/oom_ladder.py"):
        raise UserError(f"{command}: not the command of a ladder; only the output of those is kept up to date")
    given = oom_ladder.parse(words)
    settings = load_settings(ROOT / given.config, given.overrides, stage=given.stage)
    ladder = walk(settings, given.stage, round(given.budget_gb * GIB), given.order, gpu=chosen_gpu(given.gpu))
    return describe_ladder(ladder, None).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(run(main, parse()))
