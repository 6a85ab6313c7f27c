"""Fixtures of the tests that need a GPU, and the tables that they print at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.table import Row, as_table

ROOT = Path(__file__).resolve().parents[2]
PEAKS, TIMES = "peak reserved, GiB", "seconds a step"
EXPECTED = {PEAKS: "predicted", TIMES: "stock"}
TABLES = pytest.StashKey[dict[str, list[Row]]]()


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str, Row], None]:
    """Add a row to the table of a title."""
    tables = request.config.stash.setdefault(TABLES, {})
    return lambda title, row: tables.setdefault(title, []).append(row)


@pytest.fixture
def exact_arithmetic() -> Iterator[Callable[[], None]]:
    """Turn TF32 off and choose deterministic kernels, so that fp32 is fp32 and the same step gives the same bits.

    Call what it returns after building a step, because the settings of a step choose these things for the process.
    """
    import torch

    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32, convolutions.deterministic, convolutions.benchmark

    def choose(tf32: bool, products_tf32: bool, deterministic: bool, benchmark: bool) -> None:
        convolutions.allow_tf32, products.allow_tf32 = tf32, products_tf32
        convolutions.deterministic, convolutions.benchmark = deterministic, benchmark

    def apply() -> None:
        choose(False, False, True, False)

    apply()
    yield apply
    choose(*before)


@pytest.fixture(scope="session")
def measured_step() -> Callable[..., dict[str, Any]]:
    """Run `tests.gpu.measured_step` in a process of its own, whose memory nothing else shares; return its figures."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def measure(*arguments: str) -> dict[str, Any]:
        if arguments not in known:
            command = [sys.executable, "-m", "tests.gpu.measured_step", *arguments]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
            known[arguments] = json.loads(done.stdout.splitlines()[-1])
        return known[arguments]

    return measure


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the tables with the names of GPU and torch, ready to be pasted into a report."""
    tables = config.stash.get(TABLES, {})
    if not tables:
        return
    import torch

    from models.lean.norm.operators import uses_triton

    gpu = torch.cuda.get_device_properties(0)
    norms = "Triton's kernels" if uses_triton(torch.device("cuda", 0)) else "torch's own kernels"
    terminalreporter.section("measured on this GPU")
    terminalreporter.write_line(
        f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, compute capability {gpu.major}.{gpu.minor}; "
        f"torch {torch.__version__}; norms by {norms}"
    )
    for title, rows in tables.items():
        for line in ("", *as_table(title, rows, EXPECTED[title])):
            terminalreporter.write_line(line)
