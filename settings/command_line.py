"""What every command has in common: its arguments, its exit codes and how errors are shown."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence

from settings.errors import UserError

INTERRUPTED = 130
OUT_OF_MEMORY = 3


def parser(description: str, examples: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every command takes; examples are shown by --help."""
    epilog = "examples:\n" + "\n".join(f"  {example}" for example in examples) if examples else None
    result = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    result.add_argument("--quiet", action="store_true", help="warnings and errors only, no progress bars")
    return result


def add_config(target: argparse.ArgumentParser) -> None:
    """Add --config and the trailing overrides."""
    target.add_argument("--config", required=True, metavar="FILE", help="a preset, such as configs/high_res.yaml")
    target.add_argument("overrides", nargs="*", metavar="section.key=value", help="change single keys of the config")


def add_training(target: argparse.ArgumentParser) -> None:
    """Add what both train scripts take besides the config."""
    target.add_argument("--dry-run", action="store_true", help="say what would be trained and what it needs, then stop")
    target.add_argument(
        "--on-oom",
        choices=("stop", "next-rung"),
        default="stop",
        help="out of memory: stop with a report, or go on with the next memory knob that keeps the mathematics",
    )


def run(main: Callable[[argparse.Namespace], int | None], options: argparse.Namespace) -> int:
    """Run a command and return its exit code; users' errors become text on standard error.

    0 done, 2 the input is wrong, 3 out of memory, 130 interrupted.
    """
    _set_up_logging(options.quiet)
    try:
        return main(options) or 0
    except UserError as error:
        # Under torchrun every rank meets the same error: one of them says it.
        if os.environ.get("RANK", "0") == "0":
            print(f"{_red('error')}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _set_up_logging(quiet: bool) -> None:
    rank = int(os.environ.get("RANK", "0"))
    level = logging.WARNING if quiet or rank > 0 else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr, force=True)
    if quiet:
        # tqdm reads this when it is imported, which is later: settings load first.
        os.environ["TQDM_DISABLE"] = "1"


def _red(text: str) -> str:
    return f"\033[31m{text}\033[0m" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else text
