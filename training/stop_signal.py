"""Stopping cleanly: after SIGINT, SIGTERM or SIGUSR1 the loop finishes its step and saves a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """Records the first stop signal; a second SIGINT raises `KeyboardInterrupt`."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number).name
            _say(f"{self.received}: finishing this step, then saving a checkpoint (Ctrl-C again stops at once)")

    def __bool__(self) -> bool:
        return self.received is not None


def _say(text: str) -> None:
    # Not through logging: the signal may interrupt a write to the same stream, which is not reentrant.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, f"\n{text}\n".encode())
