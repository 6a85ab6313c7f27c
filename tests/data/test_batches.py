"""What a step sees is a function of (seed, step), whatever loads it; errors name their file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

from data import DataSplit, prepare_volumes
from data.batches import Batch, BatchPlan, ValidationBatches, VolumeOrder, one_ahead, training_batches
from data.loading import load_volume
from settings import ConfigError, DataError, DataSettings
from tests.data.small_volumes import build_settings

PATCHES = {"patch_size": [8, 8, 4], "use_augmentation": True}


def prepared(folder: Path, **values: object) -> tuple[DataSplit, DataSettings]:
    settings = build_settings(source=str(folder), **values)
    return prepare_volumes(settings, seed=3, in_channels=1), settings


def batches_of(
    volumes: DataSplit, settings: DataSettings, plan: BatchPlan, first: int = 0, last: int = 6
) -> list[Batch]:
    return [batch for step in training_batches(volumes.train, settings, plan, first, last) for batch in step]


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


def assert_equal(first: list[Batch], second: list[Batch]) -> None:
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        assert (a.positions, a.files) == (b.positions, b.files)
        assert torch.equal(a.image, b.image)


def test_a_step_yields_its_micro_batches_with_the_volumes_that_they_name(folder):
    volumes, settings = prepared(folder)
    steps = list(training_batches(volumes.train, settings, BatchPlan(0, 2, 3), 0, 4))
    assert [len(step) for step in steps] == [3] * 4
    batch = steps[1][2]
    assert batch.image.shape == (2, 1, 12, 10, 8)
    assert batch.image.dtype == torch.float32
    assert batch.image.is_contiguous()
    assert batch.positions == (10, 11)
    assert batch.to("cpu").positions == batch.positions
    for image, name in zip(batch.image, batch.files, strict=True):
        assert torch.equal(image, load_volume(folder / name, settings).image)


def test_each_pass_sees_every_volume_once_in_another_order():
    order = VolumeOrder(seed=1, number=13)
    passes = [[order(k) for k in range(13 * n, 13 * (n + 1))] for n in range(3)]
    assert all(sorted(seen) == list(range(13)) for seen in passes)
    assert passes[0] != passes[1] != passes[2]
    assert [VolumeOrder(1, 13)(k) for k in (30, 2, 30)] == [order(30), order(2), order(30)]
    assert passes[0] != [VolumeOrder(2, 13)(k) for k in range(13)]


@pytest.mark.parametrize(
    ("num_workers", "values"),
    [(1, {}), (2, {"prepared": "memory"}), (2, {"prepared": "none", "persistent_workers": True})],
)
def test_batches_do_not_depend_on_workers_or_preparation(folder, values, num_workers):
    volumes, settings = prepared(folder, **PATCHES)
    plan = BatchPlan(5, 2, 2)
    plain = batches_of(volumes, settings, plan)
    changed = settings.model_copy(update={"num_workers": num_workers, **values})
    assert_equal(batches_of(volumes, changed, plan), plain)


def test_starting_later_continues_the_same_sequence(folder):
    volumes, settings = prepared(folder, **PATCHES)
    plan = BatchPlan(5, 2, 2)
    whole = list(training_batches(volumes.train, settings, plan, 0, 9))
    assert_equal(batches_of(volumes, settings, plan, 6, 9), [b for step in whole[6:] for b in step])
    assert list(training_batches(volumes.train, settings, plan, 9, 9)) == []


def test_samples_differ_between_passes_and_seeds(folder):
    volumes, settings = prepared(folder, **PATCHES)
    batches = batches_of(volumes, settings, BatchPlan(5, 1, 1), 0, 24)
    crops: dict[str, list[torch.Tensor]] = {}
    for batch in batches:
        crops.setdefault(batch.files[0], []).append(batch.image)
    assert all(len(images) == 4 for images in crops.values())
    assert all(not torch.equal(images[0], images[1]) for images in crops.values())
    other = batches_of(volumes, settings, BatchPlan(6, 1, 1), 0, 28)
    assert [b.files for b in other] != [b.files for b in batches]


@pytest.mark.parametrize(("ranks", "accumulation", "batch_size"), [(2, 2, 1), (4, 1, 1), (2, 1, 2), (1, 1, 4)])
def test_ranks_see_what_one_rank_sees_with_more_accumulation(folder, ranks, accumulation, batch_size):
    volumes, settings = prepared(folder, **PATCHES)
    alone = list(training_batches(volumes.train, settings, BatchPlan(5, 1, 4), 0, 5))
    plans = [BatchPlan(5, batch_size, accumulation, rank, ranks) for rank in range(ranks)]
    assert {plan.effective_batch for plan in plans} == {4}
    together = [list(training_batches(volumes.train, settings, plan, 0, 5)) for plan in plans]
    for step, expected in enumerate(alone):
        images = {
            position: (image, name)
            for rank in together
            for batch in rank[step]
            for position, image, name in zip(batch.positions, batch.image, batch.files, strict=True)
        }
        assert sorted(images) == [position for batch in expected for position in batch.positions]
        for batch in expected:
            image, name = images[batch.positions[0]]
            assert name == batch.files[0]
            assert torch.equal(image, batch.image[0])


@pytest.mark.parametrize("values", [{}, {"prepared": "memory"}, {"num_workers": 2, "persistent_workers": True}])
def test_validation_sees_whole_volumes_in_a_fixed_order_as_often_as_asked(folder, values):
    volumes, settings = prepared(folder, **{**PATCHES, **values})
    batches = ValidationBatches(volumes.train, settings)
    first, second = list(batches), list(batches)
    assert_equal(first, second)
    assert len(batches) == len(first) == len(volumes.train)
    assert [batch.files[0] for batch in first] == [file.name for file in volumes.train]
    assert all(batch.image.shape == (1, 1, 12, 10, 8) for batch in first)


def test_validation_is_shared_among_ranks(folder):
    volumes, settings = prepared(folder)
    shares = [list(ValidationBatches(volumes.train, settings, rank, 3)) for rank in range(3)]
    places = sorted(batch.positions[0] for share in shares for batch in share)
    assert places == list(range(len(volumes.train)))
    assert len(ValidationBatches(volumes.val[:1], settings, 2, 3)) == 0
    assert list(ValidationBatches(volumes.val[:1], settings, 2, 3)) == []


@pytest.mark.parametrize("kept", ["disk", "memory"])
def test_changing_a_batch_does_not_change_the_kept_volume(folder, kept):
    volumes, settings = prepared(folder, prepared=kept)
    files = volumes.train[:1]
    steps = training_batches(files, settings, BatchPlan(0, 1, 1), 0, 3)
    images = []
    for (batch,) in steps:
        images.append(batch.image.clone())
        batch.image.zero_()
    assert torch.equal(images[0], images[2])
    assert images[2].abs().max() > 0


def test_volumes_kept_in_memory_are_read_once_and_refused_when_they_are_too_large(folder):
    volumes, settings = prepared(folder, prepared="memory", num_workers=2)
    steps = training_batches(volumes.train, settings, BatchPlan(0, 1, 1), 0, 60)
    for file in volumes.train:
        file.path.unlink()
    assert len(list(steps)) == 60
    large = settings.model_copy(update={"voxel_size": (40_000, 40_000, 40_000)})
    with pytest.raises(ConfigError, match=r"data\.prepared: memory: 6 volumes need .* at most 0 volumes fit"):
        training_batches(volumes.train, large, BatchPlan(0, 1, 1), 0, 60)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_that_disappears_stops_training_and_is_named(folder, num_workers):
    volumes, settings = prepared(folder, prepared="none", num_workers=num_workers)
    before = children()
    steps = training_batches(volumes.train, settings, BatchPlan(0, 1, 1), 0, 100)
    next(steps)
    volumes.train[2].path.unlink()
    with pytest.raises(DataError) as refusal:
        list(steps)
    assert str(refusal.value).startswith(f"{volumes.train[2].path}: no such file")
    assert "Traceback" not in str(refusal.value)
    assert children() <= before


def test_an_error_of_the_system_while_workers_live_is_not_called_a_dead_worker(folder, monkeypatch):
    volumes, settings = prepared(folder, num_workers=1)

    def fail(*_: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr("data.batches.load_file", fail)
    with pytest.raises(OSError, match="too many open files"):
        next(training_batches(volumes.train, settings, BatchPlan(0, 1, 1), 0, 9))


def test_workers_outlive_the_signals_that_ask_training_to_stop(folder):
    volumes, settings = prepared(folder, num_workers=1)
    before = children()
    steps = training_batches(volumes.train, settings, BatchPlan(0, 1, 1), 0, 50)
    next(steps)
    (worker,) = children() - before
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(worker, number)
    assert len(list(steps)) == 49


def test_a_process_with_live_workers_can_exit(folder):
    code = f"""
from data import prepare_volumes
from data.batches import BatchPlan, training_batches
from settings import DataSettings
settings = DataSettings.model_validate(
    dict(source={str(folder)!r}, voxel_size=[12, 10, 8], num_workers=2, persistent_workers=True)
)
steps = training_batches(prepare_volumes(settings, 0, 1).train, settings, BatchPlan(0, 1, 1), 0, 1000)
next(steps)
import builtins
builtins.kept = steps
raise SystemExit(5)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert result.returncode == 5


def test_items_ahead_come_in_order_the_next_is_made_during_the_current_and_stopping_early_ends_the_thread():
    before = threading.active_count()
    made = [threading.Event() for _ in range(4)]

    def numbers():
        for number, event in enumerate(made):
            event.set()
            yield number

    items = one_ahead(numbers())
    assert not made[0].is_set()
    for number in range(4):
        assert next(items) == number
        assert number == 3 or made[number + 1].wait(timeout=60)
    assert next(items, "end") == "end"
    items = one_ahead(iter(range(9)))
    next(items)
    items.close()
    assert threading.active_count() == before
