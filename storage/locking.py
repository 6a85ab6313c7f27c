"""Lets one process of a node do what its neighbours need too, while they wait."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold a lock file, which the system releases however the process ends; without it where none can be written."""
    with contextlib.ExitStack() as stack:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("data: %s cannot be locked (%s); other processes may do the same work meanwhile", lock, error)
        yield
