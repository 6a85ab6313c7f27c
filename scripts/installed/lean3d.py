"""The command `lean3d`, which `pip install -e .` puts on the path: runs the project's commands from any folder.

This module alone gets installed: rooms with names like `data` and `models` would mix with other packages. They stay in
the clone, which is why only an editable install works.
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ("train_autoencoder", "train_ldm")


def main() -> int:
    """Run `lean3d COMMAND [arguments]` like `python COMMAND.py [arguments]` in the clone."""
    commands = {name: ROOT / f"{name}.py" for name in TRAINING}
    if not all(path.is_file() for path in commands.values()):
        print(f"error: {__file__}: found without the project; install its clone with pip install -e .", file=sys.stderr)
        return 2
    commands |= {path.stem: path for path in sorted((ROOT / "scripts").glob("*.py"))}
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("usage: lean3d COMMAND [arguments]; lean3d COMMAND --help describes each\n")
        for command, path in commands.items():
            print(f"  {command:18} {(ast.get_docstring(ast.parse(path.read_text())) or '').splitlines()[0]}")
        return 0
    if name not in commands:
        print(f"error: {name!r}: no such command; allowed: {', '.join(commands)}", file=sys.stderr)
        return 2
    sys.argv = [str(commands[name]), *sys.argv[2:]]
    sys.path.insert(0, str(ROOT))
    runpy.run_path(str(commands[name]), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
