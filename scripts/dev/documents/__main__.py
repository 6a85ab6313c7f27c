"""Write every generated document again: schema, configuration reference, memory guide, preset headers, READMEs."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from runtime.cli import parser, run
from scripts.dev.documents.predictions import (
    NUM_WORKERS,
    PATH,
    Predictions,
    StoredLadder,
    question,
    stored_text,
)
from settings import UserError, load_settings

ROOT = Path(__file__).resolve().parents[3]
READMES = ("README.md", "README.zh-CN.md")
TABLE = re.compile(r"(<!-- table: (?P<name>.+?) -->\n)(?:\|.*\n)*")
OUTPUT = re.compile(r"(<!-- output of: (?P<command>.+?) -->\n```text\n)(?P<output>.*?)(```\n)", re.DOTALL)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python -m scripts.dev.documents", "python -m scripts.dev.documents --stored"])
    result.add_argument("--stored", action="store_true", help=f"reuse {PATH.name}, if nothing new is predicted")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Predict, write every document whose text changes, and keep the predictions."""
    from memory.predict import Predictor

    if options.stored:
        texts = documents(Predictions())
    else:
        with Predictor(NUM_WORKERS) as predictor:
            ask = Predictions(predictor)
            texts = documents(ask)
        outputs, ladder = ladders("".join(texts[ROOT / name] for name in READMES))
        for name in READMES:
            shown = OUTPUT.sub(lambda block: block[1] + outputs[block["command"]] + block[4], texts[ROOT / name])
            texts[ROOT / name] = shown
        texts[PATH] = stored_text(ask.figures(), ladder)
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


def documents(ask: Predictions) -> dict[Path, str]:
    """Return the current text of every document that is generated, or has generated tables."""
    from scripts.dev.documents.guide import guide_tables
    from scripts.dev.documents.presets import preset_table, preset_texts
    from scripts.dev.documents.reference import configuration_reference, json_schema

    tables = {"presets": preset_table(ask), **guide_tables(ask)}
    texts = {
        ROOT / "configs" / "schema.json": json_schema(),
        ROOT / "docs" / "configuration.md": configuration_reference(),
        **preset_texts(ask),
    }
    for name in (*READMES, "docs/memory_guide.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        texts[ROOT / name] = TABLE.sub(lambda block: block[1] + tables[block["name"]], text)
    return texts


def ladders(text: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return what each ladder shown in a text prints now, and its predictions."""
    from memory.kernels.gpus import chosen_gpu
    from memory.ladder.text import describe_ladder
    from memory.ladder.walk import walk
    from memory.predict.prediction import GIB
    from scripts import oom_ladder

    outputs, answers = {}, {}
    for command in {block["command"] for block in OUTPUT.finditer(text)}:
        python, script, *words = shlex.split(command)
        if (python, script) != ("python", "scripts/oom_ladder.py"):
            raise UserError(f"{command}: not the command of a ladder; only the output of those is kept up to date")
        given = oom_ladder.parse(words)
        settings = load_settings(ROOT / given.config, given.overrides, stage=given.stage)
        ladder = walk(settings, given.stage, round(given.budget_gb * GIB), given.order, gpu=chosen_gpu(given.gpu))
        outputs[command] = describe_ladder(ladder, None).rstrip() + "\n"
        for rung in ladder.rungs:
            answers[question(rung.rung.settings, given.stage)] = StoredLadder.kept(rung.prediction)
    return outputs, answers


if __name__ == "__main__":
    sys.exit(run(main, parse()))
