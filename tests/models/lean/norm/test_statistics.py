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
    monkeypatch.setitem(torch_kernels.PIECE_VALUES, "cpu", 24)
    mean, rstd = torch_kernels.statistics(x, groups, EPS)
    variance, expected = torch.var_mean(x.reshape(2, groups, -1), 2, correction=0)
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(rstd, (variance + EPS).rsqrt(), rtol=1e-13, atol=0)
