"""The share of time that a run waits for its data, and what to change if that is too much."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

WAITING = "data_wait_share"
"""Key in metrics.jsonl: time spent waiting for batches, as a share of the time since the line before."""

LARGEST_WAIT = 0.1

# Log lines that are counted before a run is told: the first, which is left out, includes the start of the workers.
LINES = 3


class DataWait:
    """Adds up waiting over log lines and says once what to change."""

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
