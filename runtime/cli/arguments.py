"""Arguments that commands share, and output files, which are checked before any long work starts."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from settings.errors import ConfigError, Problem, UserError


def parser(description: str, examples: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every command takes; --help lists the examples."""
    epilog = "examples:\n" + "\n".join(f"  {example}" for example in examples) if examples else None
    result = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    result.add_argument("--quiet", action="store_true", help="print only warnings and errors, and no progress bars")
    return result


def add_config(target: argparse.ArgumentParser) -> None:
    """Add --config and the overrides that follow it."""
    target.add_argument("--config", required=True, metavar="FILE", help="a config, such as configs/high_res.yaml")
    target.add_argument("overrides", nargs="*", metavar="section.key=value", help="override keys of the config")


def add_training(target: argparse.ArgumentParser, stage: str) -> None:
    """Add --config, the overrides and the other arguments that both train scripts take."""
    add_config(target)
    target.set_defaults(stage=stage)
    target.add_argument(
        "--dry-run", action="store_true", help="print what would be trained and the memory it needs, then stop"
    )
    target.add_argument(
        "--print-config", action="store_true", help="print every setting and where its value comes from, then stop"
    )
    target.add_argument(
        "--gpu",
        metavar="NAME",
        help='with --dry-run: also predict for this GPU, such as "RTX 4090"; default without a GPU here: A100',
    )
    limit = target.add_mutually_exclusive_group()
    limit.add_argument(
        "--hours",
        type=above_zero,
        help="train for this long instead of max_steps; the learning rate decays over that time",
    )
    limit.add_argument("--minutes", type=above_zero, help="the same in minutes")
    target.add_argument("--log-file", metavar="FILE", help="also append every message and a line per log_every here")
    target.add_argument(
        "--on-oom",
        choices=("stop", "next-rung"),
        default="stop",
        help="when memory runs out: stop with a report (default), or continue with the next memory knob that leaves the"
        " mathematics unchanged",
    )


def overrides_of(options: argparse.Namespace) -> list[str]:
    """Return the overrides of a train script; --hours and --minutes override the stage's `max_hours`."""
    if options.gpu is not None and not options.dry_run:
        raise ConfigError([Problem("--gpu", "given without --dry-run", "allowed: with it", "leave it out to train")])
    hours = options.hours if options.minutes is None else options.minutes / 60
    return [*options.overrides, *([] if hours is None else [f"{options.stage}.training.max_hours={hours!r}"])]


def at_least(smallest: float) -> Callable[[str], float]:
    """Return a reader of numbers no smaller than `smallest`; it accepts only whole numbers if `smallest` is an int."""
    kind = type(smallest)

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not smallest <= value < float("inf"):
            name = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {name} of at least {smallest:g}")
        return value

    return read


def above_zero(text: str) -> float:
    """Read a finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


RUN_OPTIONS: dict[str, dict[str, Any]] = {
    "--run": {"required": True, "metavar": "DIR", "help": "folder of a run, finished or not"},
    "--best": {"action": "store_true", "help": "use the weights of the best validation (default: the last weights)"},
    "--steps": {"type": at_least(1), "help": "steps from noise to latent (default: as configured)"},
    "--guidance-scale": {"type": at_least(0.0), "help": "values above 1 follow the conditions more closely"},
    "--seed": {"type": at_least(0), "default": 0, "help": "seed of the samples (default: 0)"},
    "--budget-gb": {
        "type": at_least(0.0),
        "help": "smaller batches and slabs if more memory than this is needed (default: the free memory)",
    },
}


def add_run_options(target: argparse.ArgumentParser, *names: str) -> None:
    """Add these of the options that several commands for trained runs take."""
    for name in names:
        target.add_argument(name, **RUN_OPTIONS[name])


def check_output_file(path: str | Path, option: str = "--json", inputs: Iterable[str | Path] = ()) -> None:
    """Raise `UserError`, naming the option, unless a file can be written to this path. Creates nothing.

    An output that would replace one of the command's `inputs` is refused.
    """
    target = Path(path)
    if not os.path.lexists(target):
        check_output_folder(path, option)
    elif not os.access(target, os.W_OK) or target.is_dir() or target.is_fifo():
        raise UserError(f"{option}: {path} is not a file that can be overwritten; give the name of a file")
    elif any(Path(source).exists() and target.samefile(source) for source in inputs):
        raise UserError(f"{option}: {path} is an input of this command and would be lost; give another name")


def check_output_folder(path: str | Path, option: str = "--out") -> None:
    """Raise `UserError`, naming the option, unless files can be written to this folder, which need not exist yet.

    Creates nothing.
    """
    if not str(path):
        raise UserError(f"{option}: the path is empty; give a name")
    folder = next(folder for folder in (Path(path), *Path(path).absolute().parents) if os.path.lexists(folder))
    try:
        # Permissions do not show that a disk is read-only, so try it. On Linux this file never gets a name.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written ({folder}: {error.strerror}); give another path") from None


def write_output(path: str | Path, text: str) -> None:
    """Write a text file, creating its folder. The path may be a device such as /dev/stdout."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")
