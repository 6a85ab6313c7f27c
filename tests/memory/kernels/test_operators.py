"""Bytes moved are counted as if every kernel read its arguments and wrote its results once."""

import pytest
import torch
from torch import nn

from memory.predict.emulation import measure_peak
from models.lean.norm import operators
from models.lean.norm.torch_kernels import Norm

aten = torch.ops.aten
KIB = 1024


def counted(function):
    """Return bytes and kernels of what `function` does with a tensor of 1 KiB."""

    def run(tracker):
        x = torch.zeros(256)
        tracker.reset()
        function(x)

    work = measure_peak(run, cuda=False).work.values()
    return sum(part.nbytes for part in work), sum(part.kernels for part in work)


@pytest.mark.parametrize(
    ("function", "kib", "kernels"),
    [
        (lambda x: x.view(16, 16).t()[2:].unsqueeze(0), 0, 0),
        (lambda x: torch.empty_like(x), 0, 0),
        (lambda x: x.detach(), 0, 0),
        (lambda x: x + 1, 2, 1),
        (lambda x: x + x, 3, 1),
        (lambda x: x.add_(1), 2, 1),
        (lambda x: x.copy_(x.detach()), 2, 1),
        (lambda x: x.to(torch.bfloat16), 1.5, 1),
        (lambda x: torch.cat([x, x]), 4, 1),
        (lambda x: torch._foreach_lerp_([x, x], [x, x], 0.5), 6, 1),
    ],
    ids=["views", "allocation", "detach", "add", "two arguments", "in place", "copy", "cast", "list", "foreach"],
)
def test_reads_and_writes_are_counted_once(function, kib, kernels):
    assert counted(function) == (kib * KIB, kernels)


@pytest.mark.parametrize(("inputs", "outputs", "tiles"), [(1, 1, 8 * 32), (8, 32, 1), (9, 33, 16 / 9 * 64 / 33)])
@pytest.mark.parametrize("convolve", [nn.functional.conv3d, nn.functional.conv_transpose3d])
def test_convolutions_compute_whole_tiles_of_channels_forward_and_backward(convolve, inputs, outputs, tiles):
    def run(tracker):
        x = torch.zeros(1, inputs, 4, 4, 4, requires_grad=True)
        shape = (outputs, inputs) if convolve is nn.functional.conv3d else (inputs, outputs)
        weight = torch.zeros(*shape, 1, 1, 1, requires_grad=True)
        tracker.reset()
        convolve(x, weight).sum().backward()

    tracker = measure_peak(run)
    assert sum(tracker.flops.values()) == 3 * 2 * inputs * outputs * 4**3
    assert sum(part.flops for part in tracker.work.values()) == pytest.approx(tiles * sum(tracker.flops.values()))


def test_a_norm_reads_its_volume_twice_forward_and_both_volumes_twice_backward():
    def run(tracker):
        x, weight = torch.zeros(1, 8, 16, 16, 16), torch.zeros(8)
        tracker.reset()
        out, mean, rstd = operators.group_norm(x, weight, weight, 4, 1e-5, True, torch.float32)
        forward.append(sum(part.nbytes for part in tracker.work.values()))
        tracker.reset()
        operators.group_norm_backward(out, x, Norm(mean, rstd, weight, weight, True))

    forward: list[int] = []
    volume = 8 * 16**3 * 4
    backward = sum(part.nbytes for part in measure_peak(run).work.values())
    assert forward[0] == pytest.approx(3 * volume, rel=0.01)
    assert backward == pytest.approx(5 * volume, rel=0.01)


def test_libraries_keep_a_workspace_for_each_thread_that_multiplies_matrices(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:4:16:1024")

    def run(tracker):
        layer = nn.Linear(8, 8)
        x = torch.zeros(4, 8)
        tracker.reset()
        y = layer(x)
        assert tracker.live["device"] >= 32 << 20
        y = layer(y)
        assert tracker.live["device"] < 33 << 20
        y.sum().backward()
        assert tracker.live["device"] >= 64 << 20

    tracker = measure_peak(run)
    # Both are there from the second step on, so also at a peak in forward.
    assert sum(r.nbytes for r in tracker.alive_at_peak() if r.category == "library workspaces") == 64 << 20
    assert tracker.peak["device"] >= 64 << 20
    assert not [r for r in measure_peak(lambda _: nn.ReLU()(torch.zeros(8))).allocations if r.op == "cuBLAS"]
