"""List the prepared volumes and latents that runs share, with the runs that use them, and delete what no run needs."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import parser, run
from runtime.files import LATENTS, PREPARED, RUNS, RunFolder, counted, printable, size_text
from settings import UserError

RECENT_SECONDS = 3600
"""A training that has just begun has not recorded its caches yet."""

CACHE_NAME = re.compile(r"[0-9a-f]{24}")
"""Every cache is named by a hash."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python scripts/clean.py", "python scripts/clean.py --yes"])
    result.add_argument("--yes", action="store_true", help="delete without asking")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Print one line for each cache, then delete the unneeded ones if the user agrees."""
    if not RUNS.is_dir():
        raise UserError(f"{RUNS}: no such folder; run this where your runs are, or set LEAN3D_RUNS to their folder")
    users, silent = users_of_caches()
    caches = sorted(path for root in (PREPARED, LATENTS) for path in root.glob("*") if path.is_dir())
    unneeded = []
    for path in caches:
        inside = list(path.iterdir())
        files = [file.stat() for file in inside if file.is_file()]
        size, newest = sum(file.st_size for file in files), max((file.st_mtime for file in files), default=0.0)
        name = f"{path.parent.name}/{path.name}"
        if names := users.get(name):
            why = "used by " + ", ".join(map(printable, names))
        elif path.is_symlink() or not CACHE_NAME.fullmatch(path.name) or any(file.is_dir() for file in inside):
            why = "kept: it is not a cache of this program"
        elif time.time() - newest < RECENT_SECONDS:
            why = "kept: written within the last hour"
        elif silent:
            why = f"kept: {printable(silent[0])} does not say what it uses; it was trained by an older version"
        else:
            why = "no run needs it"
            unneeded.append((path, size))
        print(f"{printable(path)}  {counted(len(files), 'file')}, {size_text(size)}: {why}")
    if not unneeded:
        print("nothing to delete")
        return 0
    what = f"{counted(len(unneeded), 'folder')}, {size_text(sum(size for _, size in unneeded))}"
    if not options.yes and (not sys.stdin.isatty() or input(f"delete {what}? [y/N] ").strip().lower() != "y"):
        print(f"nothing was deleted; --yes deletes {what}")
        return 0
    for path, _ in unneeded:
        shutil.rmtree(path)
    print(f"deleted {what}")
    return 0


def users_of_caches() -> tuple[dict[str, list[str]], list[str]]:
    """Return the runs that use each cache, and the runs that do not say what they use."""
    users: dict[str, list[str]] = {}
    silent = []
    for config in sorted(RUNS.glob("*/config.yaml")):
        caches = RunFolder(config.parent).known_caches()
        if caches is None:
            silent.append(config.parent.name)
        for name in caches or ():
            users.setdefault(name, []).append(config.parent.name)
    return users, silent


if __name__ == "__main__":
    sys.exit(run(main, parse()))
