"""Grids keep the field of view, are divided by both networks, and follow the spacing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from data.overview import stage_problems
from memory.planning.layout import (
    FieldOfView,
    covered_field_of_view,
    fixed_layout,
    layout_of,
    layouts,
    strides_of,
    suggested_values,
)
from settings import Settings, look_up
from tests.memory.planning.fakes import SETS, fake_set, planned


@pytest.mark.parametrize("name", SETS)
def test_every_grid_is_divided_by_both_networks_and_keeps_its_proportions(name):
    view = covered_field_of_view(SETS[name])
    found = layouts(view)
    assert len(found) > 3
    assert [layout.voxels for layout in found] == sorted(layout.voxels for layout in found)
    for layout in found:
        assert not any(n % f for n, f in zip(layout.grid, layout.factor, strict=True))
        is_even = not any(n % 2 ** (layout.unet_levels - 1) for n in layout.latent)
        assert layout.pads_latents is not is_even
        for n, mm, size in zip(layout.grid, layout.spacing_mm, view.size_mm, strict=True):
            assert n * mm == pytest.approx(size)
    finest = found[-1]
    for n, size, step in zip(finest.grid, view.size_mm, view.spacing_mm, strict=True):
        assert n == pytest.approx(size / step, rel=0.13)


@pytest.mark.parametrize("size", [(36.5, 53, 36), (35, 50, 36), (44, 44, 44), (100, 84, 60), (20, 28, 36)])
def test_rounding_keeps_the_aspect(size):
    """An axis at 4.5 steps must not go down while the others go up."""
    layout = layout_of(size, FieldOfView(tuple(map(float, size)), (1.0, 1.0, 1.0)))
    changes = [n / old for n, old in zip(layout.grid, size, strict=True)]
    assert max(changes) / min(changes) <= 1.12
    assert 0.85 < min(changes) <= max(changes) < 1.15


def strides(size, spacing=(1.0, 1.0, 1.0), given=None):
    size_mm = tuple(n * mm for n, mm in zip(size, spacing, strict=True))
    return strides_of(FieldOfView(size_mm, spacing, strides=given), size)


def test_thick_slices_are_halved_later_and_a_thin_slab_keeps_its_short_axis():
    assert strides((320, 320, 24), (0.8, 0.8, 5.0)) == ((2, 2, 1), (2, 2, 1))
    assert strides((512, 512, 40), (0.8, 0.8, 5.0)) == ((2, 2, 1), (2, 2, 1), (2, 2, 2))
    assert strides((320, 320, 60), (0.8, 0.8, 2.0)) == ((2, 2, 1), (2, 2, 2))
    assert strides((256, 256, 16)) == ((2, 2, 2), (2, 2, 1))
    assert strides((256, 256, 16), given=2) == ((2, 2, 2),)


def test_depth_follows_the_size():
    sizes = ((24, 30, 24), (8, 8, 8), (35, 50, 36), (64, 64, 64), (176, 240, 256), (512, 512, 300))
    assert [strides(size) for size in sizes] == [((2, 2, 2),) * depth for depth in (1, 1, 2, 2, 2, 3)]


def test_a_grid_that_is_given_is_taken_as_it_is():
    view = covered_field_of_view(SETS["small crops"])
    layout = fixed_layout((36, 52, 36), view)
    assert layout.grid == (36, 52, 36)
    assert layout.pads_latents  # the latent has 18 x 26 x 18 voxels
    assert fixed_layout((35, 51, 35), view).factor == (1, 1, 1)
    given = replace(view, depth=3, unet_levels=2)
    assert {(layout.factor, layout.unet_levels) for layout in layouts(given)} == {((8, 8, 8), 2)}


def test_volumes_with_background_keep_their_millimetres():
    view = covered_field_of_view(SETS["CT"])
    assert view.resize == "crop_or_pad"
    assert "of 120 volumes lose part of their edge" in view.reason
    covered = [(e <= size * 1.001).mean() for e, size in zip(SETS["CT"].extents.T, view.size_mm, strict=True)]
    assert min(covered) >= 0.88


def test_tight_crops_are_not_padded():
    view = covered_field_of_view(SETS["small crops"])
    assert view.resize == "resample"
    assert "filled to the edge" in view.reason
    assert view.is_weak
    assert "alike" in covered_field_of_view(fake_set(20, (64, 64, 40), variation=1.02)).reason
    unknown = covered_field_of_view(fake_set(20, (64, 64, 40), variation=1.3, background=math.nan))
    assert unknown.resize == "resample"


@pytest.mark.parametrize("name", SETS)
def test_with_the_networks_of_a_plan_its_grid_is_suggested_and_with_others_one_that_both_stages_accept(name):
    plan = planned(SETS[name], 1000)
    values = suggested_values(plan.fingerprint, plan.settings)
    assert values is not None
    # Without its spacing a volume that is cropped would lose another part.
    assert ("data.spacing" in values) == (plan.settings.data.resize == "crop_or_pad")
    for key, value in values.items():
        assert look_up(plan.settings, key) == (tuple(value) if isinstance(value, list) else value), key
    others = Settings()
    assert stage_problems(others, (37, 36, 36))
    values = suggested_values(plan.fingerprint, others)
    assert values is not None
    assert stage_problems(others.with_overrides(values), values["data.voxel_size"]) == []
