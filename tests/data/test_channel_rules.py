"""Channels with intensity rules of their own, as radar grids and multi-modal scans need them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from data import load_volume, prepare_volumes
from data.formats import write_nifti
from settings import ConfigError, DataError, validate
from tests.data.small_volumes import AFFINE, build_settings, random_voxels

RULES: list[list[Any]] = [["window", 0, 80], ["percentile", 5, 95], ["window", -30, 30]]


def by_channel(rules: list[list[Any]]) -> dict[str, list[Any]]:
    return dict(zip(("mode", "lower", "upper"), map(list, zip(*rules, strict=True)), strict=True))


def test_each_channel_is_scaled_by_its_rule(tmp_path):
    voxels = random_voxels(0, (3, 12, 10, 8)) * np.array([0.5, 1, 0.1], np.float32)[:, None, None, None]
    write_nifti(tmp_path / "a.nii.gz", voxels, np.eye(4))
    found = load_volume(tmp_path / "a.nii.gz", build_settings(intensity=by_channel(RULES)), 3).image.numpy()
    for mine, values, (mode, lower, upper) in zip(found, voxels, RULES, strict=True):
        ends = np.percentile(values, [lower, upper]) if mode == "percentile" else (lower, upper)
        expected = 2 * (np.clip(values, *ends) - ends[0]) / (ends[1] - ends[0]) - 1
        np.testing.assert_allclose(mine, expected, atol=1e-5)


def test_rules_are_checked_and_a_window_that_holds_nothing_is_named(tmp_path):
    for channels, said in (
        ([*RULES, ["window", 0, 1]], "4 entries for 3 channels"),
        ([["window", 5, 5], *RULES[1:]], r"5 is not below upper \(5\)"),
        ([["percentile", -1, 50], *RULES[1:]], "are not percentiles"),
    ):
        values = {"data": {"intensity": by_channel(channels)}, "autoencoder": {"in_channels": 3}}
        with pytest.raises(ConfigError, match=said):
            validate(values)
    for name in "ab":
        write_nifti(tmp_path / f"{name}.nii", random_voxels(1, (3, 12, 10, 8)), AFFINE)
    far = build_settings(source=str(tmp_path), intensity=by_channel([*RULES[:2], ["window", 9000, 9001]]))
    with pytest.raises(DataError, match="lie outside the window 9000 to 9001"):
        prepare_volumes(far, 0, 3)
