"""Times of a step on the CPU come from one call of each class of operators."""

import torch

from memory.kernels.cpu_calls import Calls

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
