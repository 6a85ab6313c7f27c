"""Names the part of a step that is running, for the profiler, the memory tracker and the out-of-memory report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_current = "set-up"


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name the phase that runs inside; after an error the name stays, so that a report can show where it happened."""
    global _current
    outer, _current = _current, name
    with torch.profiler.record_function(name):
        yield
    _current = outer


def current_phase() -> str:
    """Return the name of the innermost phase, or of the phase that failed."""
    return _current
