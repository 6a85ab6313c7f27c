"""Fixtures that tests of several packages use."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.tiny_config import TINY
from tests.support.warm_start import WarmStart

ROOT = Path(__file__).resolve().parent.parent
START = time.monotonic()

# oneDNN's 16-bit kernels cannot be trusted: AMX is an illegal instruction on some machines that announce it, and
# AVX-512 without bfloat16 returns uninitialised memory as weight gradients. For users, choose_device does this.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Restore the root logger after a test that ran a command."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def tiny_values() -> dict[str, Any]:
    """A config that trains in seconds, as nested values that a test may change."""
    return copy.deepcopy(TINY)


@pytest.fixture
def tiny_config(tmp_path: Path, tiny_values: dict[str, Any]) -> Path:
    """The tiny config as a file."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_values))
    return path


@pytest.fixture(scope="session")
def warm() -> WarmStart:
    """Commands that start in a fraction of a second."""
    return WarmStart()


@pytest.fixture
def command(warm: WarmStart, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script of the project in a process of its own and a fresh folder, and return what it printed."""

    def start(*arguments: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        output, errors = (tmp_path.with_name(f"{tmp_path.name}_{kind}") for kind in ("output", "errors"))
        begun = warm(tmp_path, *map(str, arguments), output=output, errors=errors)
        code = begun.wait(timeout)
        return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())

    return start


@pytest.fixture(scope="session")
def _workers() -> Iterator[dict[Any, list[subprocess.Popen[str]]]]:
    workers: dict[Any, list[subprocess.Popen[str]]] = defaultdict(list)
    yield workers
    for process in chain(*workers.values()):
        process.kill()
        process.communicate()


@pytest.fixture
def shared_workers(_workers: dict[Any, list[subprocess.Popen[str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let predictors of this process take over the workers of earlier ones, whose imports take seconds."""
    from memory.predict import Predictor

    start = Predictor._start

    def idle(predictor: Predictor) -> list[subprocess.Popen[str]]:
        return _workers[predictor._without_triton, os.environ.get("ONEDNN_MAX_CPU_ISA")]

    def taken(predictor: Predictor) -> subprocess.Popen[str]:
        return idle(predictor).pop() if idle(predictor) else start(predictor)

    def given_back(predictor: Predictor) -> None:
        predictor._threads.shutdown(cancel_futures=True)
        idle(predictor).extend(process for process in predictor._processes if process.poll() is None)
        predictor._processes.clear()
        predictor._folder.cleanup()

    monkeypatch.setattr(Predictor, "_start", taken)
    monkeypatch.setattr(Predictor, "close", given_back)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `scripts/check_gpu.sh` bound the time that its tests take."""
    parser.addoption("--seconds", type=float, help="skip the tests that have not begun after so many seconds")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test for which there is no time left."""
    limit = item.config.getoption("--seconds", None)
    if limit is not None and time.monotonic() - START > limit:
        pytest.skip(f"not begun within {limit:g} s")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say why; sort tests that need a GPU by size.

    Gradients of large batches, huge volumes and whole runs come last, so that a limit of time leaves out these.
    """
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    for item in on_gpu:
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

    def size(item: Any) -> int:
        batch: int = item.callspec.params.get("batch", 0) if hasattr(item, "callspec") else 0
        return 100 if "test_gpu_runs" in item.nodeid or "beyond_32_bits" in item.nodeid else batch

    items[:] = [*(item for item in items if item not in on_gpu), *sorted(on_gpu, key=size)]
