"""What tests look at in a run's folder."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.warm_start import Command


def free_port() -> int:
    """Return a free port below the range from which the system assigns ports.

    A port in that range could be assigned to another process before the intended one opens it.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports are all in use")


def losses(folder: Path, stage: str, name: str) -> list[float]:
    """Return a logged metric, one entry a step."""
    lines = map(json.loads, (folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if line["stage"] == stage and name in line]


def num_lines(folder: Path) -> int:
    """Return how many lines of metrics there are by now."""
    metrics = folder / "runs" / "tiny" / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for(condition: Callable[[], bool], *commands: Command, seconds: float = 300) -> None:
    """Wait until a condition holds; fail if a command ends first."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, [command.output for command in commands]
        assert all(command.exit_code is None for command in commands), [command.output for command in commands]
        time.sleep(0.002)


def checkpoints(folder: Path, stage: str) -> list[Path]:
    """Return the checkpoints of a stage, oldest first."""
    return sorted((folder / "runs" / "tiny" / "checkpoints").glob(f"{stage}_step_*.pt"))
