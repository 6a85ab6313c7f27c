"""How much of its time a run spends waiting for data, and a warning if that is too much."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

WAITING = "data_wait_share"
"""Key in metrics.jsonl: time spent waiting for batches, as a share of the time since the previous line."""

LARGEST_WAIT = 0.1

# Warn only after this many log lines. The first, which includes the start of the workers, is not counted.
LINES = 3


class DataWait:
    """Adds up the waiting time over log lines and warns once, with what to change."""

    def __init__(self) -> None:
        self._lines, self._waited, self._elapsed, self._is_told = 0, 0.0, 0.0, False

    def share(self, waited: float, elapsed: float) -> float:
        """Return the share of one log line; warn once if it stays above `LARGEST_WAIT`."""
        self._lines += 1
        if self._lines > 1:
            self._waited, self._elapsed = self._waited + waited, self._elapsed + elapsed
        total = self._waited / self._elapsed if self._elapsed > 0 else 0.0
        if self._lines > LINES and total > LARGEST_WAIT and not self._is_told:
            self._is_told = True
            log.warning(
                "waiting for data takes %.0f %% of the time; raise data.num_workers, set data.prepared: disk or memory "
                "if it is none, or turn data.use_augmentation off",
                100 * total,
            )
        return waited / elapsed if elapsed > 0 else 0.0
