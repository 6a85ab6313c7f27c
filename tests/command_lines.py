"""Command lines as documents show them, read by the scripts' own parsers."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from settings import load_settings

ROOT = Path(__file__).resolve().parent.parent


def commands(text: str, opening: str = r"python|torchrun|bash") -> list[tuple[str, ...]]:
    """Return the commands for scripts of this project, from code blocks, inline code and comments."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = []
    for line in re.findall(rf"(?:^|[`'#:]|exec)\s*((?:{opening}) [^`'\n]*?)(?= -->|[`'\n])", joined, re.MULTILINE):
        words = shlex.split(line, comments=True)
        if any(word.endswith((".py", ".sh")) for word in words):
            found.append(tuple(words))
    return found


def script_of(words: tuple[str, ...]) -> str:
    """Return the script that a command runs."""
    return next(word for word in words if word.endswith((".py", ".sh")))


def read_by_its_script(words: tuple[str, ...]) -> None:
    """Let the script's own parser read a command, and load the config with the overrides that it names."""
    script = script_of(words)
    assert (ROOT / script).is_file(), f"there is no {script}"
    if script.endswith(".sh"):
        subprocess.run(["bash", "-n", ROOT / script], check=True)
        return
    options = parsed(script, list(words[words.index(script) + 1 :]))
    if getattr(options, "config", None):
        load_settings(ROOT / options.config, getattr(options, "overrides", []))


def parsed(script: str, arguments: list[str]) -> Any:
    """Return the options that a script passes to `run`; raise argparse's SystemExit if it rejects the arguments."""
    with (
        mock.patch("runtime.cli.run", return_value=0) as run,
        mock.patch.object(sys, "argv", [script, *arguments]),
    ):
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit:
            if not run.called:
                raise
    assert run.call_count == 1, f"{script} did not read its arguments"
    return run.call_args.args[1]


def help_of(script: str) -> str:
    """Return what --help prints."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.suppress(SystemExit),
        mock.patch.object(sys, "argv", [script, "--help"]),
    ):
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return printed.getvalue()
