"""What blocks in slabs give back: gradients for exactly the parameters that ask for one, summed in full precision."""

from __future__ import annotations

import pytest
import torch
from monai.networks.nets.autoencoderkl import AEKLResBlock

from models.lean.blocks import _places
from models.lean.layout import CHANNELS_LAST, CONTIGUOUS, layout_of
from models.lean.rows import bias_grad
from tests.models.gradients import small_work_counts
from tests.models.lean.test_blocks import CHANNELS, GRID, lean, problem
from tests.models.problems import volumes, with_lively_weights


def gradients(block, x):
    block.zero_grad()
    with small_work_counts():
        block(x).square().sum().backward()
    return {name: parameter.grad for name, parameter in block.named_parameters()}


@pytest.mark.parametrize("name", ["residual", "residual, fewer channels", "last norm and convolution"])
def test_freezing_one_parameter_leaves_the_gradients_of_the_others(name):
    block, x = lean(problem(name, 2).stock, 3), volumes(2, CHANNELS, *GRID)
    all_of_them = gradients(block, x)
    for frozen, parameter in block.named_parameters():
        parameter.requires_grad_(False)
        found = gradients(block, x)
        parameter.requires_grad_(True)
        assert found.pop(frozen) is None, frozen
        for other, gradient in found.items():
            assert torch.equal(gradient, all_of_them[other]), (frozen, other)


@pytest.mark.parametrize("rows", [2, 3, 6])
@pytest.mark.parametrize("layout", [CONTIGUOUS, CHANNELS_LAST], ids=str)
@pytest.mark.parametrize(("channels", "out_channels"), [(8, 4), (12, 4), (12, 8), (8, 8), (4, 8)])
def test_volumes_that_share_memory_in_backward_do_not_disturb_each_other(channels, out_channels, layout, rows):
    stock = with_lively_weights(AEKLResBlock(3, channels, 4, 1e-6, out_channels)).double()
    x = volumes(2, channels, 7, 2, 3).double().contiguous(memory_format=layout).requires_grad_()
    block = lean(stock, rows)
    expected = torch.autograd.grad(stock(x).square().sum(), (x, *stock.parameters()))
    found = torch.autograd.grad(block(x).square().sum(), (x, *block.parameters()))
    for (name, _), one, other in zip([("x", x), *stock.named_parameters()], expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9, msg=name)


def test_half_the_channels_or_fewer_share_the_memory_of_the_gradient():
    for channels, out_channels, layout, shares in [
        (8, 4, CHANNELS_LAST, (True, True)),
        (12, 4, CHANNELS_LAST, (True, True)),
        (12, 8, CHANNELS_LAST, (True, False)),
        (8, 4, CONTIGUOUS, (True, False)),
        (4, 8, CHANNELS_LAST, (False, False)),
    ]:
        x = torch.empty((2, channels, 3, 4, 5), memory_format=layout)
        grad_x, *others = _places(x, out_channels, x.dtype)
        assert tuple(part.untyped_storage()._cdata == grad_x.untyped_storage()._cdata for part in others) == shares
        assert {part.shape for part in others} == {(2, out_channels, 3, 4, 5)}
        assert {layout_of(part) for part in others} == {layout}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_a_bias_is_summed_in_full_precision(dtype):
    # 105 such values add up to what the low precision cannot express.
    grad = torch.full((1, 3, 3, 7, 5), 1 + torch.finfo(dtype).eps, dtype=dtype)
    found = bias_grad(grad)
    assert found.dtype == torch.float32
    assert torch.equal(found, grad.double().sum((0, 2, 3, 4)).float())


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("name", ["residual", "upsampling", "downsampling", "last norm and convolution", "attention"])
def test_second_derivatives_are_refused_and_not_left_out(name, rows):
    block, x = lean(problem(name, 1).stock, rows), volumes(1, CHANNELS, *GRID).requires_grad_()
    with small_work_counts(), pytest.raises(RuntimeError, match="it has first derivatives only"):
        # The gradient that comes in needs none itself, which torch's own refusal depends on.
        torch.autograd.grad(block(x).sum() + x.pow(3).sum(), x, create_graph=True)
