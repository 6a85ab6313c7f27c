"""Locks between processes of one machine, so that only one does work that all of them need."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)


@contextlib.contextmanager
def exclusive_lock(lock: Path) -> Iterator[None]:
    """Hold a lock file, waiting for it if necessary; the system releases it however the process ends.

    Where the file cannot be locked, for example on a read-only disk, warn and continue without a lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("%s: cannot be locked (%s); other processes may repeat the same work", lock, error)
        yield
