"""Raw kernels are called in one module, which gives the same numbers for every layout of its arguments."""

import functools
import re
from pathlib import Path

import pytest
import torch

from models.lean import native
from tests.models.gradients import LAYOUTS

ROOT = Path(__file__).resolve().parents[3]
RAW = re.compile(
    r"torch\.(_C|_VF|_ops)\b|torch\.ops\b(?!\.lean)|\baten\b|\.native_|from torch import .*\b(ops|_C|_VF|_ops)\b"
)
"""What reaches past torch's public operators and our own."""


def test_only_native_reaches_for_raw_kernels():
    sources = [path for folder in ("models", "losses", "training", "data") for path in (ROOT / folder).rglob("*.py")]
    users = {str(path.relative_to(ROOT)) for path in sources if RAW.search(path.read_text())}
    assert users == {"models/lean/native.py"}


def strided(values):
    """The same values in every other place, with others between them."""
    wide = torch.full((*values.shape, 2), torch.nan, dtype=values.dtype)
    wide[..., 0] = values
    return wide[..., 0]


def arrangements(*arguments):
    """The arguments with one of them at a time in another layout."""
    for index, argument in enumerate(arguments):
        layouts = [strided, *(LAYOUTS.values() if argument.dim() == 5 else [])]
        for layout in layouts:
            yield [layout(each.clone()) if place == index else each.clone() for place, each in enumerate(arguments)]


@pytest.fixture
def values():
    torch.manual_seed(0)
    x, grad = torch.randn(3, 4, 2, 3, 5), torch.randn(3, 4, 2, 3, 5)
    return x, grad, torch.randn(4), torch.randn(4)


def test_group_norm_and_its_gradients_take_every_layout(values):
    x, grad, weight, bias = values
    _, mean, rstd = native.group_norm(x, weight, bias, 2, 1e-5)
    for function, arguments in (
        (functools.partial(native.group_norm, groups=2, eps=1e-5), (x, weight, bias)),
        (native.group_norm_backward, (grad, x, mean, rstd, weight)),
    ):
        expected = function(*arguments)
        for arranged in arrangements(*arguments):
            torch.testing.assert_close(function(*arranged), expected)


def test_silu_backward_takes_every_layout_and_overwrites_its_input(values):
    x, grad, _, _ = values
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.silu(leaf), leaf, grad)
    for given, target in arrangements(grad, x):
        assert native.silu_backward(given, target, target).data_ptr() == target.data_ptr()
        torch.testing.assert_close(target, expected)
    target = x.clone()
    torch.testing.assert_close(native.silu_backward(grad.bfloat16(), target, target), expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_convolution_backward_takes_every_layout(values, dtype):
    x, weight, grad = values[0].to(dtype), torch.randn(6, 4, 3, 3, 3).to(dtype), torch.randn(3, 6, 2, 3, 5).to(dtype)
    exact_x, exact_weight = (part.double().clone().requires_grad_() for part in (x, weight))
    y = torch.nn.functional.conv3d(exact_x, exact_weight, padding=1)
    expected = torch.autograd.grad(y, (exact_x, exact_weight), grad.double())
    for g, v, w in arrangements(grad, x, weight):
        found = native.convolution_backward(g, v, w, (True, True), padding=(1, 1, 1))
        for mine, true in zip(found, expected, strict=True):
            assert float((mine.double() - true).norm() / true.norm()) <= 3 * torch.finfo(dtype).eps


def test_moments_of_another_shape_are_an_error(values):
    x, grad, weight, bias = values
    _, mean, rstd = native.group_norm(x, weight, bias, 2, 1e-5)
    with pytest.raises(AssertionError, match="moments of shape"):
        native.group_norm_backward(grad, x, mean.T, rstd.T, weight)
    with pytest.raises(AssertionError, match="gradient of shape"):
        native.group_norm_backward(grad[:1], x, mean, rstd, weight)
