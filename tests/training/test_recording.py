"""The time that a run still takes, on a clock that the tests control."""

from __future__ import annotations

import pytest

from training.recording import RunClock, duration_text


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def follow(clock: RunClock, time: FakeTime, last_step: int, step_seconds, validate_every: int, log_every: int = 10):
    """Run the clock through a whole run; return what it predicted at each log line, and the real duration."""
    predicted = {}
    for done in range(1, last_step + 1):
        time.now += step_seconds(done)
        if done == 1:
            clock.step_done()
        if done % log_every == 0 or done == last_step:
            clock.mark(done)
            predicted[done] = clock.elapsed + (clock.seconds_left(done) or 0)
        if done % validate_every == 0 or done == last_step:
            time.now += 3.0
            clock.pause("save", 3.0)
            time.now += 20.0
            clock.pause("validation", 20.0)
    return predicted, clock.elapsed


def test_prediction_is_exact_for_even_steps_once_a_validation_was_timed():
    time = FakeTime()
    clock = RunClock(0, 100, validate_every=30, save_every=30, now=time)
    predicted, real = follow(clock, time, 100, lambda done: 9.0 if done == 1 else 0.5, validate_every=30)
    assert real == 9.0 + 99 * 0.5 + 4 * 23.0
    # Before the first validation, neither its time nor that of a save is known.
    assert predicted[10] == pytest.approx(real - 4 * 23.0)
    # Later the pauses are part of the prediction; at a log line the pause of the same step is still to come.
    for done in (40, 50, 70, 80):
        assert predicted[done] == pytest.approx(real)


def test_prediction_follows_steps_that_become_slower():
    time = FakeTime()
    clock = RunClock(0, 1000, validate_every=1000, save_every=1000, now=time)
    predicted, real = follow(clock, time, 1000, lambda done: 1.0 if done <= 200 else 2.0, validate_every=1000)
    assert predicted[200] == pytest.approx(1000)
    assert predicted[400] == pytest.approx(real - 23.0)


def test_validations_left_are_those_that_the_loop_will_make():
    for last_step, every in ((100, 30), (90, 30), (7, 10), (1, 1), (240, 120)):
        clock = RunClock(0, last_step, validate_every=every)
        for step in range(last_step + 1):
            made = [done for done in range(step + 1, last_step + 1) if done % every == 0 or done == last_step]
            assert clock.validations_left(step) == len(made)


def test_the_time_left_counts_validations_until_the_time_of_one_is_known():
    time = FakeTime()
    clock = RunClock(0, 20, validate_every=10, save_every=10, now=time)
    assert clock.text(0) == ""
    clock.step_done()
    time.now += 8
    clock.mark(9)
    assert clock.text(9) == "11 s + 2 validations"
    time.now += 100
    clock.pause("validation", 100)
    assert clock.text(11) == "1 min 49 s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (725, "12 min 5 s"), (3599.7, "1 h 0 min")),
        *((3600, "1 h 0 min"), (12_030, "3 h 20 min"), (86_399, "1 d 0 h"), (187_200, "2 d 4 h")),
    ],
)
def test_durations_are_written_in_two_units(seconds, text):
    assert duration_text(seconds) == text
