"""Progress bars of commands, which become a few plain lines where standard error is not a terminal."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from tqdm import tqdm

log = logging.getLogger(__name__)

PLAIN_SECONDS = 30
"""A log file gets one line of a bar this often, and none of a bar that is done sooner."""

PLAIN_FORMAT = "{desc}: {n_fmt}/{total_fmt} {unit}{postfix}, {elapsed}"


class _Lines:
    """Takes what tqdm writes to a file, and logs it every half minute without carriage returns and padding."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def write(self, text: str) -> None:
        """Log the text unless it only clears the bar."""
        now = time.monotonic()
        if (words := text.strip()) and now - self._since >= PLAIN_SECONDS:
            self._since = now
            log.info("%s", words)

    def flush(self) -> None:
        """Do nothing: each line is written at once."""


class ProgressBar(tqdm):
    """tqdm's bar on a terminal; elsewhere a line every half minute."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        plain = {} if sys.stderr.isatty() else {"file": _Lines(), "bar_format": PLAIN_FORMAT}
        super().__init__(*arguments, **options | plain)
