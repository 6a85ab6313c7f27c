"""The norm itself: values and gradients are right to the last rounding, whatever the layout, groups and batch."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models.lean.norm import InstanceNorm, group_norm
from tests.models.gradients import BATCHES, LOW_PRECISION, direction
from tests.models.layouts import LAYOUTS, channels_last
from tests.models.problems import volumes

CHANNELS, GRID = 6, (3, 2, 5)


def expanded(grad):
    """One value for all voxels of a line, held once, as the gradient of a mean is."""
    return grad[..., :1].expand(grad.shape)


def expected(x, norm, silu, grad):
    x, weight, bias = (part.detach().double().requires_grad_() for part in (x, norm.weight, norm.bias))
    y = F.group_norm(x, norm.num_groups, weight, bias, norm.eps)
    y = F.silu(y) if silu else y
    return y.detach(), *torch.autograd.grad(y, (x, weight, bias), grad.double())


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
