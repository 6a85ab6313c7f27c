"""What blocks in slabs give back: gradients for exactly the parameters that ask for one, summed in full precision."""

from __future__ import annotations

import pytest
import torch

from models.lean.slabs import bias_grad
from tests.models.gradients import small_work_counts
from tests.models.lean.test_blocks import CHANNELS, GRID, lean, problem
from tests.models.problems import volumes


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
