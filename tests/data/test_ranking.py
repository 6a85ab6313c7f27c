"""Intensities are ranked by channel, without those that are not finite, and without a copy of the volume."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from data.checking import measure, on_grid
from data.formats import COPIES_WHILE_READING, write_nifti
from data.header import Stored
from data.intensity import Ranking
from tests.data.small_volumes import build_settings

KINDS = {
    "float": lambda rng, n: rng.normal(0, 100, n).astype(np.float32),
    "wide float": lambda rng, n: (rng.normal(0, 1, n) ** 5).astype(np.float64),
    "half empty": lambda rng, n: np.where(rng.random(n) < 0.5, 0, rng.normal(0, 1e-3, n)).astype(np.float32),
    "labels": lambda rng, n: rng.integers(0, 3, n).astype(np.float32),
    "int16": lambda rng, n: rng.integers(-3000, 3000, n).astype(np.int16),
    "uint8": lambda rng, n: rng.integers(0, 255, n).astype(np.uint8),
    "big-endian": lambda rng, n: rng.integers(0, 60000, n).astype(">u2"),
    "int32": lambda rng, n: rng.integers(-(10**8), 10**8, n).astype(np.int32),
    "bool": lambda rng, n: rng.random(n) < 0.3,
}


@pytest.mark.parametrize("scale", [(1.0, 0.0), (-2.1, 3.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_percentiles_and_shares_are_those_of_all_voxels(kind, scale):
    for number in (1, 2, 2500):
        stored = Stored(KINDS[kind](np.random.default_rng(0), number).reshape(1, number, 1, 1), *scale)
        values = stored.values(stored.array)
        ranking = Ranking(stored)
        assert ranking.percentiles((0, 0.5, 37.3, 100)) == np.percentile(values, (0, 0.5, 37.3, 100)).tolist()
        assert ranking.is_whole == bool((values == values.round()).all())
        assert (ranking.count, ranking.num_not_finite) == (number, 0)
        for value in (*np.percentile(values, (0, 50, 97, 100)).tolist(), float(values.min()) - 1):
            assert ranking.share_up_to(value) == (values <= np.float32(value)).mean()


def test_numbers_that_are_not_finite_are_counted_and_left_out():
    values = np.array([1, np.nan, np.inf, -np.inf, 2, -5], np.float32).reshape(1, 6, 1, 1)
    ranking = Ranking(Stored(values))
    assert (ranking.count, ranking.num_not_finite) == (3, 3)
    assert ranking.values.tolist() == [-5, 1, 2]
    overflowing = Ranking(Stored(np.array([0, 1, 2], np.int16).reshape(1, 3, 1, 1), slope=3e38))
    assert (overflowing.count, overflowing.num_not_finite) == (2, 1)
    assert Ranking(Stored(np.full((1, 2, 2, 2), np.nan, np.float32))).count == 0
    interleaved = Stored(np.arange(24, dtype=np.uint8).reshape((2, 3, 2, 2), order="F"))
    assert [Ranking(interleaved.channel(c)).values[0] for c in range(2)] == [0, 1]


@pytest.mark.parametrize("kind", ["int16", "float"])
def test_reading_a_volume_needs_at_most_three_times_its_size(tmp_path, kind):
    shape = (128, 128, 96)
    path = tmp_path / "v.nii.gz"
    write_nifti(path, KINDS[kind](np.random.default_rng(0), np.prod(shape)).reshape(1, *shape), np.eye(4))
    settings = build_settings(voxel_size=[64, 64, 32])
    measure(path, settings)
    tracemalloc.start()
    try:
        stored, facts = measure(path, settings)
        on_grid(stored, facts, settings)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < COPIES_WHILE_READING * 4 * np.prod(shape)
