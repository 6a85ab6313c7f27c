"""The emulated autocast rules are CUDA's, reach backward and checkpoints, and do not leak."""

import ast
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memory.predict import cuda_autocast
from memory.predict.cuda_autocast import cuda_autocast_rules


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
    ours = set(cuda_autocast.FP32_OPS) | set(cuda_autocast.FP32_RESULT_OPS) | set(cuda_autocast.LOW_PRECISION_OPS)
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
