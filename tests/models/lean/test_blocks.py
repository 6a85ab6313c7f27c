"""Each lean block, whole and in slabs, has the gradients of MONAI's block for inputs and gradients of any layout."""

import copy
from functools import cache

import pytest
import torch
from monai.networks.blocks import Convolution, SpatialAttentionBlock, Upsample
from monai.networks.nets.autoencoderkl import AEKLDownsample, AEKLResBlock
from torch import nn

from memory.predict.emulation import cuda_autocast_rules
from models.lean.blocks import Head, ResidualBlock, _places, lean_block, pointwise_conv
from models.lean.checkpointing import gradient_checkpoint_forward
from models.lean.layout import CHANNELS_LAST, CONTIGUOUS, layout_of
from models.lean.resampling import UpsampleBlock
from models.lean.rows import bias_grad
from tests.models.gradients import (
    BATCHES,
    DTYPES,
    LAYOUTS,
    LIMITS,
    LOW_PRECISION,
    Problem,
    batch_last,
    channels_last,
    every_other_voxel,
    floor,
    small_work_counts,
    some_channels,
)
from tests.models.problems import volumes, with_lively_weights

CHANNELS, GROUPS, EPS = 8, 4, 1e-6
GRID = (7, 4, 5)


def convolution(channels=CHANNELS):
    return Convolution(3, CHANNELS, channels, strides=1, kernel_size=3, padding=1, conv_only=True)


class StockHead(nn.Module):
    """What MONAI's networks end with."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(GROUPS, CHANNELS, EPS), convolution(3)

    def forward(self, x):
        return self.conv(self.norm(x))


def upsample():
    return Upsample(
        3, CHANNELS, CHANNELS, scale_factor=2.0, mode="nontrainable", interp_mode="nearest", align_corners=None,
        post_conv=convolution(),
    )  # fmt: skip


STOCK = {
    "residual": lambda: AEKLResBlock(3, CHANNELS, GROUPS, EPS, CHANNELS),
    "residual, fewer channels": lambda: AEKLResBlock(3, CHANNELS, GROUPS, EPS, 4),
    "residual, more channels": lambda: AEKLResBlock(3, CHANNELS, GROUPS, EPS, 12),
    "upsampling": upsample,
    "downsampling": lambda: AEKLDownsample(3, CHANNELS),
    "last norm and convolution": StockHead,
    "attention": lambda: SpatialAttentionBlock(3, CHANNELS, norm_num_groups=GROUPS, use_flash_attention=True),
}

# Which slabs meet which layout; 0: whole.
WAYS = [(0, channels_last), (0, some_channels), (2, every_other_voxel), (3, batch_last), (64, channels_last)]


def lean(stock, rows):
    stock = copy.deepcopy(stock)
    block = Head(stock.norm, stock.conv) if isinstance(stock, StockHead) else lean_block(stock)
    block.slab_rows = rows
    return block


@cache
def problem(name, batch):
    torch.manual_seed(batch)
    stock = with_lively_weights(STOCK[name]())
    return Problem(stock, lambda block, x: [block(x)], [volumes(batch, CHANNELS, *GRID)])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STOCK)
def test_block_has_the_gradients_of_stock_in_every_layout(name, dtype, batch):
    given = problem(name, batch)
    for rows, layout in WAYS:
        if rows and name == "attention":
            continue
        for low_inputs in {dtype in LOW_PRECISION, False}:
            given.assert_as_close_as_stock(lean(given.stock, rows), dtype, arrange=layout, low_inputs=low_inputs)


def as_computed(network, x, dtype):
    """The output of inference under CUDA's rules, in double precision."""
    low = dtype in LOW_PRECISION
    autocast = torch.autocast("cpu", dtype if low else torch.bfloat16, enabled=low)
    with cuda_autocast_rules(), small_work_counts(), torch.inference_mode(), autocast:
        return network(x).double()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_that_overwrite_their_input_or_never_hold_it_give_the_output_of_stock(layout, dtype, batch):
    torch.manual_seed(0)
    names = ("upsampling", "residual", "residual", "last norm and convolution")
    stock = nn.Sequential(*(with_lively_weights(STOCK[name]()) for name in names))
    x = volumes(batch, CHANNELS, 5, 4, 3).to(dtype)
    truth = as_computed(copy.deepcopy(stock).double(), x.double(), torch.float64)
    stock.to(torch.float64 if dtype == torch.float64 else torch.float32)
    own = float((as_computed(stock, x, dtype) - truth).norm() / truth.norm())
    for rows in (2, 5):
        up, first, second, head = (lean(block, rows) for block in stock)
        assert (type(up), type(first), type(second), type(head)) == (UpsampleBlock, ResidualBlock, ResidualBlock, Head)

        def consumed(x, blocks=(up, first, second, head)):
            for block in blocks:
                source, x = x, block.consume(x)
                assert block is not blocks[2] or x.data_ptr() == source.data_ptr(), "in the memory of its input"
            return x

        given = LAYOUTS[layout](x.clone())
        before = given.clone()
        far = float((as_computed(consumed, given, dtype) - truth).norm() / truth.norm())
        assert far <= LIMITS[dtype] * max(own, floor(dtype))
        assert torch.equal(given, before), "upsampling leaves its input alone"


