"""IoU and Chamfer distance of occupied voxels, on grids whose answers are known."""

from __future__ import annotations

import math

import pytest
import torch

from training.validation.pair_metrics import chamfer, iou


def grid(*places, size=8):
    volume = torch.full((1, 1, size, size, size), -1.0)
    for place in places:
        volume[(0, 0, *place)] = 1.0
    return volume


def test_equal_volumes_and_empty_ones_agree():
    for volume in (grid((1, 2, 3), (4, 4, 4)), grid()):
        assert float(iou(volume, volume, 0.1)) == 1
        assert float(chamfer(volume, volume, 0.1)) == 0


def test_shares_and_distances_are_those_of_the_voxels():
    first, second = grid((0, 0, 0), (3, 3, 3)), grid((0, 0, 0), (3, 3, 5))
    assert float(iou(first, second, 0.1)) == pytest.approx(1 / 3)
    assert float(chamfer(first, second, 0.1)) == pytest.approx(1.0)  # 0 and 2, both ways


def test_an_empty_reconstruction_is_as_far_as_the_grid_is_long():
    assert float(iou(grid(), grid((1, 1, 1)), 0.1)) == 0
    assert float(chamfer(grid(), grid((1, 1, 1)), 0.1)) == pytest.approx(8 * math.sqrt(3))


def test_the_threshold_is_a_share_of_the_range():
    faint = torch.where(grid((2, 2, 2)) > 0, -0.5, -1.0)  # a quarter of the range
    assert float(iou(faint, grid((2, 2, 2)), 0.2)) == 1
    assert float(iou(faint, grid((2, 2, 2)), 0.3)) == 0


def test_each_volume_of_a_batch_is_measured_by_itself():
    batch = torch.cat([grid((1, 1, 1)), grid()])
    assert iou(batch, torch.cat([grid((1, 1, 1)), grid((0, 0, 0))]), 0.1).tolist() == [1, 0]


def test_background_of_a_signed_channel_is_not_occupied():
    """A velocity is 0 where nothing was seen, which is the middle of its range."""
    echoes = torch.full((1, 2, 8, 8, 8), -1.0)
    echoes[:, 1] = 0.25
    echoes[0, 0, 1, 1, :3] = 1.0
    echoes[0, 1, 1, 1, :3] = torch.tensor([-1.0, 1.0, 0.9])
    empty = torch.full_like(echoes, -1.0)
    empty[:, 1] = 0.25
    assert float(iou(echoes, echoes, 0.1)) == 1
    assert float(iou(empty, echoes, 0.1)) == 0
    assert float(iou(empty + 0.1, echoes, 0.1)) == 0
    assert float(chamfer(empty, echoes, 0.1)) == pytest.approx(8 * math.sqrt(3))


def test_a_volume_without_one_common_value_is_occupied_above_its_lower_end():
    filled = torch.linspace(-1, 1, 512).view(1, 1, 8, 8, 8)
    assert float(iou(torch.ones_like(filled), filled, 0.1)) == pytest.approx((filled > -0.8).float().mean().item())
