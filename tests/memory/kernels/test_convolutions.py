"""What convolutions allocate besides their results follows layout, dtype and cuDNN version, as published figures do."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memory.kernels.convolutions import SHIPPED_CUDNN, cudnn_version
from memory.predict.emulation import emulated
from memory.predict.prediction import GIB
from memory.predict.tracker import MemoryTracker

# Published: the unfolded copy that torch could not allocate, or the whole peak, in GiB.
FALLBACKS = {
    "pytorch#128947": ((1, 256, 5, 1090, 1922), 64, torch.float32, 0, 161.37),
    "pytorch#95024": ((1, 64, 362, 370, 251), 32, torch.float16, 1, 108.21),
    "pytorch#136479": ((1, 128, 256, 256, 256), 128, torch.float16, 1, 108.00),
}


def convolve(shape, outputs, dtype, padding=1, cudnn=SHIPPED_CUDNN, layout=torch.contiguous_format, kernel=3):
    """Return the tracker of one convolution of zeros without data."""
    with emulated() as mode:
        weight = torch.zeros(outputs, shape[1], *(kernel,) * (len(shape) - 2), dtype=dtype)
        x = torch.zeros(shape, dtype=dtype).to(memory_format=layout)
        with MemoryTracker(fake=mode, cudnn=cudnn) as tracker:
            tracker.adopt([x], "inputs")
            torch.convolution(x, weight, None, [1] * 3, [padding] * 3, [1] * 3, False, [0] * 3, 1)
    return tracker


@pytest.mark.parametrize(("shape", "outputs", "dtype", "padding", "published"), FALLBACKS.values(), ids=FALLBACKS)
def test_unfolded_copies_are_predicted_to_the_figure_that_was_published(shape, outputs, dtype, padding, published):
    old = convolve(shape, outputs, dtype, padding, cudnn=8902)
    assert round(old.unfolded[True] / GIB, 2) == published
    assert old.workspace == old.unfolded[True]
    # Today's cuDNN has 64-bit indices; what an older one would do is still known, for the warning.
    new = convolve(shape, outputs, dtype, padding)
    assert new.unfolded == {True: 0, False: old.workspace}


def test_fallback_peak_with_input_and_output_is_within_3_percent_of_the_published_one():
    tracker = convolve((1, 3, 24, 740, 1316), 128, torch.bfloat16, cudnn=8902)
    assert tracker.peak["device"] / GIB == pytest.approx(9.26, rel=0.03)


def test_a_sample_below_the_limit_takes_a_workspace_of_input_and_output():
    """pytorch#95024: one row less, 12.874 GB at the peak."""
    tracker = convolve((1, 64, 361, 370, 251), 32, torch.float16, cudnn=8902)
    assert tracker.peak["device"] / 1e9 == pytest.approx(12.874, rel=0.001)


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


def test_both_gradients_take_a_workspace_each_one_after_the_other_while_copies_are_held():
    with emulated() as mode:
        x = torch.zeros(1, 8, 8, 8, 8, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.zeros(4, 8, 3, 3, 3, dtype=torch.bfloat16, requires_grad=True)
        with MemoryTracker(fake=mode) as tracker:
            out = torch.nn.functional.conv3d(x, weight, padding=1)
            # An expanded number, which torch first copies.
            torch.autograd.grad(out, (x, weight), torch.zeros((), dtype=torch.bfloat16).expand(out.shape))
    inputs, outputs, weights = 8 * 8**3 * 2, 4 * 8**3 * 2, 4 * 8 * 27 * 2
    first = next(n for n, record in enumerate(tracker.allocations) if "backward" in record.op)
    events = tracker.trace[tracker.trace.index(first) :]
    sizes = [
        tracker.allocations[event].nbytes if event >= 0 else -tracker.allocations[~event].nbytes for event in events
    ]
    workspace = inputs + outputs
    held = [outputs, inputs, workspace, -workspace, weights, workspace, -workspace, -outputs]
    assert sizes[: len(held)] == held
    forward = [r.nbytes for r in tracker.allocations[:first] if r.category == "convolution workspaces"]
    assert forward == [workspace]


def test_gradient_of_one_channel_is_copied_into_the_layout_of_the_input():
    def copies(layout):
        with emulated() as mode:
            x = torch.zeros(1, 8, 8, 8, 8).to(memory_format=layout).requires_grad_()
            weight = torch.zeros(1, 8, 3, 3, 3)
            with MemoryTracker(fake=mode) as tracker:
                out = torch.nn.functional.conv3d(x, weight, padding=1)
                torch.autograd.grad(out, x, torch.zeros(out.shape))
        return [record.nbytes for record in tracker.allocations if record.category == "library workspaces"]

    assert copies(torch.channels_last_3d) == [8**3 * 4]
    assert copies(torch.contiguous_format) == []


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


def test_a_tensor_that_is_not_dense_is_copied_first():
    rows = torch.zeros(1, 8, 8, 8, 8)[:, :, 2:6]
    with emulated() as mode:
        x = torch.zeros(1, 8, 8, 8, 8)[:, :, 2:6]
        weight = torch.zeros(4, 8, 3, 3, 3)
        with MemoryTracker(fake=mode) as tracker:
            torch.nn.functional.conv3d(x, weight, padding=1)
    assert tracker.workspace == rows.numel() * 4


def test_hidden_gpus_leave_the_version_that_ships_with_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: min([]))  # what torch's own comes down to
    assert cudnn_version.__wrapped__() == SHIPPED_CUDNN
