"""Prepared volumes equal the ones read anew, are complete after kills, and are noticed when they are damaged."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data import checking, prepare_volumes
from data.batches import BatchPlan, training_batches
from data.checking import PreparedFolder, VolumeFacts, measure
from data.formats import write_nifti
from data.header import Stored
from data.loading import load_file, load_volume
from settings import ConfigError, DataError, DataSettings, Settings
from tests.data.small_volumes import AFFINE, build_settings, random_voxels

WAYS: list[dict[str, Any]] = [
    {},
    {"spacing": [1.5, 1.5, 2.0]},
    {"voxel_size": [8, 8, 8]},
    {"resize": "crop_or_pad"},
    {"intensity": {"mode": "window", "lower": 0.0, "upper": 200.0}},
]


def files_of(settings) -> list[Path]:
    return sorted(PreparedFolder(settings).folder.glob("*.volume"))


@pytest.mark.parametrize("values", WAYS)
def test_prepared_volume_equals_the_one_that_is_read(folder, values):
    settings = build_settings(source=str(folder), **values)
    volumes = prepare_volumes(settings, seed=0, in_channels=1)
    for file in (*volumes.train, *volumes.val):
        kept, read = load_file(file, settings), load_volume(file.path, settings)
        assert torch.equal(kept.image, read.image)
        assert (kept.lower, kept.upper, kept.digest) == (read.lower, read.upper, read.digest)
        np.testing.assert_array_equal(kept.geometry.grid_affine, read.geometry.grid_affine)


def test_settings_that_change_the_result_have_a_place_of_their_own():
    places = [PreparedFolder(build_settings(**values)).folder for values in WAYS]
    assert len(set(places)) == len(WAYS)
    later = {"patch_size": [4, 4, 4], "use_augmentation": True, "num_workers": 3, "val_fraction": 0.5}
    assert PreparedFolder(build_settings(**later)).folder == places[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"",
        lambda content: b"{}\n" + content[3:],
        lambda content: content.replace(b'"affine": [[', b'"affine": [["x", ', 1)[: len(content)],
        lambda content: content.replace(b'"median": ', b'"median": 1', 1).replace(b" \n", b"\n", 1),
        lambda content: content.replace(b'"shape": [1, 12, 10, 8]', b'"shape": [1, 10, 12, 8]', 1),
        lambda content: content.replace(b'"place": "', b'"place": "f', 1),  # as where it is a copy of another
    ],
)
def test_damaged_prepared_file_is_noticed_at_the_next_start_and_prepared_anew(folder, caplog, damage):
    settings = build_settings(source=str(folder))
    prepare_volumes(settings, seed=0, in_channels=1)
    victim = files_of(settings)[2]
    content = victim.read_bytes()
    victim.write_bytes(damage(content))
    prepare_volumes(settings, seed=0, in_channels=1)
    assert victim.read_bytes() == content
    assert "it is made again" in caplog.text


@pytest.mark.timeout(20)
def test_a_pipe_or_a_missing_prepared_file_stops_the_run_with_an_error(folder):
    settings = build_settings(source=str(folder))
    volumes = prepare_volumes(settings, seed=0, in_channels=1)
    steps = training_batches(volumes.train, settings, BatchPlan(0, 1, 1), 0, 100)
    for path in files_of(settings):
        path.unlink()
        os.mkfifo(path)
    with pytest.raises(DataError, match=r"prepared volume of v\d\.nii\.gz cannot be used, it cannot be read"):
        list(steps)
    for path in files_of(settings):
        path.unlink()
    with pytest.raises(DataError, match=r"cannot be used, it is missing; run the same command again"):
        load_file(volumes.val[0], settings)


def test_equal_and_moved_files_are_prepared_once(folder):
    shutil.copy(folder / "v0.nii.gz", folder / "copy.nii.gz")
    settings = build_settings(source=str(folder))
    prepare_volumes(settings, seed=0, in_channels=1)
    times = [path.stat().st_mtime_ns for path in files_of(settings)]
    assert len(times) == 8
    prepare_volumes(build_settings(source=str(folder.rename(folder.with_name("moved")))), seed=0, in_channels=1)
    assert [path.stat().st_mtime_ns for path in files_of(settings)] == times


def start_preparing(folder: Path, slow: float) -> BaseProcess:
    """Prepare in a process of its own, which notes each volume that it reads; forked, because imports take seconds."""

    def prepare() -> None:
        def counted(path: Path, s: DataSettings) -> tuple[Stored, VolumeFacts]:
            time.sleep(slow)
            with open("read.txt", "a") as file:
                file.write(f"{path.name}\n")
            return measure(path, s)

        # Forked processes share the lock of tqdm, and a killed one would leave it locked.
        vars(checking).update(measure=counted, ProgressBar=lambda items, **_: items)
        prepare_volumes(build_settings(source=str(folder)), 0, 1)

    process = multiprocessing.get_context("fork").Process(target=prepare)
    process.start()
    return process


@pytest.mark.timeout(300)
def test_preparation_killed_ten_times_continues_where_it_stopped(folder, tmp_path):
    for i in range(8, 26):
        write_nifti(folder / f"v{i}.nii.gz", random_voxels(i), AFFINE)
    settings = build_settings(source=str(folder))
    for kill in range(10):
        process = start_preparing(folder, 0.05)
        deadline = time.monotonic() + 60
        while len(files_of(settings)) < 2 * (kill + 1) and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.join()
    assert 20 <= len(files_of(settings)) <= 26
    volumes = prepare_volumes(settings, seed=0, in_channels=1)
    assert len(files_of(settings)) == 26
    for file in (*volumes.train, *volumes.val):
        assert torch.equal(load_file(file, settings).image, load_volume(file.path, settings).image)
    # Besides what was under way when it was killed, nothing is read twice.
    assert len((tmp_path / "read.txt").read_text().splitlines()) <= 26 + 10 * len(os.sched_getaffinity(0))


@pytest.mark.timeout(120)
def test_two_processes_prepare_each_volume_once(folder, tmp_path):
    processes = [start_preparing(folder, 0.02) for _ in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted((tmp_path / "read.txt").read_text().split()) == [f"v{i}.nii.gz" for i in range(8)]


def test_a_cache_rate_above_zero_means_memory_and_nothing_else():
    for rate, meaning in ((0, "disk"), (0.0, "disk"), (0.5, "memory"), (1, "memory")):
        assert Settings.model_validate({"data": {"cache_rate": rate}}).data.prepared == meaning
    with pytest.raises(ConfigError, match=r"data.cache_rate: 1 with prepared: none; allowed: 0; set 0, or prepared: m"):
        Settings.model_validate({"data": {"cache_rate": 1.0, "prepared": "none"}})
    with pytest.raises(ValueError, match="cache_rate"):
        Settings.model_validate({"data": {"cache_rate": 7}})
