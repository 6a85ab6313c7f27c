"""Statistics from pieces of a volume: each counts by the values it has."""

from __future__ import annotations

import pytest
import torch

from models.lean.norm import torch_kernels
from tests.models.lean.norm.norm_cases import EPS, Case, inputs


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_a_short_last_piece_counts_by_its_rows(groups, layout, monkeypatch):
    case = Case((2, 4, 5, 2, 3), groups, torch.float64, layout)
    x = inputs(case)[0] + torch.arange(5.0, dtype=torch.float64).view(1, 1, 5, 1, 1)
    # Pieces of two rows of one channel, and of one row of the last.
    monkeypatch.setattr(torch_kernels, "CPU_PIECE_VALUES", 24)
    mean, rstd = torch_kernels.statistics(x, groups, EPS)
    variance, expected = torch.var_mean(x.reshape(2, groups, -1), 2, correction=0)
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(rstd, (variance + EPS).rsqrt(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("rows", [3, 17])
def test_rough_means_are_those_of_every_eighth_row(rows):
    x = inputs(Case((2, 4, rows, 2, 3), 2, torch.float64, "channels last"))[0] + 5
    found = torch_kernels._rough_means(x, 2)
    torch.testing.assert_close(found, x[:, :, ::8].reshape(2, 2, -1).mean(2), rtol=0, atol=1e-13)


def test_statistics_hold_where_every_eighth_row_is_far_from_the_mean():
    x = torch.randn((1, 4, 16, 6, 8), generator=torch.Generator().manual_seed(0))
    x[:, :, ::8] += 1000
    mean, rstd = torch_kernels.statistics(x.contiguous(memory_format=torch.channels_last_3d), 2, EPS)
    variance, expected = torch.var_mean(x.double().view(1, 2, -1), 2, correction=0)
    torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double(), (variance + EPS).rsqrt(), rtol=2e-6, atol=0)


def test_volumes_are_folded_without_a_copy_only_where_lines_of_voxels_lie_side_by_side():
    x = torch.randn(2, 4, 3, 2, 5).contiguous(memory_format=torch.channels_last_3d)
    assert [torch_kernels._line(part) for part in (x, x[:, :, 1:], x[:, :2], x.contiguous())] == [5, 5, 1, 1]
    assert torch_kernels._line(x, x.contiguous()) == 1
    folded = torch_kernels._fold(x[:, :, 1:], 5)
    assert folded.shape == (2, 20, 4, 1, 1)
    assert folded.data_ptr() == x[:, :, 1:].data_ptr()
    assert torch.equal(folded[0, 4 * 3 + 1, 2 * 1, 0, 0], x[0, 1, 2, 0, 3])
