"""Partial sums take what torch's allocator showed on an A100."""

import torch

from memory.kernels.reductions import channel_sum_bytes, partial_sum_bytes, sum_bytes
from models.lean.norm import operators  # noqa: F401  # registers torch.ops.lean

MIB = 1 << 20


def test_the_gradient_of_a_bias_needs_27_mib_for_64_channels_last():
    with torch.device("meta"):
        grad = torch.empty(4, 64, 64, 64, 16, dtype=torch.bfloat16)
        assert channel_sum_bytes(grad.contiguous(memory_format=torch.channels_last_3d)) == 27 * MIB
        assert channel_sum_bytes(grad) == 0
        small = torch.empty(1, 64, 2, 2, 2).contiguous(memory_format=torch.channels_last_3d)
        assert channel_sum_bytes(small) == 0


def test_a_sum_over_the_voxels_of_each_sample_needs_108_mib_for_64_channels_last():
    """The gradient of what is added to each channel of each sample, such as an embedding of the time."""
    total = torch.ops.aten.sum.dim_IntList
    with torch.device("meta"):
        grad = torch.empty(4, 64, 64, 64, 16, dtype=torch.bfloat16)
        last = grad.contiguous(memory_format=torch.channels_last_3d)
        assert sum_bytes(total, (last, [2, 3, 4], True)) == 108 * MIB
        assert sum_bytes(total, (grad, [2, 3, 4], True)) == 0


def test_tokens_with_other_channels_between_them_are_summed_like_dense_ones():
    total = torch.ops.aten.sum.dim_IntList
    with torch.device("meta"):
        tokens = torch.empty(32768, 192, dtype=torch.bfloat16)
        dense = sum_bytes(total, (torch.empty(32768, 128, dtype=torch.bfloat16), [0]))
        assert sum_bytes(total, (tokens[:, :128], [0])) == dense > 0
        # Where voxels lie an odd number of values apart, no vectors can be read.
        assert sum_bytes(total, (torch.empty(32768, 193)[:, :128], [0])) < dense


def test_only_norms_of_large_volumes_leave_parts_of_their_sums_in_memory():
    with torch.device("meta"):
        small, large = torch.empty(1, 64, 64, 64, 16), torch.empty(1, 64, 64, 64, 32)
        forward, backward = torch.ops.lean.group_norm.default, torch.ops.lean.group_norm_backward.default
        for operator, before in ((forward, ()), (backward, (0,))):
            assert partial_sum_bytes(operator, (*before, small)) == 0
            assert partial_sum_bytes(operator, (*before, large)) == 8 * 64 * 32
        assert partial_sum_bytes(torch.ops.lean.statistics.default, (small,)) == 8 * 64 * 16
