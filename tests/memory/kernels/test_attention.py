"""Attention's workspaces are those that torch's allocator showed, in their order."""

import pytest
import torch

from memory.kernels.reductions import attention_workspaces

aten = torch.ops.aten
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 1, 65536, 64), (33554432, 524288, ~0, 33587200)),
        ((1, 1, 65536, 8), (2097152, 262144, ~0, 16793600)),
        ((1, 1, 65537, 64), (16777472, 262148, ~0, 16810000)),
        ((1, 1, 65536, 96), (25165824, 262144, ~0, 33570816)),
        ((1, 8, 1000, 32), (1024000, 32000, 32000, ~1, ~0, 2099200)),
    ],
)
def test_fp32_backward_multiplies_sums_and_then_accumulates_in_blocks(shape, expected):
    query = torch.empty(shape, device="meta")
    assert attention_workspaces(BACKWARD, (query, query)) == expected


def test_16_bit_backward_accumulates_the_gradient_of_the_query_in_fp32():
    query = torch.empty(2, 1, 1000, 40, dtype=torch.bfloat16, device="meta")
    assert attention_workspaces(BACKWARD, (query, query)) == (4 * 2 * 1024, 4 * 2 * 1024 * 64)
