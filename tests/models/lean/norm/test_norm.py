"""The norm operators by torch's own kernels, how they are registered, and GroupNorm as an autograd function on top."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from models.lean.norm import InstanceNorm, group_norm, operators, torch_kernels
from models.lean.norm.operators import group_means, norm_input_grad, normalise, statistics, store_norm_sums, uses_triton
from models.lean.norm.torch_kernels import Norm
from tests.models.gradients import BATCHES, LAYOUTS, LOW_PRECISION, channels_last, direction
from tests.models.lean.norm.norm_cases import EPS, Case, all_cases, distances, inputs
from tests.models.problems import volumes


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
        part = torch.empty_like(sums)
        store_norm_sums(grad_x[:, :, start:end], part, grad[:, :, start:end], x[:, :, start:end], norm)
        sums += part
    torch.testing.assert_close(torch.cat(parts, 2), y, rtol=0, atol=1e-13)
    assert torch.equal(haloed[:, :, -1], torch.zeros_like(haloed[:, :, -1]))
    means = group_means(sums, weight, 3, x.numel() // mean.numel())
    for start, end in slabs:
        own = grad_x[:, :, start:end]
        norm_input_grad(own, own, x[:, :, start:end], norm._replace(silu=False), means, grad[:, :, start:end])
    expected = operators.group_norm_backward(grad, x, norm)
    torch.testing.assert_close(grad_x, expected[0] + grad, rtol=0, atol=1e-13)
    torch.testing.assert_close(sums.sum(1).flip(0), torch.stack(expected[1:]), rtol=1e-13, atol=1e-13)


def operator_calls():
    """Yield every operator with arguments of every kind of layout and precision that networks use."""
    for case in all_cases((torch.float32, torch.bfloat16))[::3]:
        x, grad, weight, bias = inputs(case)
        mean, rstd = statistics(x, case.groups, EPS)
        norm, lean = Norm(mean, rstd, weight, bias, case.silu), torch.ops.lean
        means = torch.zeros(2, *mean.shape)
        yield lean.statistics, (x, case.groups, EPS)
        yield lean.normalise, (x, *norm, torch.bfloat16, 1, 2)
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
@pytest.mark.parametrize(
    ("capability", "has_triton", "said"),
    [
        ((7, 0), True, "its compute capability is 7.0, and Triton needs 7.5 or newer"),
        ((8, 0), False, "Triton cannot be imported"),
        ((8, 0), True, "Triton cannot compile for it (RuntimeError: Failed to find C compiler.)"),
    ],
)
def test_a_gpu_without_triton_runs_native_kernels_and_says_so_once(capability, has_triton, said, monkeypatch, caplog):
    triton_launch = pytest.importorskip("models.lean.norm.triton_launch", reason="Triton is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * 2**30))
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: None)

    def without_compiler(*arguments):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    monkeypatch.setattr(triton_launch, "statistics", without_compiler)
    if not has_triton:
        monkeypatch.setitem(sys.modules, "models.lean.norm.triton_launch", None)
        monkeypatch.delattr("models.lean.norm.triton_launch", raising=False)
    assert not uses_triton(CUDA)
    assert not uses_triton(CUDA)
    (record,) = caplog.records
    assert "use torch's own kernels, which are slower and convert up to 256 MiB at once to fp32: " in record.message
    assert said in record.message


def test_wrong_shapes_are_refused():
    x, grad, weight, bias = inputs(Case((1, 4, 2, 3, 3), 2))
    mean, rstd = statistics(x, 2, EPS)
    with pytest.raises(AssertionError, match="does not belong to"):
        store_norm_sums(x, torch.empty(2, 1, 4), grad[:, :, :1], x, Norm(mean, rstd, weight, bias, False))
    with pytest.raises(AssertionError, match="rows, height, width"):
        statistics(x[0], 2, EPS)
    with pytest.raises(AssertionError, match="no values to normalise"):
        operators.statistics(torch.zeros(2, 4, 0, 3, 3), 2, 1e-5)


@pytest.mark.parametrize("dtype", [*LOW_PRECISION, torch.float32], ids=str)
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


CHANNELS, GRID = 6, (3, 2, 5)


def expanded(grad):
    """One value for all voxels of a line, held once, as the gradient of a mean is."""
    return grad[..., :1].expand(grad.shape)


def expected(x, norm, silu, grad):
    x, weight, bias = (part.detach().double().requires_grad_() for part in (x, norm.weight, norm.bias))
    y = F.group_norm(x, norm.num_groups, weight, bias, norm.eps)
    y = F.silu(y) if silu else y
    return y.detach(), *torch.autograd.grad(y, (x, weight, bias), grad.double())


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("silu", [False, True], ids=["alone", "with SiLU"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("x_dtype", "y_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_low_precision_costs_one_rounding_of_each_result(x_dtype, y_dtype, layout, silu):
    low = y_dtype in LOW_PRECISION
    # Sums cancel where a mean is 30 times the scale; a tensor that is misread is off by tenths.
    exact = 1e-12 if x_dtype == torch.float64 else 1e-4
    for batch, groups, grad_layout in itertools.product(BATCHES, (1, 2, CHANNELS), [*LAYOUTS.values(), expanded]):
        torch.manual_seed(0)
        norm = nn.GroupNorm(groups, CHANNELS).to(x_dtype if x_dtype == torch.float64 else torch.float32)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        x = LAYOUTS[layout](volumes(batch, CHANNELS, *GRID).to(x_dtype)).requires_grad_()
        grad = grad_layout(direction(x.shape).to(y_dtype))
        with torch.autocast("cpu", y_dtype if low else torch.bfloat16, enabled=low):
            y = group_norm(x, norm, silu)
        assert y.dtype == y_dtype
        found = (y.detach(), *torch.autograd.grad(y, (x, norm.weight, norm.bias), grad))
        names = ("output", "x", "weight", "bias")
        for name, mine, true in zip(names, found, expected(x, norm, silu, grad), strict=True):
            rounding = torch.finfo(mine.dtype).eps / 2 if mine.dtype in LOW_PRECISION else 0.0
            distance = float((mine.double() - true).norm() / true.norm())
            assert distance <= exact + rounding, (name, batch, groups, grad_layout)


def test_only_the_gradients_asked_for_are_made():
    norm = nn.GroupNorm(2, CHANNELS).requires_grad_(False)
    x = volumes(2, CHANNELS, *GRID).bfloat16().requires_grad_()
    group_norm(x, norm, silu=True).float().square().sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is None
    trained = nn.GroupNorm(2, CHANNELS)
    group_norm(x.detach(), trained, silu=True).float().square().sum().backward()
    assert trained.weight.grad is not None


@pytest.mark.parametrize("arrange", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize("mean", [0.0, 100.0, 1000.0])
def test_instance_norm_is_as_close_to_the_truth_as_stock_at_a_large_mean(mean, arrange):
    generator = torch.Generator().manual_seed(3)
    values, grad = (torch.randn(2, 4, 6, 7, 8, generator=generator) for _ in range(2))
    values = arrange(values + mean)

    def gradient(norm, dtype):
        x = values.to(dtype, copy=True).requires_grad_()
        return torch.autograd.grad(norm(x), x, grad.to(dtype))[0].double()

    stock = nn.InstanceNorm3d(4)
    exact = gradient(stock, torch.float64)
    ours, theirs = (float((gradient(norm, torch.float32) - exact).norm()) for norm in (InstanceNorm(stock), stock))
    assert ours <= 2 * theirs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [3, CHANNELS])
def test_the_result_may_have_another_layout_than_the_input(groups, dtype):
    torch.manual_seed(0)
    norm = nn.GroupNorm(groups, CHANNELS, dtype=torch.promote_types(dtype, torch.float32))
    x = volumes(2, CHANNELS, *GRID).to(dtype)
    for given in (x, channels_last(x)):
        expected = group_norm(given, norm, True)
        for wanted in (torch.contiguous_format, torch.channels_last_3d):
            found = group_norm(given, norm, True, wanted)
            assert found.is_contiguous(memory_format=wanted)
            torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_a_short_last_piece_counts_by_its_rows(groups, layout, monkeypatch):
    case = Case((2, 4, 5, 2, 3), groups, torch.float64, layout)
    x = inputs(case)[0] + torch.arange(5.0, dtype=torch.float64).view(1, 1, 5, 1, 1)
    # Pieces of two rows of one channel, and of one row of the last.
    monkeypatch.setattr(torch_kernels, "CPU_PIECE_VALUES", 24)
    mean, rstd = torch_kernels.statistics(x, groups, EPS)
    variance, expected = torch.var_mean(x.reshape(2, groups, -1), 2, correction=0)
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(rstd, (variance + EPS).rsqrt(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("rows", [3, 17])
def test_rough_means_are_those_of_every_eighth_row(rows):
    x = inputs(Case((2, 4, rows, 2, 3), 2, torch.float64, "channels last"))[0] + 5
    found = torch_kernels._rough_means(x, 2)
    torch.testing.assert_close(found, x[:, :, ::8].reshape(2, 2, -1).mean(2), rtol=0, atol=1e-13)


def test_statistics_hold_where_every_eighth_row_is_far_from_the_mean():
    x = torch.randn((1, 4, 16, 6, 8), generator=torch.Generator().manual_seed(0))
    x[:, :, ::8] += 1000
    mean, rstd = torch_kernels.statistics(x.contiguous(memory_format=torch.channels_last_3d), 2, EPS)
    variance, expected = torch.var_mean(x.double().view(1, 2, -1), 2, correction=0)
    torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double(), (variance + EPS).rsqrt(), rtol=2e-6, atol=0)


def test_volumes_are_folded_without_a_copy_only_where_lines_of_voxels_lie_side_by_side():
    x = torch.randn(2, 4, 3, 2, 5).contiguous(memory_format=torch.channels_last_3d)
    assert [torch_kernels._line(part) for part in (x, x[:, :, 1:], x[:, :2], x.contiguous())] == [5, 5, 1, 1]
    assert torch_kernels._line(x, x.contiguous()) == 1
    folded = torch_kernels._fold(x[:, :, 1:], 5)
    assert folded.shape == (2, 20, 4, 1, 1)
    assert folded.data_ptr() == x[:, :, 1:].data_ptr()
    assert torch.equal(folded[0, 4 * 3 + 1, 2 * 1, 0, 0], x[0, 1, 2, 0, 3])
