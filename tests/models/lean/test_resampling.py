"""Resampling as one convolution: one rounding from the truth, in either layout, for every size of an axis."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models.lean.layout import layout_of
from models.lean.resampling import downsample_conv, upsample_conv, upsampled_rows
from models.unet import add_upsampled, halved
from tests.models.autoencoders import downsampled, upsampled
from tests.models.gradients import channels_last

SIZES = [(2, 3, 4), (5, 2, 3), (3, 5, 7), (4, 4, 1)]
STRIDES = [(2, 2, 2), (2, 2, 1), (1, 2, 2), (2, 1, 1), (1, 1, 2)]


def layer(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Conv3d(6, 4, 3, dtype=dtype)


@pytest.mark.parametrize("arrange", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize(("ours", "stock"), [(upsample_conv, upsampled), (downsample_conv, downsampled)])
@pytest.mark.parametrize("strides", STRIDES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_double_precision_is_exact(size, strides, ours, stock, arrange):
    if ours is downsample_conv and (1, 2) in zip(size, strides, strict=True):
        pytest.skip("an axis of one voxel cannot be halved")
    conv, x = layer(), arrange(torch.randn(2, 6, *size, dtype=torch.float64)).requires_grad_()
    found, expected = ours(x, conv, strides), stock(x, conv, strides)
    direction = torch.randn_like(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    mine, true = (torch.autograd.grad(out, (x, conv.weight, conv.bias), direction) for out in (found, expected))
    torch.testing.assert_close(mine, true, rtol=0, atol=1e-12)


def test_taps_are_added_before_they_are_rounded():
    weight = torch.zeros(1, 1, 3, 3, 3)
    weight[0, 0, 1, 1, 1], weight[0, 0, 1, 1, 2] = 1 + 2**-8, 2**-8
    rows = upsampled_rows(torch.ones(2, 1, 2, 2, 2), weight, torch.zeros(1), (2, 2, 2), torch.bfloat16)
    # 1 + 2^-8 alone is rounded to 1, and so is its sum with the other tap; before rounding the sum is 1 + 2^-7.
    assert float(rows.rows(0, 4)[0, 0, 1, 1, 2]) == 1 + 2**-7


@pytest.mark.parametrize("strides", STRIDES[:3], ids=str)
def test_rows_on_demand_are_those_of_the_whole(strides):
    conv, x = layer(), torch.randn(2, 6, 10 // strides[0], 3, 2, dtype=torch.float64)
    whole = upsampled(x, conv, strides)
    for start, end in itertools.product([0, 1, 2, 5], [6, 7, 10]):
        rows = upsampled_rows(x, conv.weight, conv.bias, strides, x.dtype).rows(start, end)
        torch.testing.assert_close(rows, whole[:, :, start:end], rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("arrange", [torch.Tensor.contiguous, channels_last])
@pytest.mark.parametrize("size", [(2, 3, 4), (1, 1, 5)], ids=str)
def test_upsampled_sums_and_averages_are_rounded_once_and_keep_their_layout(size, arrange, dtype):
    torch.manual_seed(0)
    small = arrange(torch.randn(3, 6, *size).to(dtype)).requires_grad_()
    large = arrange(torch.randn(3, 6, *(2 * axis for axis in size)).to(dtype)).requires_grad_()
    exact = [tensor.detach().double().requires_grad_() for tensor in (large, small)]
    sums = 16 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for ours, stock, leaves, truths in (
        (add_upsampled, lambda x, y: x + F.interpolate(y, scale_factor=2.0), [large, small], exact),
        (halved, lambda x: F.avg_pool3d(x, 2), [large], exact[:1]),
    ):
        found, true = ours(*leaves), stock(*truths)
        direction = arrange(torch.randn(true.shape).to(dtype))
        gradients = torch.autograd.grad(found, leaves, direction)
        expected = torch.autograd.grad(true, truths, direction.double())
        for mine, right in zip((found, *gradients), (true, *expected), strict=True):
            torch.testing.assert_close(mine.detach().double(), right.detach(), rtol=torch.finfo(dtype).eps, atol=sums)
            assert mine.dtype == dtype
            assert layout_of(mine) == layout_of(large)
