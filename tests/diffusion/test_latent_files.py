"""Latents on disk: found again only for the same volume, weights and reading; whole or absent; batches by step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from data import VolumeFile
from data.batches import BatchPlan
from diffusion.conditioning import ConditionStore
from diffusion.conditioning.kind import Prepared
from diffusion.latent_files import TensorCache, latent_key, latent_name
from diffusion.latents import LatentBatch
from settings import DataError
from tests.data.small_volumes import build_settings
from tests.diffusion.made_latents import latents_of

SHAPE = (3, 2, 2, 2)
MEAN = torch.arange(24.0).view(SHAPE)
FACTS = [1.0, 2.0, 100.0]


@pytest.fixture
def cache(tmp_path) -> TensorCache:
    """Two latents on disk."""
    found = TensorCache(tmp_path / "latents", SHAPE)
    for number, name in enumerate("ab"):
        found.write(name, "latent of v0.nii.gz", MEAN + number, FACTS)
    return found


def test_a_latent_comes_back_with_its_facts_in_its_shape(cache):
    found = cache.find("b")
    assert found is not None
    assert found[1] == FACTS
    assert torch.equal(found[0], MEAN + 1)
    assert torch.equal(cache.read("b", ""), MEAN + 1)
    assert cache.find("c") is None
    other = TensorCache(cache.arrays.folder, (3, 2, 2, 1))
    assert other.find("a") is None
    with pytest.raises(DataError, match="cannot be used, it holds something else"):
        other.read("a", "latent")
    (cache.arrays.folder.parent / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"v0\.nii\.gz could not be written"):
        TensorCache(cache.arrays.folder.parent / "file", SHAPE).write("a", "latent of v0.nii.gz", MEAN)


def test_a_latent_has_the_name_of_the_content_of_its_volume(folder, tmp_path):
    first, second = (VolumeFile(path, path.name) for path in sorted(folder.iterdir())[:2])
    name = latent_name(first, 0, True)
    assert len({name, latent_name(second, 0, True), latent_name(first, 1, True)}) == 3
    os.utime(first.path, ns=(1, 1))
    moved = VolumeFile(first.path.rename(tmp_path / "moved.nii.gz"), "moved.nii.gz")
    assert latent_name(moved, 0, True) == name
    content = bytearray(moved.path.read_bytes())
    content[-1] ^= 1
    moved.path.write_bytes(content)
    assert latent_name(moved, 0, True) != name


def truncate(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def change_a_value(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def change_a_fact(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"100.0", b"101.0"))


def swap(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [truncate, change_a_value, change_a_fact, swap])
def test_a_latent_that_is_not_the_one_written_is_never_read_and_is_made_again(cache, caplog, damage):
    damage(cache.arrays.path_of("a"), cache.arrays.path_of("b"))
    text = r"latents/a\.volume: the cached latent of v0\.nii\.gz cannot be used, it.*; run the same"
    with pytest.raises(DataError, match=text):
        cache.read("a", "latent of v0.nii.gz")
    assert cache.find("a") is None
    assert "; it is made again" in caplog.text
    assert cache.find("b") is not None


def test_the_key_follows_weights_precision_and_reading_and_nothing_else():
    key = latent_key(build_settings(), "weights", "float32")
    assert key == latent_key(build_settings(prepared="memory", num_workers=3, val_fraction=0.5), "weights", "float32")
    others = [
        latent_key(build_settings(), "other weights", "float32"),
        latent_key(build_settings(), "weights", "bfloat16"),
        latent_key(build_settings(voxel_size=[12, 10, 16]), "weights", "float32"),
        latent_key(build_settings(intensity={"mode": "window", "lower": 0, "upper": 300}), "weights", "float32"),
        latent_key(build_settings(spacing=[1.0, 1.0, 1.0]), "weights", "float32"),
    ]
    assert len({key, *others}) == len(others) + 1


def read(index: int, copy: int) -> torch.Tensor:
    return torch.full((1, 2, 2, 2), float(index))


def test_step_n_sees_the_same_latents_whatever_the_batching_ranks_and_start():

    def indices(batch_size: int, accumulation: int, world_size: int, first: int = 0) -> list[list[float]]:
        plans = [BatchPlan(3, batch_size, accumulation, rank, world_size) for rank in range(world_size)]
        steps = [list(latents_of(read, 8).training_batches(plan, first, 6)) for plan in plans]
        together = zip(*steps, strict=True)
        return [sorted(float(m.flatten()[0]) for rank in step for b in rank for m in b.mean) for step in together]

    whole = indices(4, 1, 1)
    assert whole == indices(1, 4, 1) == indices(1, 2, 2) == indices(2, 1, 2)
    assert indices(4, 1, 1, first=3) == whole[3:]
    assert sorted(number for step in whole[:2] for number in step) == [float(n) for n in range(8)]


def test_a_batch_carries_positions_and_the_conditions_of_its_volumes():
    labels = torch.arange(8) % 2
    store = ConditionStore({"class_label": Prepared(lambda index, number, copy: labels[index])})
    [batch] = next(iter(latents_of(read, 8, conditions=store).training_batches(BatchPlan(3, 4, 1), 2, 3)))
    assert isinstance(batch, LatentBatch)
    assert batch.positions == (8, 9, 10, 11)
    assert batch.mean.shape == (4, 1, 2, 2, 2)
    shown = [int(mean.flatten()[0]) for mean in batch.mean]
    assert batch.condition.parts["class_label"].tolist() == [index % 2 for index in shown]


def test_an_error_in_the_reading_thread_reaches_the_training_loop():
    def fail(index: int, copy: int) -> torch.Tensor:
        raise DataError("v3.nii.gz: gone")

    with pytest.raises(DataError, match="gone"):
        next(iter(latents_of(fail, 8).training_batches(BatchPlan(3, 4, 1), 0, 3)))
