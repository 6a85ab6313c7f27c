"""Strides that differ by axis: what is refused, and the grids that follow from them."""

from __future__ import annotations

import pytest

from data.overview import stage_problems
from settings import ConfigError, Settings, validate

THICK = [[2, 2, 1], [2, 2, 2]]


def settings_of(strides, **more):
    values = {"data": {"voxel_size": [64, 64, 24]}, "autoencoder": {"strides": strides}, **more}
    return validate(values)


def test_the_latent_grid_follows_from_the_strides():
    settings = settings_of(THICK)
    assert settings.autoencoder.downsampling == (4, 4, 2)
    assert settings.latent_shape == (3, 16, 16, 12)
    assert settings.autoencoder.level_grids((64, 64, 24)) == [(64, 64, 24), (32, 32, 24), (16, 16, 12)]
    assert Settings().autoencoder.downsampling == (4, 4, 4)
    assert settings_of([[2, 2, 2], [2, 2, 2]]).latent_shape == settings_of(2).latent_shape == (3, 16, 16, 6)


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        ([[2, 2, 1]], "1 entry for 3 levels; allowed: 2, or 2, one for each downsampling"),
        ([[2, 2, 1]] * 3, "3 entries for 3 levels"),
        ([[2, 2, 1], [1, 1, 1]], "[1, 1, 1] shrinks no axis; allowed: a 2 along at least one axis"),
        ([[2, 2, 3], [2, 2, 2]], "each at most 2"),
        ([[2, 2, 0], [2, 2, 2]], "each at least 1"),
        ([[2, 2], [2, 2, 2]], "at least 3 entries"),
        ([2, 2, 1], "each a list"),
        (4, "allowed: 2 or a list"),
        ("auto", "allowed: 2 or a list"),
    ],
    ids=str,
)
def test_other_strides_are_refused_in_words(strides, expected):
    with pytest.raises(ConfigError) as caught:
        settings_of(strides)
    (problem,) = caught.value.problems
    assert str(problem).startswith("autoencoder.strides: ")
    assert expected in str(problem)


def test_stock_blocks_are_refused_in_one_sentence():
    with pytest.raises(ConfigError) as caught:
        validate({"autoencoder": {"strides": THICK, "implementation": "monai"}})
    assert [str(problem) for problem in caught.value.problems] == [
        "autoencoder.strides: [2, 2, 1], [2, 2, 2] with implementation: monai, whose strides are all 2; "
        "set 2, or implementation: lean"
    ]
    same = {"strides": [[2, 2, 2], [2, 2, 2]], "implementation": "monai"}
    assert validate({"autoencoder": same}).autoencoder.downsampling == (4, 4, 4)


def test_grids_are_checked_axis_by_axis():
    with pytest.raises(ConfigError) as caught:
        settings_of(THICK, data={"voxel_size": [62, 64, 25]})
    (problem,) = caught.value.problems
    assert "[62, 64, 25] is not divisible by [4, 4, 2]" in str(problem)
    assert "the nearest is [64, 64, 24]" in str(problem) or "the nearest is [60, 64, 24]" in str(problem)


def test_latents_are_padded_axis_by_axis():
    settings = settings_of(THICK, data={"voxel_size": [64, 64, 28]})
    assert (settings.latent_shape[1:], settings.unet_grid) == ((16, 16, 14), (16, 16, 16))
    assert not stage_problems(settings_of(THICK), (64, 64, 24))
