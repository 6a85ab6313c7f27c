"""The time that a run still takes, on a clock that the tests control."""

from __future__ import annotations

import pytest

from training.recording import RunClock, duration_text


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_rest_of_a_run_takes_its_last_steps_and_a_share_of_its_pauses():
    time, predicted = FakeTime(), {}
    clock = RunClock(0, 400, validate_every=50, now=time)
    assert clock.seconds_left(0) is None
    for done in range(1, 401):
        # The first step also chooses kernels; from the hundredth on steps are slower.
        time.now += 9.0 if done == 1 else 0.5 if done <= 100 else 2.0
        clock.step_done()
        if done % 5 == 0:
            clock.mark(done)
            predicted[done] = clock.seconds_left(done)
        if done % 50 == 0:
            time.now += 20.0
            clock.pause(20.0)
    assert clock.elapsed == 9.0 + 99 * 0.5 + 300 * 2.0 + 8 * 20.0
    assert predicted[50] == pytest.approx(350 * 0.5)  # nothing paused yet
    assert predicted[55] == pytest.approx(345 * (0.5 + 20 / 55))
    assert predicted[200] == pytest.approx(200 * (2.0 + 3 * 20 / 200))
    assert predicted[400] == 0


def test_a_validation_of_a_resumed_run_counts_for_the_steps_between_two():
    time = FakeTime()
    clock = RunClock(998, 2000, validate_every=100, now=time)
    for done in range(999, 1011):
        time.now += 1.0
        clock.step_done()
        if done == 1000:
            time.now += 50.0
            clock.pause(50.0)
    clock.mark(1010)
    assert clock.seconds_left(1010) == pytest.approx(990 * (1 + 50 / 100))


def test_a_run_with_a_time_limit_has_what_is_left_of_it():
    time = FakeTime()
    clock = RunClock(3, None, seconds=60.0, now=time)
    for done in (4, 5):
        time.now += 20.0
        clock.step_done()
        clock.mark(done)
    assert (clock.seconds_per_step, clock.seconds_left(5)) == (20.0, 20.0)
    time.now += 30.0
    assert clock.seconds_left(5) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (725, "12 min 5 s"), (3599.7, "1 h 0 min")),
        *((3600, "1 h 0 min"), (12_030, "3 h 20 min"), (86_399, "1 d 0 h"), (187_200, "2 d 4 h")),
    ],
)
def test_durations_are_written_in_two_units(seconds, text):
    assert duration_text(seconds) == text
