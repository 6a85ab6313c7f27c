"""The cache is one per node and says so when it does not fit."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from data.cache import PREFIX, SHARED_MEMORY, VolumeCache
from settings import ConfigError

SHAPE = (1, 4, 4, 4)
SPACING = np.array([1.0, 2.0, 3.0])


def names() -> set[Path]:
    return set(SHARED_MEMORY.glob(f"{PREFIX}*"))


@pytest.fixture
def _two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "29500")


def test_a_filled_place_gives_the_volume_back() -> None:
    cache = VolumeCache(2, SHAPE, ["a"])
    assert cache.get(1) is None
    image = torch.randn(SHAPE)
    cache.put(1, image, SPACING)
    cache.put(7, image, SPACING)
    found = cache.get(1)
    assert found is not None
    assert torch.equal(found[0], image)
    np.testing.assert_array_equal(found[1], SPACING)
    assert cache.get(0) is None
    assert cache.get(7) is None


def test_a_forked_process_fills_the_same_memory() -> None:
    cache = VolumeCache(2, SHAPE, None)
    process = multiprocessing.get_context("fork").Process(target=cache.put, args=(0, torch.full(SHAPE, 3.0), SPACING))
    process.start()
    process.join()
    found = cache.get(0)
    assert found is not None
    assert torch.equal(found[0], torch.full(SHAPE, 3.0))


@pytest.mark.usefixtures("_two_ranks")
def test_the_ranks_of_a_node_share_one_cache_that_leaves_no_name() -> None:
    before = names()
    first = VolumeCache(2, SHAPE, ["volumes"])
    assert len(names() - before) == 1
    first.put(0, torch.full(SHAPE, 2.0), SPACING)
    second = VolumeCache(2, SHAPE, ["volumes"])
    assert names() == before
    found = second.get(0)
    assert found is not None
    assert torch.equal(found[0], torch.full(SHAPE, 2.0))


@pytest.mark.usefixtures("_two_ranks")
def test_other_contents_and_private_caches_are_not_shared() -> None:
    first = VolumeCache(2, SHAPE, ["volumes"])
    first.put(0, torch.ones(SHAPE), SPACING)
    other, private = VolumeCache(2, SHAPE, ["other volumes"]), VolumeCache(2, SHAPE, None)
    assert other.get(0) is None
    assert private.get(0) is None
    # Their second ranks come, so that nothing stays behind.
    assert VolumeCache(2, SHAPE, ["volumes"]).get(0) is not None
    VolumeCache(2, SHAPE, ["other volumes"])


@pytest.mark.usefixtures("_two_ranks")
def test_what_a_dead_rank_left_behind_is_removed() -> None:
    leftover = SHARED_MEMORY / f"{PREFIX}leftover-of-a-test"
    leftover.write_bytes(b"\0")
    VolumeCache(2, SHAPE, ["volumes"])
    assert not leftover.exists()
    VolumeCache(2, SHAPE, ["volumes"])


@pytest.mark.usefixtures("_two_ranks")
def test_without_room_in_shared_memory_each_rank_caches_for_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.cache.os.posix_fallocate", full)
    before = names()
    cache = VolumeCache(2, SHAPE, ["volumes"])
    cache.put(0, torch.ones(SHAPE), SPACING)
    assert cache.get(0) is not None
    assert names() == before
    assert "has no room for" in caplog.text


def test_a_cache_larger_than_the_memory_is_refused_with_what_fits() -> None:
    with pytest.raises(ConfigError, match=r"data\.cache_rate: caching 1000000 volumes needs .* GiB .* at most \d+"):
        VolumeCache(1_000_000, (1, 512, 512, 512), None)
