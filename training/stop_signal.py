"""Stopping cleanly: after SIGINT, SIGTERM, SIGHUP or SIGUSR1 the loop finishes its step and saves a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """Records the first stop signal; a SIGINT after it ends the process at once.

    A SIGHUP that is ignored, as nohup has it, stays so.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
        for number in (signal.SIGINT, signal.SIGTERM, *hangup, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            # The system's own handling, because Python's would wait for the end of a long operation.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _leave_closed_terminal()
            _say(f"{self.received}: finishing this step, then saving a checkpoint (Ctrl-C again stops at once)")

    def __bool__(self) -> bool:
        return self.received is not None


def _leave_closed_terminal() -> None:
    """Drop output that has no place to go after its terminal was closed: a failing progress bar would end the run."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), descriptor)


def _say(text: str) -> None:
    # Not through logging: the signal may interrupt a write to the same stream, which is not reentrant.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, f"\n{text}\n".encode())
