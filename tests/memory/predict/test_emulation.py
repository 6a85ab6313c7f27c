"""Fake tensors have the dtypes of a GPU, and come and go in its order, which decides what an allocator reserves."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memory.predict import emulation
from memory.predict.emulation import CopiedWeights, cuda_autocast_rules, emulated, measure_peak, place, tracked
from memory.predict.tracker import MemoryTracker
from models import build_discriminator
from runtime.observer import observed_by
from runtime.precision import move
from settings.autoencoder import AutoencoderSettings


def dtypes_under_autocast():
    y = torch.zeros(1, 4, 4, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        results = {
            "group_norm": F.group_norm(y, 2),
            "upsample": F.interpolate(y, scale_factor=2.0, mode="nearest"),
            "softmax": F.softmax(y, 1),
            "exp": y.exp(),
            "pow": y**2,
            "sum": y.sum(),
            "l1": F.l1_loss(y, y),
            "linear": F.linear(y.float(), torch.zeros(4, 4)),
            "silu": F.silu(y),
        }
    return {name: result.dtype for name, result in results.items()}


def test_lists_are_the_kernels_that_torch_registers_for_cuda():
    registered = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    ours = set(emulation.FP32_OPS) | set(emulation.FP32_RESULT_OPS) | set(emulation.LOW_PRECISION_OPS)
    assert ours <= registered
    on_cpu = {
        name for name in registered if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")
    }
    composite_or_recurrent = {
        *("einsum", "chain_matmul", "linalg_multi_dot", "tensordot", "bilinear", "_scaled_dot_product_flash_attention"),
        *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        *("cudnn_convolution", "cudnn_convolution_transpose"),
    }
    promoting = {"addcdiv", "addcmul", "atan2", "cross", "dot", "vdot", "index_put", "scatter_add"}
    assert registered - ours - on_cpu == composite_or_recurrent | promoting


@pytest.mark.parametrize("fake", [False, True])
def test_rules_are_cuda_rules_inside_and_cpu_rules_after(fake):
    before = dtypes_under_autocast()
    with cuda_autocast_rules():
        if fake:
            with FakeTensorMode():
                inside = dtypes_under_autocast()
        else:
            inside = dtypes_under_autocast()
    low = {name for name, dtype in inside.items() if dtype == torch.bfloat16}
    assert low == {"linear", "silu"}
    assert before["group_norm"] == torch.bfloat16
    assert dtypes_under_autocast() == before


def test_nothing_changes_where_autocast_is_off_or_tensors_are_double():
    with cuda_autocast_rules():
        assert torch.zeros(2, dtype=torch.bfloat16).exp().dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.zeros(2, dtype=torch.float64).exp().dtype == torch.float64
            assert torch.zeros(2, dtype=torch.int64).sum().dtype == torch.int64


def test_recomputation_of_a_checkpoint_sees_the_same_rules():
    seen = []

    def block(x):
        y = F.group_norm(F.linear(x, torch.eye(4)), 2)
        seen.append(y.dtype)
        return y.exp()

    x = torch.zeros(2, 4, requires_grad=True)
    with cuda_autocast_rules():
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(block, x, use_reentrant=False)
        y.sum().backward()
    assert seen == [torch.float32, torch.float32]


def test_networks_and_losses_never_name_cuda_where_they_ask_for_autocast():
    """The rules apply to CPU autocast, so code that names "cuda" would be predicted without them."""
    asking = {"autocast", "custom_fwd", "custom_bwd", "is_autocast_enabled", "get_autocast_dtype"}
    calls = []
    for room in ("models", "losses", "diffusion", "training", "runtime"):
        for path in sorted((Path(__file__).resolve().parents[3] / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in asking:
                    calls.append(ast.unparse(node))
    assert len(calls) > 10
    assert [call for call in calls if "cuda" in call] == []


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


def test_a_kernel_frees_what_it_names_before_its_end():
    with MemoryTracker() as tracker:
        tracker._pass_through(8, 4, ~0, 2)
    assert tracker.trace == [0, 1, ~0, 2, ~1, ~2]
    assert (tracker.peak["device"], tracker.live["device"]) == (12, 0)
