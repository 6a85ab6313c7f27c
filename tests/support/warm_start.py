"""Start commands quickly, as forks of one process that has already done the slow imports."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 300

# multiprocessing polls all children whenever it starts or queries one, which is not thread-safe.
_children = threading.Lock()


class WarmStart:
    """Starts commands whose imports are already done."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            [
                "memory.watch.memory_watch",
                "training.validation.stages",
                "torch.utils.tensorboard",
                "evaluation.trained_run",
                "evaluation.quality",
                "evaluation.report",
                "models.exchange",
            ]
        )
        # Killed processes leak their semaphores; silence the resource tracker's warning about that.
        warnings = "ignore:resource_tracker:UserWarning"
        changes = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": warnings}
        with mock.patch.dict(os.environ, changes):
            forkserver.ensure_running()
        # The first fork waits for the imports, so that later starts are fast.
        first = self._context.Process(target=os.getpid)
        first.start()
        first.join()

    def __call__(
        self, folder: Path, *arguments: str, output: Path, errors: Path | None = None, **environment: str
    ) -> Command:
        """Start a script of the project in `folder`; what it prints goes to `output`, or in part to `errors`."""
        process = self._context.Process(
            target=_execute, args=(folder, arguments, output, errors or output, environment)
        )
        with _children:
            process.start()
        return Command(process, output)


class Command:
    """A command that was started."""

    def __init__(self, process: Any, output: Path) -> None:
        self._process = process
        self._output = output
        self.pid: int = process.pid

    @property
    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        with _children:
            return self._process.exitcode

    @property
    def output(self) -> str:
        """Return everything printed so far."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def send(self, number: int) -> None:
        """Send a signal if the command is still running."""
        if self.exit_code is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill the command and wait until it has ended."""
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for the command and return its exit code; after `seconds`, kill it and raise `TimeoutError`."""
        deadline = time.monotonic() + seconds
        while (code := self.exit_code) is None:
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise TimeoutError(f"still running after {seconds:g} s:\n{self.output}")
            time.sleep(0.005)
        return code


def _execute(folder: Path, arguments: tuple[str, ...], output: Path, errors: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor if errors == output else os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.argv = [str(ROOT / arguments[0]), *arguments[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")
