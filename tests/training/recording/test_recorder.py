"""A run that waits for its data gets one warning that says what to change."""

from __future__ import annotations

import logging

import pytest

from training.recording.recorder import DataWait


def test_waiting_is_reported_once_and_not_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    wait = DataWait()
    assert wait.share(9.0, 10.0) == 0.9
    for _ in range(2):
        assert wait.share(2.0, 10.0) == 0.2
        assert caplog.text == ""
    for _ in range(3):
        wait.share(2.0, 10.0)
    assert caplog.text.count("waiting for data takes 20 % of the time; raise data.num_workers") == 1


def test_a_run_that_hardly_waits_gets_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    wait = DataWait()
    for share in (0.9, 0.05, 0.2, 0.0, 0.0, 0.05):
        wait.share(share, 1.0)
    assert caplog.text == ""
    assert wait.share(0.0, 0.0) == 0.0
