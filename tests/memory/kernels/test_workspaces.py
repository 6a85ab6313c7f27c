"""What attention, sums and a CPU's convolutions hold besides their results is what real allocators showed."""

import pytest
import torch

from memory.kernels import convolutions
from memory.kernels.convolutions import cpu_convolution_passes
from memory.kernels.operators import attention_workspaces, channel_sum_bytes, partial_sum_bytes, sum_bytes
from models.lean.norm import operators  # noqa: F401  # registers torch.ops.lean

MIB = 1 << 20
LAST = torch.channels_last_3d
aten = torch.ops.aten
TOTAL = aten.sum.dim_IntList


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((2, 1, 65536, 64), torch.float32, (33554432, 524288, ~0, 33587200)),
        ((1, 1, 65536, 8), torch.float32, (2097152, 262144, ~0, 16793600)),
        ((1, 1, 65537, 64), torch.float32, (16777472, 262148, ~0, 16810000)),
        ((1, 1, 65536, 96), torch.float32, (25165824, 262144, ~0, 33570816)),
        ((1, 8, 1000, 32), torch.float32, (1024000, 32000, 32000, ~1, ~0, 2099200)),
        # In 16 bits the gradient of the query is added up in fp32.
        ((2, 1, 1000, 40), torch.bfloat16, (4 * 2 * 1024, 4 * 2 * 1024 * 64)),
    ],
)
def test_attentions_backward_takes_what_torchs_allocator_showed_in_its_order(shape, dtype, expected):
    query = torch.empty(shape, dtype=dtype, device="meta")
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert attention_workspaces(backward, (query, query)) == expected


def test_sums_over_voxels_take_what_an_a100_showed_if_channels_come_last():
    """Of the gradient of a bias, and of what is added to each channel of each sample, such as a time's embedding."""
    with torch.device("meta"):
        grad = torch.empty(4, 64, 64, 64, 16, dtype=torch.bfloat16)
        last, small = grad.contiguous(memory_format=LAST), torch.empty(1, 64, 2, 2, 2).contiguous(memory_format=LAST)
        assert [channel_sum_bytes(x) for x in (last, grad, small)] == [27 * MIB, 0, 0]
        assert [sum_bytes(TOTAL, (x, [2, 3, 4], True)) for x in (last, grad)] == [108 * MIB, 0]


def test_tokens_with_other_channels_between_them_are_summed_like_dense_ones():
    with torch.device("meta"):
        tokens = torch.empty(32768, 192, dtype=torch.bfloat16)
        dense = sum_bytes(TOTAL, (torch.empty(32768, 128, dtype=torch.bfloat16), [0]))
        assert sum_bytes(TOTAL, (tokens[:, :128], [0])) == dense > 0
        # Where voxels lie an odd number of values apart, no vectors can be read.
        assert sum_bytes(TOTAL, (torch.empty(32768, 193)[:, :128], [0])) < dense


def test_only_norms_of_large_volumes_leave_parts_of_their_sums_in_memory():
    with torch.device("meta"):
        small, large = torch.empty(1, 64, 64, 64, 16), torch.empty(1, 64, 64, 64, 32)
        forward, backward = torch.ops.lean.group_norm.default, torch.ops.lean.group_norm_backward.default
        for operator, before in ((forward, ()), (backward, (0,))):
            assert partial_sum_bytes(operator, (*before, small)) == 0
            assert partial_sum_bytes(operator, (*before, large)) == 8 * 64 * 32
        assert partial_sum_bytes(torch.ops.lean.statistics.default, (small,)) == 8 * 64 * 16


CHANNELS, OUTPUTS, VOXELS = 16, 32, 48 * 96 * 12


def weight_pass(layout, transposed=False):
    """Return what the gradient of the weights takes on a CPU besides its result."""
    with torch.device("meta"):
        x = torch.empty(1, CHANNELS, 48, 96, 12).contiguous(memory_format=layout)
        grad = torch.empty(1, OUTPUTS, 48, 96, 12).contiguous(memory_format=layout)
        weight = torch.empty((CHANNELS, OUTPUTS) if transposed else (OUTPUTS, CHANNELS))
        weight = weight[..., None, None, None].expand(-1, -1, 3, 3, 3).contiguous(memory_format=layout)
    args = (grad, x, weight, None, [1] * 3, [1] * 3, [1] * 3, transposed, [0] * 3, 1, [False, True, False])
    return cpu_convolution_passes(aten.convolution_backward.default, args, None)[0]


@pytest.mark.parametrize(("transposed", "unfolded"), [(False, CHANNELS), (True, OUTPUTS)])
def test_without_avx_512_a_row_is_unfolded_and_with_it_both_volumes_are_copied(monkeypatch, transposed, unfolded):
    """Without, of a copy if channels come last; with it, into blocks unless they do."""
    row, copies = unfolded * 27 * 96 * 12 * 4, (CHANNELS + OUTPUTS) * VOXELS * 4
    for block, contiguous, last in ((8, row, row + unfolded * VOXELS * 4), (16, copies, 0)):
        monkeypatch.setattr(convolutions, "_block", lambda block=block: block)
        assert weight_pass(torch.contiguous_format, transposed) == contiguous
        assert weight_pass(LAST, transposed) == last
