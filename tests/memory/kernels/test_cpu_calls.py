"""Times of a step on the CPU come from one call of each class of operators."""

import pytest
import torch

from memory.kernels.cpu_calls import TINY_STEPS, Calls, call_overhead, seconds_of_parts

aten = torch.ops.aten


def test_calls_of_nearly_one_size_are_measured_once_and_counted_by_their_work():
    calls = Calls()
    for voxels in (10, 11):
        x = torch.zeros(1, 4, voxels, 10, 10)
        calls.add(aten.add.Tensor, (x, x), {}, 0, 3 * x.numel() * 4)
    calls.add(aten.add.Tensor, (x[:, :2], x[:, :2]), {}, 0, 3 * x.numel() * 2)
    assert sorted(known.times for known in calls.classes.values()) == [1, 2]
    ticks = iter(range(1000))
    # Every measured call takes one tick; the second of the first class does 1.1 times the work of the first.
    assert abs(calls.seconds(clock=lambda: next(ticks)) - 3.1) < 1e-9


def test_without_time_to_measure_nothing_is_called():
    calls = Calls()
    calls.add(aten.add.Tensor, (torch.zeros(3), torch.zeros(3)), {}, 0, 36)
    assert calls.seconds(allowed_seconds=-1) > 0


def test_parts_of_a_run_share_what_was_measured_and_pay_for_each_call():
    step, preview = Calls(), Calls()
    x = torch.zeros(1, 4, 10, 10, 10)
    for calls in (step, preview):
        calls.add(aten.add.Tensor, (x, x), {}, 0, 3 * x.numel() * 4)
    step.number, preview.number = 2, 10
    three = Calls()
    three.add_all(preview, 3)
    ticks = iter(range(1000))
    found = seconds_of_parts({"step": step, "three": three}, {"step": 5, "three": 1}, 60, lambda: next(ticks), 0.5)
    assert found == pytest.approx({"step": 1 + 2 * 0.5, "three": 3 + 30 * 0.5})
    assert next(ticks) == 7, "one class was measured: three calls and one to prepare"


def test_what_a_call_takes_besides_its_kernel_is_an_average_over_many():
    ticks = iter((0.0, 1.0))
    found = call_overhead(lambda: next(ticks))
    assert 0 < found * TINY_STEPS < 1 / 48, "a norm, an activation and a convolution in eight blocks, and back"
