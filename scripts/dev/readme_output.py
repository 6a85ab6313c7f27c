"""Run the ladders whose output README shows, put what they print below them, and keep their predictions."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runtime.cli import OUT_OF_MEMORY, parser, run
from settings import UserError, load_settings

ROOT = Path(__file__).resolve().parents[2]
READMES = ("README.md", "README.zh-CN.md")
BLOCK = re.compile(r"(<!-- output of: (?P<command>.+?) -->\n```text\n)(?P<output>.*?)(```\n)", re.DOTALL)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    return parser(__doc__ or "", ["python scripts/dev/readme_output.py"]).parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Rewrite every block of output in both files; each command runs once."""
    from scripts.dev.guide.stored import write

    outputs: dict[str, str] = {}
    answers: dict[str, dict[str, Any]] = {}
    for name in READMES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            command = block["command"]
            if command not in outputs:
                outputs[command], predictions = _output_of(command)
                answers.update(predictions)
        path.write_text(
            BLOCK.sub(lambda block: block[1] + outputs[block["command"]] + block[4], text), encoding="utf-8"
        )
        print(path)
    write("readme", answers)
    return 0


def _output_of(command: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return what a ladder's command prints, and its predictions; exit code 3 is an answer too: nothing fits."""
    from scripts import oom_ladder
    from scripts.dev.guide.stored import question

    python, script, *words = shlex.split(command)
    if (python, script) != ("python", "scripts/oom_ladder.py"):
        raise UserError(f"{command}: not the command of a ladder; only the output of those is kept up to date")
    with tempfile.TemporaryDirectory() as folder:
        ladder = Path(folder) / "ladder.json"
        line = [sys.executable, script, *words, "--quiet", "--json", str(ladder)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode not in (0, OUT_OF_MEMORY):
            raise UserError(f"{command}: ended with code {done.returncode}; {done.stderr.strip()}")
        rungs = json.loads(ladder.read_text())["rungs"]
    given = oom_ladder.parse(words)
    settings = load_settings(ROOT / given.config, given.overrides, stage=given.stage)
    answers = {question(settings.with_overrides(rung["all_changes"]), given.stage): rung for rung in rungs}
    return done.stdout.rstrip() + "\n", answers


if __name__ == "__main__":
    sys.exit(run(main, parse()))
