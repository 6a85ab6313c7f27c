"""Partial sums take what torch's allocator showed on an A100."""

import torch

from memory.kernels.reductions import channel_sum_bytes

MIB = 1 << 20


def test_the_gradient_of_a_bias_needs_27_mib_for_64_channels_last():
    with torch.device("meta"):
        grad = torch.empty(4, 64, 64, 64, 16, dtype=torch.bfloat16)
        assert channel_sum_bytes(grad.contiguous(memory_format=torch.channels_last_3d)) == 27 * MIB
        assert channel_sum_bytes(grad) == 0
        small = torch.empty(1, 64, 2, 2, 2).contiguous(memory_format=torch.channels_last_3d)
        assert channel_sum_bytes(small) == 0