@pytest.mark.parametrize("batch", [1, 3])
def test_pointwise_convolution_stays_in_channels_last_and_equals_a_convolution(batch):
    conv = nn.Conv3d(4, 3, 1)
    x = channels_last(torch.randn(batch, 4, 3, 2, 5)).requires_grad_()
    grad = channels_last(torch.randn(batch, 3, 3, 2, 5))
    found = pointwise_conv(x, conv)
    wanted = conv(x)
    assert layout_of(found) == CHANNELS_LAST
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    leaves = (x, *conv.parameters())
    ours, theirs = (torch.autograd.grad(out, leaves, grad) for out in (found, wanted))
    assert layout_of(ours[0]) == CHANNELS_LAST
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_recomputes_a_residual_block_without_its_last_convolution():
    block = ResidualBlock(AEKLResBlock(3, CHANNELS, GROUPS, EPS, 2 * CHANNELS))
    calls = []
    first, second = block.conv1.conv, block.conv2.conv
    for conv in (first, second):
        conv.register_forward_hook(lambda conv, *_: calls.append(conv))
    gradient_checkpoint_forward(
        block, torch.randn(1, CHANNELS, *GRID), use_gradient_checkpointing=True
    ).sum().backward()
    assert calls == [first, second, first]


def gradients(block, x):
    block.zero_grad()
    with small_work_counts():
        block(x).square().sum().backward()
    return {name: parameter.grad for name, parameter in block.named_parameters()}


SLABS_OF_3 = ("residual", "residual, fewer channels", "last norm and convolution")


@pytest.mark.parametrize(("name", "rows"), [*((name, 3) for name in SLABS_OF_3), ("downsampling", 0)])
def test_freezing_one_parameter_leaves_the_gradients_of_the_others(name, rows):
    block, x = lean(problem(name, 2).stock, rows), volumes(2, CHANNELS, *GRID)
    all_of_them = gradients(block, x)
    for frozen, parameter in block.named_parameters():
        parameter.requires_grad_(False)
        found = gradients(block, x)
        parameter.requires_grad_(True)
        assert found.pop(frozen) is None, frozen
        for other, gradient in found.items():
            assert torch.equal(gradient, all_of_them[other]), (frozen, other)


@pytest.mark.parametrize(
    ("channels", "out_channels", "layout", "shares"),
    [
        (8, 4, CHANNELS_LAST, (True, True)),
        (12, 4, CHANNELS_LAST, (True, True)),
        (12, 8, CHANNELS_LAST, (True, False)),
        (8, 8, CHANNELS_LAST, (True, False)),
        (4, 8, CHANNELS_LAST, (False, False)),
        (8, 4, CONTIGUOUS, (True, False)),
    ],
)
def test_volumes_that_share_memory_in_backward_do_not_disturb_each_other(channels, out_channels, layout, shares):
    stock = with_lively_weights(AEKLResBlock(3, channels, 4, 1e-6, out_channels)).double()
    x = volumes(2, channels, 7, 2, 3).double().contiguous(memory_format=layout).requires_grad_()
    grad_x, *others = _places(x, out_channels, x.dtype)
    assert tuple(part.untyped_storage()._cdata == grad_x.untyped_storage()._cdata for part in others) == shares
    assert {(part.shape, layout_of(part)) for part in others} == {((2, out_channels, 7, 2, 3), layout)}
    expected = torch.autograd.grad(stock(x).square().sum(), (x, *stock.parameters()))
    for rows in (2, 3, 6):
        block = lean(stock, rows)
        found = torch.autograd.grad(block(x).square().sum(), (x, *block.parameters()))
        for (name, _), one, other in zip([("x", x), *stock.named_parameters()], expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9, msg=name)


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
