"""Run the commands whose output README shows, and put what they print below them."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import parser, run
from settings import UserError

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "README.zh-CN.md")
BLOCK = re.compile(r"(<!-- output of: (?P<command>.+?) -->\n```text\n)(?P<output>.*?)(```\n)", re.DOTALL)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    return parser(__doc__ or "", ["python dev/readme_output.py"]).parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Rewrite every block of output in both files; each command runs once."""
    outputs: dict[str, str] = {}
    for name in READMES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            command = block["command"]
            if command not in outputs:
                outputs[command] = _output_of(command)
        path.write_text(
            BLOCK.sub(lambda block: block[1] + outputs[block["command"]] + block[4], text), encoding="utf-8"
        )
        print(path)
    return 0


def _output_of(command: str) -> str:
    """Return what a command prints; exit code 3 is an answer too: nothing fits."""
    words = shlex.split(command)
    words = [sys.executable, *words[1:]] if words[0] == "python" else words
    done = subprocess.run([*words, "--quiet"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        raise UserError(f"{command}: ended with code {done.returncode}; {done.stderr.strip()}")
    return done.stdout.rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(run(main, parse()))
