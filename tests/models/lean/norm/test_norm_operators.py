"""The norm operators by torch's own kernels, how they are registered, and GroupNorm as an autograd function on top."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memory.predict.emulation import cuda_autocast_rules
from models.lean.norm import group_norm, operators, torch_kernels
from models.lean.norm.affine import Norm
from models.lean.norm.operators import group_means, norm_input_grad, norm_sums, normalise, statistics, uses_triton
from tests.models.lean.norm.norm_cases import EPS, Case, all_cases, distances, inputs, laid_out

LOW = (torch.bfloat16, torch.float16)


@pytest.fixture(params=["whole", "in pieces"])
def _pieces(request, monkeypatch):
    if request.param == "in pieces":
        monkeypatch.setattr(torch_kernels, "CPU_PIECE_VALUES", 40)


def distances_of(case):
    return distances(case, inputs(case), torch_kernels, group_means)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("case", all_cases((torch.float64,)), ids=str)
def test_double_precision_is_exact(case):
    # With a mean of 1000 and a spread of 1, three digits are gone.
    assert max(distances_of(case).values()) < (1e-11 if case.wild else 2e-14)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_lower_precisions_round_only_what_they_return(case):
    found = distances_of(case)
    rounded = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[case.dtype]
    assert found["halo"] == 0
    assert found["rstd"] < (1e-5 if case.wild else 1e-6)
    assert found["mean"] < 1e-6
    assert found["sums"] < (3e-4 if case.wild else 1e-5)
    assert found["stored"] == 0
    for name in ("y", "grad_x", "grad_x added in place", "kept"):
        assert found[name] <= (3e-4 if case.wild else rounded), name


def gradients(function, x, norm, silu, grad, dtype=None):
    """Return result and gradients of `function`, under autocast where a dtype is given, in double precision."""
    x = x.detach().requires_grad_()
    norm.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        y = function(x, norm, silu)
    y.backward(grad.to(y.dtype))
    return [part.detach().double() for part in (y, x.grad, norm.weight.grad, norm.bias.grad)]


def stock(x, norm, silu):
    y = norm(x)
    return F.silu(y) if silu else y


def distance(found, expected):
    return sum(float((f - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True))


def layer(channels, groups, dtype=torch.float32):
    torch.manual_seed(channels)
    norm = nn.GroupNorm(groups, channels, dtype=dtype)
    nn.init.normal_(norm.weight, 1, 0.3)
    nn.init.normal_(norm.bias, 0, 0.3)
    return norm


def volume(batch, layout, dtype=torch.float32):
    torch.manual_seed(batch)
    shape = (batch, 12, 5, 6, 7)
    x = torch.randn(shape, dtype=torch.float64) * 3 + torch.arange(12.0).view(1, -1, 1, 1, 1)
    return laid_out(x.to(dtype), layout), torch.randn(shape, dtype=torch.float64).to(dtype)


LAYOUTS = ["contiguous", "channels last", "channels last rows", "transposed"]


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 12])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_group_norm_equals_stock_in_double_precision(batch, layout, groups, silu):
    norm, (x, grad) = layer(12, groups, torch.float64), volume(batch, layout, torch.float64)
    for given in (grad, laid_out(grad, "channels last"), grad[..., :1].expand(grad.shape)):
        expected = gradients(stock, x, norm, silu, given)
        for found, exact in zip(gradients(group_norm, x, norm, silu, given), expected, strict=True):
            assert float((found - exact).norm() / exact.norm()) < 1e-12


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_group_norm_is_as_close_to_the_truth_as_stock_in_single_precision(batch, layout, silu):
    norm, (x, grad) = layer(12, 3), volume(batch, layout)
    truth = gradients(stock, x.double(), layer(12, 3).double(), silu, grad.double())
    theirs = distance(gradients(stock, x, norm, silu, grad), truth)
    assert distance(gradients(group_norm, x, norm, silu, grad), truth) <= 2 * theirs


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_group_norm_is_as_close_to_the_truth_as_stock_under_autocast(batch, dtype, layout, silu):
    norm, (x, grad) = layer(12, 3), volume(batch, layout, dtype)
    truth = gradients(stock, x.double(), layer(12, 3).double(), silu, grad.double())

    def rounding_stock(x, norm, silu):
        return stock(x, norm, silu).to(dtype)  # the convolution after it would

    with cuda_autocast_rules():
        theirs = gradients(rounding_stock, x, norm, silu, grad, dtype)
        ours = gradients(group_norm, x, norm, silu, grad, dtype)
    assert distance(ours, truth) <= 1.5 * distance(theirs, truth)


def test_full_precision_input_is_normed_into_the_precision_of_the_convolution():
    norm, (x, grad) = layer(12, 3), volume(2, "contiguous")
    with torch.autocast("cpu", torch.bfloat16):
        assert group_norm(x, norm).dtype == torch.bfloat16
    truth = gradients(stock, x.double(), layer(12, 3).double(), True, grad.bfloat16().double())
    found = gradients(group_norm, x, norm, True, grad, torch.bfloat16)
    assert float((found[0] - truth[0]).norm() / truth[0].norm()) < 2**-8
    for gradient, exact in zip(found[1:], truth[1:], strict=True):
        assert float((gradient - exact).norm() / exact.norm()) < 1e-6


def test_only_what_needs_a_gradient_gets_one():
    norm, (x, grad) = layer(12, 3), volume(1, "contiguous")
    norm.requires_grad_(False)
    x.requires_grad_()
    group_norm(x, norm, True).backward(grad)
    assert x.grad is not None
    assert norm.weight.grad is None
    norm.requires_grad_(True)
    group_norm(x.detach(), norm, True).backward(grad)
    assert norm.weight.grad is not None


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_slabs_make_up_the_whole(layout):
    case = Case((2, 6, 9, 4, 5), 3, torch.float64, layout, layout)
    x, grad, weight, bias = inputs(case)
    y, mean, rstd = operators.group_norm(x, weight, bias, 3, EPS, True, x.dtype)
    norm = Norm(mean, rstd, weight, bias, silu=True)
    parts, sums, grad_x = [], torch.zeros(2, 2, 6, dtype=x.dtype), grad.clone()
    slabs = [(0, 4), (4, 8), (8, 9)]
    for start, end in slabs:
        before, after = int(start == 0), int(end == 9)
        rows = slice(start - 1 + before, end + 1 - after)
        haloed = normalise(x[:, :, rows], norm, x.dtype, before, after)
        assert haloed.shape[2] == end - start + 2
        parts.append(haloed[:, :, 1:-1])
        sums = sums + norm_sums(grad[:, :, start:end], x[:, :, start:end], norm)
    torch.testing.assert_close(torch.cat(parts, 2), y, rtol=0, atol=1e-13)
    assert torch.equal(haloed[:, :, -1], torch.zeros_like(haloed[:, :, -1]))
    means = group_means(sums, weight, 3, x.numel() // mean.numel())
    for start, end in slabs:
        own = grad_x[:, :, start:end]
        norm_input_grad(own, own, x[:, :, start:end], norm, means, grad[:, :, start:end])
    expected = operators.group_norm_backward(grad, x, norm)
    torch.testing.assert_close(grad_x, expected[0] + grad, rtol=0, atol=1e-13)
    torch.testing.assert_close(sums.sum(1).flip(0), torch.stack(expected[1:]), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_variance_survives_a_large_mean(layout):
    x = laid_out(torch.randn(1, 4, 8, 8, 8) + 1000, layout)
    _, rstd = statistics(x, 2, 0.0)
    exact = x.double().unflatten(1, (2, -1)).flatten(2).var(2, correction=0).rsqrt()
    torch.testing.assert_close(rstd.double(), exact, rtol=1e-5, atol=0)


def operator_calls():
    """Yield every operator with arguments of every kind of layout and precision that networks use."""
    for case in all_cases((torch.float32, torch.bfloat16))[::3]:
        x, grad, weight, bias = inputs(case)
        mean, rstd = statistics(x, case.groups, EPS)
        norm, lean = Norm(mean, rstd, weight, bias, case.silu), torch.ops.lean
        means = torch.zeros(2, *mean.shape)
        yield lean.statistics, (x, case.groups, EPS)
        yield lean.normalise, (x, *norm, torch.bfloat16, 1, 2)
        yield lean.norm_sums, (grad, x, *norm)
        yield lean.store_statistics, (torch.empty_like(x), torch.empty_like(mean), torch.empty_like(rstd), x, EPS)
        sums = torch.empty(2, *x.shape[:2])
        yield lean.store_norm_sums, (torch.empty_like(x), sums, grad, x, *norm)
        yield lean.norm_input_grad, (torch.empty_like(x), grad, x, *norm, means, None)
        for layout in (None, torch.channels_last_3d):
            yield lean.group_norm, (x, weight, bias, case.groups, EPS, case.silu, torch.bfloat16, layout)
        yield lean.group_norm_backward, (grad, x, *norm)


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def test_operators_are_registered_as_they_behave():
    for operator, arguments in operator_calls():
        torch.library.opcheck(operator, arguments, test_utils=CHECKS)


class Watch(TorchDispatchMode):
    """Records the operators it sees, and the largest full-precision tensor that any of them made."""

    def __init__(self):
        super().__init__()
        self.operators, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operators.append(func.name())
        for part in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(part, torch.Tensor) and part.dtype == torch.float32:
                self.largest = max(self.largest, part.numel())
        return out


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mode_sees_one_operator_each_way(dtype, fake):
    with FakeTensorMode() if fake else torch.no_grad(), torch.enable_grad():
        norm, x = nn.GroupNorm(3, 12), torch.randn(1, 12, 5, 6, 7, dtype=dtype, requires_grad=True)
        with Watch() as watch:
            y = group_norm(x, norm, True)
            y.backward(torch.ones_like(y))
    seen = [name for name in watch.operators if not name.startswith(("aten::detach", "prim::"))]
    assert seen == ["lean::group_norm", "aten::ones_like", "lean::group_norm_backward"]
    assert x.grad is not None


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("limit", [200, 2000])
def test_low_precision_makes_no_large_copy_in_full_precision(layout, limit, monkeypatch):
    monkeypatch.setattr(torch_kernels, "CPU_PIECE_VALUES", limit)
    case = Case((1, 8, 10, 6, 7), 4, torch.bfloat16, layout)
    x, grad, weight, bias = inputs(case)
    group = 2 * 10 * 6 * 7
    with Watch() as watch:
        # Not through the dispatcher: a mode sees nothing of what an operator does inside.
        _, mean, rstd = operators._group_norm(x, weight, bias, 4, EPS, True, torch.bfloat16, None)
        operators._group_norm_backward(grad, x, mean, rstd, weight, bias, True)
    assert len(watch.operators) > 10
    assert 0 < watch.largest <= max(limit, group if layout == "contiguous" else 0)


@pytest.fixture
def _forgetful():
    uses_triton.cache_clear()
    yield
    uses_triton.cache_clear()


CUDA = torch.device("cuda", 0)


@pytest.mark.usefixtures("_forgetful")
def test_old_gpu_runs_native_kernels_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * 2**30))
    with caplog.at_level(logging.WARNING):
        assert not uses_triton(CUDA)
        assert not uses_triton(CUDA)
    assert [record.message for record in caplog.records] == [
        "norms on cuda:0 use torch's own kernels, which are slower and convert up to 256 MiB at once to fp32: "
        "its compute capability is 7.0, and Triton needs 7.5 or newer"
    ]


@pytest.mark.usefixtures("_forgetful")
def test_missing_triton_is_named(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**30))
    monkeypatch.setitem(sys.modules, "models.lean.norm.triton_launch", None)
    monkeypatch.delattr("models.lean.norm.triton_launch", raising=False)
    assert not uses_triton(CUDA)
    assert "Triton cannot be imported" in caplog.text


@pytest.mark.usefixtures("_forgetful")
def test_triton_that_cannot_compile_is_named(monkeypatch, caplog):
    triton_launch = pytest.importorskip("models.lean.norm.triton_launch", reason="Triton is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**30))

    def without_compiler(*arguments):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(triton_launch, "statistics", without_compiler)
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: None)
    assert not uses_triton(CUDA)
    assert "Triton cannot compile for it (RuntimeError: Failed to find C compiler.)" in caplog.text


@pytest.mark.usefixtures("_forgetful")
def test_cpu_does_not_use_triton_and_says_nothing(caplog):
    assert not uses_triton(torch.device("cpu"))
    assert caplog.text == ""


def test_wrong_shapes_are_refused():
    x, grad, weight, bias = inputs(Case((1, 4, 2, 3, 3), 2))
    mean, rstd = statistics(x, 2, EPS)
    with pytest.raises(AssertionError, match="does not belong to"):
        norm_sums(grad[:, :, :1], x, Norm(mean, rstd, weight, bias, False))
    with pytest.raises(AssertionError, match="rows, height, width"):
        statistics(x[0], 2, EPS)
    with pytest.raises(AssertionError, match="no values to normalise"):
        operators.statistics(torch.zeros(2, 4, 0, 3, 3), 2, 1e-5)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32], ids=str)
def test_a_volume_that_is_contiguous_and_channels_last_at_once_keeps_its_variance(dtype, monkeypatch):
    """Pieces of one channel are both, and ATen's channels-last kernel cancels when the mean is large."""
    monkeypatch.setattr(torch_kernels, "CPU_PIECE_VALUES", 60)
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 8, 3, 6, 7, generator=generator) * 8 + 1000).to(dtype)
    one_voxel = (
        (torch.randn(3, 4, 1, 1, 1, generator=generator) * 8 + 1000)
        .to(dtype)
        .as_strided((3, 4, 1, 1, 1), (4, 1, 4, 4, 4))
    )
    for volume, groups in ((x.contiguous(memory_format=torch.channels_last_3d), 8), (one_voxel, 2)):
        _, rstd = statistics(volume, groups, EPS)
        true = (volume.double().reshape(len(volume), groups, -1).var(2, correction=0) + EPS).rsqrt()
        torch.testing.assert_close(rstd.double(), true, rtol=1e-4, atol=0)
