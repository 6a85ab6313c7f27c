"""Latents on disk: found again only for the same volume, weights and reading; whole or absent; batches by step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from data import BatchPlan, VolumeFile
from diffusion.conditioning import ConditionStore
from diffusion.conditioning.kind import Prepared
from diffusion.latent_batches import latent_batches
from diffusion.latent_files import LatentFacts, LatentFolder, latent_key
from settings import DataError
from tests.data.small_volumes import build_settings

SHAPE = (3, 2, 2, 2)
MEAN = torch.arange(24.0).view(SHAPE)
FACTS = LatentFacts((1.0, 2.0, 3.0), (0.0, -5.0), (100.0, 5.0))


def volumes(folder) -> list[VolumeFile]:
    return [VolumeFile(path, path.name, number % 2) for number, path in enumerate(sorted(folder.iterdir()))]


def test_a_latent_comes_back_with_its_facts(folder, tmp_path):
    store, file = LatentFolder(tmp_path / "latents", SHAPE), volumes(folder)[0]
    assert store.find(file) is None
    store.write(file, MEAN, FACTS)
    found = store.find(file)
    assert found is not None
    assert found[1] == FACTS
    assert torch.equal(found[0], MEAN)
    assert torch.equal(store.read(file), MEAN)
    assert [path.suffix for path in store.folder.iterdir()] == [".volume"]


def test_facts_come_back_from_their_numbers():
    assert FACTS.to_row() == [1.0, 2.0, 3.0, 0.0, -5.0, 100.0, 5.0]
    assert LatentFacts.from_row(FACTS.to_row()) == FACTS


def test_a_latent_is_found_by_the_content_of_its_volume(folder, tmp_path):
    store, file = LatentFolder(tmp_path / "latents", SHAPE), volumes(folder)[0]
    store.write(file, MEAN, FACTS)
    os.utime(file.path, ns=(1, 1))
    assert store.find(file) is not None
    moved = VolumeFile(file.path.rename(tmp_path / "moved.nii.gz"), "moved.nii.gz")
    assert store.find(moved) is not None
    content = bytearray(moved.path.read_bytes())
    content[-1] ^= 1
    moved.path.write_bytes(content)
    os.utime(moved.path, ns=(1, 1))
    assert store.find(moved) is None


def stored(folder, tmp_path) -> tuple[LatentFolder, list[VolumeFile]]:
    store, files = LatentFolder(tmp_path / "latents", SHAPE), volumes(folder)[:2]
    for number, file in enumerate(files):
        store.write(file, MEAN + number, FACTS)
    return store, files


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
def test_a_latent_that_is_not_the_one_written_is_never_read_and_is_encoded_again(folder, tmp_path, caplog, damage):
    store, files = stored(folder, tmp_path)
    damage(store.path_of(files[0]), store.path_of(files[1]))
    with pytest.raises(
        DataError,
        match=r"latents/\w+\.volume: the cached latent of v0\.nii\.gz cannot be used, it.*; run the same",
    ):
        store.read(files[0])
    assert store.find(files[0]) is None
    assert "; it is made again" in caplog.text
    assert store.find(files[1]) is not None


def test_a_latent_of_another_shape_is_not_used(folder, tmp_path):
    _, files = stored(folder, tmp_path)
    other = LatentFolder(tmp_path / "latents", (3, 2, 2, 1))
    assert other.find(files[0]) is None
    with pytest.raises(DataError, match="cannot be used, it holds something else"):
        other.read(files[0])


def test_a_folder_that_cannot_be_written_is_reported(folder, tmp_path):
    (tmp_path / "latents").write_text("in the way")
    with pytest.raises(DataError, match=r"v0\.nii\.gz could not be written"):
        LatentFolder(tmp_path / "latents", SHAPE).write(volumes(folder)[0], MEAN, FACTS)


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


def read(index: int, position: int) -> torch.Tensor:
    return torch.full((1, 2, 2, 2), float(index))


def test_step_n_sees_the_same_latents_whatever_the_batching_ranks_and_start():

    def indices(batch_size: int, accumulation: int, world_size: int, first: int = 0) -> list[list[float]]:
        plans = [BatchPlan(3, batch_size, accumulation, rank, world_size) for rank in range(world_size)]
        steps = [list(latent_batches(read, 8, plan, first, 6)) for plan in plans]
        together = zip(*steps, strict=True)
        return [sorted(float(m.flatten()[0]) for rank in step for b in rank for m in b.mean) for step in together]

    whole = indices(4, 1, 1)
    assert whole == indices(1, 4, 1) == indices(1, 2, 2) == indices(2, 1, 2)
    assert indices(4, 1, 1, first=3) == whole[3:]
    assert sorted(number for step in whole[:2] for number in step) == [float(n) for n in range(8)]


def test_a_batch_carries_positions_and_the_conditions_of_its_volumes():
    labels = torch.arange(8) % 2
    store = ConditionStore({"class_label": Prepared(lambda index, number, copy: labels[index])})
    [batch] = next(latent_batches(read, 8, BatchPlan(3, 4, 1), 2, 3, conditions=store))
    assert batch.positions == (8, 9, 10, 11)
    assert batch.mean.shape == (4, 1, 2, 2, 2)
    shown = [int(mean.flatten()[0]) for mean in batch.mean]
    assert batch.condition.parts["class_label"].tolist() == [index % 2 for index in shown]


def test_an_error_in_the_reading_thread_reaches_the_training_loop():
    def fail(index: int, position: int) -> torch.Tensor:
        raise DataError("v3.nii.gz: gone")

    with pytest.raises(DataError, match="gone"):
        next(latent_batches(fail, 8, BatchPlan(3, 4, 1), 0, 3))
