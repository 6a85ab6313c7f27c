"""What convolutions allocate on a CPU follows its vector width and their layout, as resident memory showed."""

import pytest
import torch

from memory.kernels import cpu_convolutions
from memory.kernels.cpu_convolutions import cpu_convolution_memory

CHANNELS, OUTPUTS, GRID = 16, 32, (48, 96, 12)
VOXELS = 48 * 96 * 12


def weight_pass(layout, transposed=False):
    """Return what the gradient of the weights takes besides its result."""
    with torch.device("meta"):
        x = torch.empty(1, CHANNELS, *GRID).contiguous(memory_format=layout)
        grad = torch.empty(1, OUTPUTS, *GRID).contiguous(memory_format=layout)
        weight = torch.empty((CHANNELS, OUTPUTS) if transposed else (OUTPUTS, CHANNELS), device="meta")
        weight = weight[..., None, None, None].expand(-1, -1, 3, 3, 3).contiguous(memory_format=layout)
    args = (grad, x, weight, None, [1] * 3, [1] * 3, [1] * 3, transposed, [0] * 3, 1, [False, True, False])
    memory = cpu_convolution_memory(torch.ops.aten.convolution_backward.default, args, None)
    assert memory is not None
    return memory.passes[0]


@pytest.mark.parametrize(("transposed", "unfolded"), [(False, CHANNELS), (True, OUTPUTS)])
def test_without_avx_512_a_row_is_unfolded_of_a_copy_if_channels_come_last(monkeypatch, transposed, unfolded):
    monkeypatch.setattr(cpu_convolutions, "_block", lambda: 8)
    row = unfolded * 27 * 96 * 12 * 4
    assert weight_pass(torch.contiguous_format, transposed) == row
    assert weight_pass(torch.channels_last_3d, transposed) == row + unfolded * VOXELS * 4


def test_with_avx_512_both_volumes_are_copied_into_blocks_unless_channels_come_last(monkeypatch):
    monkeypatch.setattr(cpu_convolutions, "_block", lambda: 16)
    assert weight_pass(torch.contiguous_format) == (CHANNELS + OUTPUTS) * VOXELS * 4
    assert weight_pass(torch.channels_last_3d) == 0
