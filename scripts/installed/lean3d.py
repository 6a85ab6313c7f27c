"""The command `lean3d` and `import lean3d`, which `pip install -e .` makes available from any folder.

The command runs the project's commands; the names of the Python API come from `evaluation/api.py`. Only this module is
installed: rooms with names like `data` and `models` would mix with other packages. They stay in the clone, which is why
only an editable install works.
"""

from __future__ import annotations

import ast
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ("train_autoencoder", "train_ldm")
API = ("UserError", "Volume", "open_run", "predict_memory", "prepared_volumes", "walk_ladder")


def __getattr__(name: str) -> Any:
    if name not in API:
        raise AttributeError(f"module 'lean3d' has no attribute {name!r}; it has {', '.join(API)}")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return getattr(import_module("evaluation.api"), name)


def __dir__() -> list[str]:
    return list(API)


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
