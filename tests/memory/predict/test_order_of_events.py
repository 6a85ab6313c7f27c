"""The tracker sees tensors come and go in the order of a GPU, which decides what an allocator must reserve."""

import torch
from torch import nn

from memory.predict.emulation import CopiedWeights, emulated, measure_peak, place, tracked
from memory.predict.tracker import MemoryTracker
from models import build_discriminator
from runtime.observer import observed_by
from runtime.precision import move
from settings.autoencoder import AutoencoderSettings


def test_a_mean_squared_error_keeps_the_memory_of_all_differences_and_its_gradient_is_contiguous():
    """As a real one does; the fake one of torch keeps one number, and the layout."""

    def run(tracker):
        x = torch.zeros(2, 3, 8, 8, 8).contiguous(memory_format=torch.channels_last_3d).requires_grad_()
        tracker.reset()
        loss = nn.functional.mse_loss(x, torch.zeros_like(x))
        held.append(loss.untyped_storage().nbytes())
        contiguous.append(torch.autograd.grad(loss, x)[0].is_contiguous())

    held: list[int] = []
    contiguous: list[bool] = []
    peaks = [measure_peak(run, fake=fake, cuda=fake).peak["device"] for fake in (True, False)]
    assert held == [4 * 2 * 3 * 8**3] * 2
    assert contiguous == [True, True]
    # A GPU is also told of the differences themselves, which a real operator hides.
    assert peaks[0] >= peaks[1]


def test_weights_that_are_laid_out_on_the_device_were_there_in_both_layouts():
    with emulated() as mode:
        network = build_discriminator(AutoencoderSettings())
        copied = CopiedWeights()
        with observed_by(copied):
            move(network, torch.device("cpu"), "channels_last")
        count = len(list(network.parameters()))
        with tracked(mode) as tracker:
            place(tracker, network.parameters(), copied.weights)
    assert 0 < len(copied.weights) < count
    assert all(event >= 0 for event in tracker.trace[:count])
    assert [event < 0 for event in tracker.trace[count:]] == [False, True] * len(copied.weights)


def test_inputs_come_to_the_device_where_the_step_moves_them_and_leave_with_their_last_name():
    with emulated() as mode:
        batch = torch.zeros(4, 64)
        with tracked(mode) as tracker:
            with tracker.waiting_on_host([batch]):
                moved = batch.to(torch.device("cpu"), non_blocking=True)
                assert tracker.live["device"] == 4 * 64 * 4
                assert tracker.allocations[tracker.trace[-1]].category == "inputs"
                del moved
                assert tracker.live["device"] == 0
            assert batch.to(torch.device("cpu")) is batch


def test_a_weights_gradient_copies_before_its_result_and_an_inputs_after_it():
    """A gradient that is not dense is copied for each of the two passes."""

    def run(tracker):
        x, weight = torch.zeros(1, 4, 8, 8, 8), torch.zeros(2, 4, 3, 3, 3)
        grad = torch.zeros(1, 2, 8, 8, 9)[..., :8]
        start.append(len(tracker.trace))
        sizes = ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
        results = torch.ops.aten.convolution_backward(grad, x, weight, None, *sizes, [True, True, False])
        end.append(len(tracker.trace))
        assert len(results) == 3

    start: list[int] = []
    end: list[int] = []
    tracker = measure_peak(run)
    events = tracker.trace[start[0] : end[0]]
    signed = [tracker.allocations[e].nbytes if e >= 0 else -tracker.allocations[~e].nbytes for e in events]
    of_x, of_weight, copy = 4 * 4 * 8**3, 4 * 2 * 4 * 27, 4 * 2 * 8**3
    assert signed == [of_x, copy, -copy, copy, of_weight, -copy]


def test_a_kernel_frees_what_it_names_before_its_end():
    with MemoryTracker() as tracker:
        tracker._pass_through(8, 4, ~0, 2)
    assert tracker.trace == [0, 1, ~0, 2, ~1, ~2]
    assert (tracker.peak["device"], tracker.live["device"]) == (12, 0)
