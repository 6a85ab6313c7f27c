"""What convolutions allocate besides their results follows layout, dtype and cuDNN version, as published figures do."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memory.kernels.convolutions import SHIPPED_CUDNN, cudnn_version
from memory.predict.emulation import emulated
from memory.predict.prediction import GIB
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


def test_an_old_cudnn_unfolds_large_samples_and_what_it_would_do_is_known_for_the_warning():
    """pytorch#128947; tests/memory/published has other figures."""
    old, new = (convolve((1, 256, 5, 1090, 1922), 64, torch.float32, 0, cudnn) for cudnn in (8902, SHIPPED_CUDNN))
    assert round(old.unfolded[True] / GIB, 2) == 161.37
    assert old.workspace == old.unfolded[True]
    assert new.unfolded == {True: 0, False: old.workspace}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_workspaces_depend_on_layout_and_precision(dtype):
    contiguous = convolve((2, 8, 16, 16, 16), 4, dtype)
    last = convolve((2, 8, 16, 16, 16), 4, dtype, layout=torch.channels_last_3d)
    both = 2 * (8 + 4) * 16**3 * dtype.itemsize
    assert contiguous.workspace == (both if dtype.itemsize == 2 else 0)
    assert last.workspace == 0


def test_cudnn_9_8_to_9_14_refuse_contiguous_volumes_in_16_bits_only():
    shape = (1, 8, 16, 16, 16)
    assert convolve(shape, 4, torch.bfloat16, cudnn=91000).unfolded[True] == 8 * 27 * 16**3 * 2
    for other in (
        convolve(shape, 4, torch.float32, cudnn=91000),
        convolve(shape, 4, torch.bfloat16, cudnn=91500),
        convolve(shape, 4, torch.bfloat16, cudnn=91000, layout=torch.channels_last_3d),
        convolve(shape, 4, torch.bfloat16, cudnn=91000, kernel=1, padding=0),
    ):
        assert not other.unfolded[True]


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


def test_both_gradients_take_a_workspace_and_a_copy_each_one_after_the_other():
    low = torch.bfloat16
    events = backward_events(
        ((1, 8, 8, 8, 8), low, CONTIGUOUS),
        ((4, 8, 3, 3, 3), low, CONTIGUOUS),
        lambda out: torch.zeros((), dtype=low).expand(out.shape),  # not dense
    )
    x, y, weight = 8 * 8**3 * 2, 4 * 8**3 * 2, 4 * 8 * 27 * 2
    assert events == [x, y, x + y, -(x + y), -y, y, weight, x + y, -(x + y), -y]


def test_gradient_in_the_other_layout_is_copied_once_even_if_one_channel_is_dense_in_both():
    full = torch.float32
    x, y, weight = 8 * 8**3 * 4, 8**3 * 4, 8 * 27 * 4
    for layout, expected in ((LAST, [y, x, weight, -y]), (CONTIGUOUS, [x, weight])):
        volume, kernel = ((1, 8, 8, 8, 8), full, layout), ((1, 8, 3, 3, 3), full, layout)
        assert backward_events(volume, kernel, lambda out: torch.zeros(out.shape)) == expected


def test_weights_in_another_layout_are_copied_where_they_are_read():
    full = torch.float32
    x, weight = 8 * 8**3 * 4, 2 * 8 * 27 * 4
    volume, kernel = ((1, 8, 8, 8, 8), full, LAST), ((2, 8, 3, 3, 3), full, CONTIGUOUS)
    assert backward_events(volume, kernel, torch.zeros_like) == [x, weight, -weight, weight]


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
