"""What convolutions allocate besides their results follows layout, dtype and cuDNN version, as published figures do."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memory.kernels.convolutions import SHIPPED_CUDNN, cudnn_version
from memory.predict.emulation import emulated
from memory.predict.tracker import MemoryTracker


def convolve(shape, outputs, dtype, padding=1, cudnn=SHIPPED_CUDNN, layout=torch.contiguous_format, kernel=3):
    """Return the tracker of one convolution of zeros without data."""
    with emulated() as mode:
        weight = torch.zeros(outputs, shape[1], *(kernel,) * (len(shape) - 2), dtype=dtype).to(memory_format=layout)
        x = torch.zeros(shape, dtype=dtype).to(memory_format=layout)
        with MemoryTracker(fake=mode, cudnn=cudnn) as tracker:
            tracker.adopt([x], "inputs")
            torch.convolution(x, weight, None, [1] * 3, [padding] * 3, [1] * 3, False, [0] * 3, 1)
    return tracker


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_workspaces_depend_on_layout_and_precision(dtype):
    contiguous = convolve((2, 8, 16, 16, 16), 4, dtype)
    last = convolve((2, 8, 16, 16, 16), 4, dtype, layout=torch.channels_last_3d)
    both = 2 * (8 + 4) * 16**3 * dtype.itemsize
    assert contiguous.workspace == both
    assert last.workspace == 0


@pytest.mark.parametrize(
    ("changes", "is_unfolded"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"cudnn": 91500}, False),
        ({"layout": torch.channels_last_3d}, False),
        ({"kernel": 1}, False),
    ],
)
def test_cudnn_9_8_to_9_14_refuse_contiguous_volumes_in_16_bits_only(changes, is_unfolded):
    tracker = convolve((1, 8, 16, 16, 16), 4, **{"dtype": torch.bfloat16, "padding": 0, "cudnn": 91000, **changes})
    assert tracker.unfolded == is_unfolded * 8 * 27 * 14**3 * 2
    assert not is_unfolded or tracker.workspace == tracker.unfolded


def backward_events(x, weight, grad_of):
    """Return sizes in the order of events from the first one of a convolution's backward on, negative when released."""
    with emulated() as mode:
        x, weight = (torch.zeros(shape, dtype=dtype).to(memory_format=layout) for shape, dtype, layout in (x, weight))
        x.requires_grad_()
        weight.requires_grad_()
        with MemoryTracker(fake=mode) as tracker:
            out = torch.nn.functional.conv3d(x, weight, padding=1)
            grad = grad_of(out)
            start = len(tracker.trace)
            kept = torch.autograd.grad(out, (x, weight), grad)
            events = tracker.trace[start:]
            del kept
    return [
        tracker.allocations[event].nbytes if event >= 0 else -tracker.allocations[~event].nbytes for event in events
    ]


CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last_3d


LOW, FULL = torch.bfloat16, torch.float32


def scalar_like(out):
    return torch.zeros((), dtype=out.dtype).expand(out.shape)  # not dense


@pytest.mark.parametrize(
    ("dtype", "layouts", "outputs", "grad_of", "expected"),
    [
        # Both gradients take a workspace and a copy each, one after the other.
        (LOW, (CONTIGUOUS,) * 2, 4, scalar_like, lambda x, y, w: [x, y, x + y, -x - y, -y, y, w, x + y, -x - y, -y]),
        # A gradient in the other layout is copied once, even if one channel is dense in both.
        (FULL, (LAST,) * 2, 1, lambda out: torch.zeros(out.shape), lambda x, y, w: [y, x, w, -y]),
        (FULL, (CONTIGUOUS,) * 2, 1, torch.zeros_like, lambda x, y, w: [x, x + y, -x - y, w, x + y, -x - y]),
        # Weights in another layout are copied where they are read.
        (FULL, (LAST, CONTIGUOUS), 2, torch.zeros_like, lambda x, y, w: [x, w, -w, w]),
    ],
)
def test_backward_copies_what_is_not_in_its_layout(dtype, layouts, outputs, grad_of, expected):
    x, weight = (1, 8, 8, 8, 8), (outputs, 8, 3, 3, 3)
    events = backward_events((x, dtype, layouts[0]), (weight, dtype, layouts[1]), grad_of)
    assert events == expected(*(dtype.itemsize * size for size in (8 * 8**3, outputs * 8**3, outputs * 8 * 27)))


def test_algorithms_are_tried_once_for_each_pass_in_each_thread():
    def block(x, weight):
        return torch.nn.functional.conv3d(x, weight, padding=1).relu()

    def tried(calls):
        with emulated() as mode:
            x = torch.zeros(1, 8, 8, 8, 8, requires_grad=True)
            weight = torch.zeros(8, 8, 3, 3, 3, requires_grad=True)
            with MemoryTracker(fake=mode) as tracker:
                tracker.benchmarks = True
                for _ in range(calls):
                    out = checkpoint(block, x, weight, use_reentrant=False)
                    out.sum().backward()
        assert tracker.benchmarked == sorted(tracker.benchmarked)
        return len(tracker.benchmarked)

    # Forward, the same again when backward's thread recomputes it, and two gradients.
    assert tried(1) == tried(2) == 4


def test_slices_of_a_gradient_share_the_trials_of_a_whole_one_and_another_layout_has_its_own():
    """Torch remembers algorithms by sizes and layout; a slice of rows is dense, whatever the stride of its batch is."""

    def gradient(size):
        return torch.zeros(1, 8, size, 8, 8).contiguous(memory_format=LAST)[:, :, :8]

    with emulated() as mode:
        x = torch.zeros(1, 8, 8, 8, 8).contiguous(memory_format=LAST)
        weight = torch.zeros(8, 8, 3, 3, 3)
        tried = []
        with MemoryTracker(fake=mode) as tracker:
            tracker.benchmarks = True
            for grad, volume in ((gradient(8), x), (gradient(16), x), (torch.zeros(x.shape), x.contiguous())):
                options = ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1, [True, True, False])
                torch.ops.aten.convolution_backward(grad, volume, weight, None, *options)
                tried.append(len(tracker.benchmarked))
    assert tried == [2, 2, 4]


def test_hidden_gpus_leave_the_version_that_ships_with_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: min([]))  # what torch's own comes down to
    assert cudnn_version.__wrapped__() == SHIPPED_CUDNN
