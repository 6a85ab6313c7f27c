"""Problems are found before training, all at once; volumes are prepared once, whatever happens; the split is stable."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import data
from data import checking
from data.batches import BatchPlan, training_batches
from data.checking import PreparedFolder, VolumeFacts, measure
from data.discovery import DiscoveredVolume
from data.formats import write_nifti
from data.header import Stored
from data.loading import load_file, load_volume
from data.volumes import check_source, prepare_volumes, split
from settings import DataError, DataSettings
from tests.data.small_volumes import AFFINE, build_settings, discovered, random_voxels

ROOT = Path(data.__file__).parent.parent


def test_every_problem_of_every_file_is_in_one_report(make_volume, tmp_path):
    make_volume("good.nii.gz")
    truncated = make_volume("truncated.nii.gz")
    truncated.write_bytes(truncated.read_bytes()[:1500])
    nan = random_voxels(0)
    nan[0, 3, 3, 3] = np.nan
    nan[0, 4, 4, 4] = np.inf
    make_volume("nan.nii.gz", nan)
    make_volume("slice.nii.gz", random_voxels(0, (1, 12, 10, 1)))
    make_volume("channels.nii.gz", random_voxels(0, (2, 12, 10, 8)))
    make_volume("text.nii.gz").write_text("this is a text file\n")
    make_volume("flat.nii.gz", np.full((1, 12, 10, 8), 7, np.float32))
    with pytest.raises(DataError) as refusal:
        prepare_volumes(build_settings(source=str(tmp_path / "volumes")), seed=0, in_channels=1)
    lines = str(refusal.value).splitlines()
    assert lines[0].endswith("has 6 problems:")
    problems = {line.split(": ")[0].rsplit("/", 1)[1]: line.split(": ", 1)[1] for line in lines[1:]}
    assert problems["truncated.nii.gz"].startswith("cannot be read as .nii.gz (")
    assert problems["nan.nii.gz"].startswith("2 voxels are NaN or infinite")
    assert problems["slice.nii.gz"].startswith("12 x 10 x 1 voxels")
    assert problems["channels.nii.gz"].startswith("2 channels (12 x 10 x 8 x 2); autoencoder.in_channels is 1; change")
    assert problems["text.nii.gz"].startswith("cannot be read as .nii.gz")
    assert problems["flat.nii.gz"].startswith("channel 0 is 7 at both the 0.5th and the 99.5th percentile")


def test_window_scaling_allows_flat_volumes_inside_and_refuses_all_outside(make_volume, tmp_path):
    for name in ("flat.nii.gz", "level.nii.gz", "plane.nii.gz"):
        make_volume(name, np.full((1, 12, 10, 8), 7, np.float32))
    source = str(tmp_path / "volumes")
    inside = {"mode": "window", "lower": 0.0, "upper": 10.0}
    prepare_volumes(build_settings(source=source, intensity=inside), seed=0, in_channels=1)
    outside = {"mode": "window", "lower": 10.0, "upper": 20.0}
    with pytest.raises(DataError, match="intensities 7 to 7 lie outside the window 10 to 20"):
        prepare_volumes(build_settings(source=source, intensity=outside), seed=0, in_channels=1)


def test_a_spacing_that_the_file_lacks_or_that_makes_it_enormous_is_refused(folder, tmp_path):
    np.save(tmp_path / "v.npy", random_voxels(0)[0])
    with pytest.raises(DataError, match=r"v\.npy: numpy arrays carry no voxel spacing, and data\.spacing is set"):
        prepare_volumes(build_settings(source=str(tmp_path), spacing=[1.0, 1.0, 1.0]), seed=0, in_channels=1)
    settings = build_settings(source=str(folder), spacing=[1e-4, 1e-4, 1e-4])
    with pytest.raises(DataError, match=r"data\.spacing makes it .* voxels, .* GiB; .* choose a larger spacing"):
        prepare_volumes(settings, seed=0, in_channels=1)


def test_only_new_and_changed_files_are_read_again(folder, make_volume, monkeypatch):
    settings = build_settings(source=str(folder))
    read: list[str] = []
    measure = checking.measure

    def noted(path: Path, s: DataSettings) -> tuple[Stored, checking.VolumeFacts]:
        read.append(path.name)
        return measure(path, s)

    monkeypatch.setattr(checking, "measure", noted)
    first = prepare_volumes(settings, seed=0, in_channels=1)
    assert len(read) == 8
    read.clear()
    assert prepare_volumes(settings, seed=0, in_channels=1) == first
    assert read == []
    make_volume("v3.nii.gz", random_voxels(99))
    content = make_volume("new.nii.gz").read_bytes()
    (folder / "new.nii.gz").write_bytes(content[:1000])
    with pytest.raises(DataError, match=r"new\.nii\.gz: cannot be read"):
        prepare_volumes(settings, seed=0, in_channels=1)
    (folder / "new.nii.gz").write_bytes(content)
    prepare_volumes(settings, seed=0, in_channels=1)
    assert sorted(read) == ["new.nii.gz", "new.nii.gz", "v3.nii.gz"], "a problem is not remembered"


def test_damaged_results_of_earlier_checks_are_ignored(folder):
    settings = build_settings(source=str(folder))
    first = prepare_volumes(settings, seed=0, in_channels=1)
    for content in ("", "[]", "{}", '["a", 1]', '["a", {"affine": 3}]', "\0", "[" * 100_000):
        for store in Path("runs/checks").glob("*.jsonl"):
            store.write_text(content)
        assert prepare_volumes(settings, seed=0, in_channels=1) == first


def test_volumes_are_checked_even_if_results_cannot_be_kept(folder, tmp_path):
    (tmp_path / "runs").write_text("a file where the folder should be")
    volumes = prepare_volumes(build_settings(source=str(folder), prepared="none"), seed=0, in_channels=1)
    assert len(volumes.train) == 6
    with pytest.raises(DataError, match=r"data\.prepared|cannot be written .* set data\.prepared to memory or none"):
        prepare_volumes(build_settings(source=str(folder)), 0, 1)


def test_a_volume_that_is_added_or_removed_moves_at_most_one_other():
    s = build_settings(val_fraction=0.2)
    volumes = discovered(*(f"v{i}" for i in range(120)))
    held_out = [{*split(volumes[:number], s, seed=1)[1]} for number in range(60, 121)]
    assert all(len(before ^ after) <= 2 for before, after in pairwise(held_out))
    assert held_out[-1] != {*split(volumes, s, seed=2)[1]}


@pytest.mark.parametrize(
    ("number", "val_fraction", "held_out"),
    [(102, 0.1, 10), (11, 0.2, 2), (48, 0.1, 5), (25, 0.1, 3), (3, 0.001, 2), (7, 0.999, 6), (7, 0.001, 2)],
)
def test_held_out_is_the_nearest_number_and_at_least_two(number, val_fraction, held_out):
    for seed in range(3):
        train, val = split(
            discovered(*(f"v{i}" for i in range(number))), build_settings(val_fraction=val_fraction), seed
        )
        assert (len(train), len(val)) == (number - held_out, held_out)


def test_too_few_volumes_to_train_and_evaluate_are_refused():
    for number, text in ((1, "1 volume, 1 to train on and 0"), (2, "2 volumes, 1 to train on and 1")):
        with pytest.raises(DataError, match=rf"has {text} held out; at least 1 and 2 are needed; add volumes"):
            split(discovered(*"ab"[:number]), build_settings(), 0)
    volumes = [DiscoveredVolume(Path(f"v{i}"), f"v{i}", split="validation" if i == 0 else "training") for i in range(4)]
    with pytest.raises(DataError, match=r'3 to train on and 1 held out; .* change its lists "training" and'):
        split(volumes, build_settings(), 0)


def test_the_fingerprint_follows_names_labels_and_split(folder):
    settings = build_settings(source=str(folder))
    first = prepare_volumes(settings, seed=0, in_channels=1).fingerprint
    assert prepare_volumes(settings, seed=0, in_channels=1).fingerprint == first
    (folder / "v0.nii.gz").rename(folder / "w0.nii.gz")
    assert prepare_volumes(settings, seed=0, in_channels=1).fingerprint != first


def test_volumes_are_found_and_checked_without_torch():
    script = "import sys; sys.modules['torch'] = None; from data import prepare_volumes; import data.formats"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_volumes_with_the_same_bytes_are_reported(folder, caplog):
    settings = build_settings(source=str(folder))
    prepare_volumes(settings, seed=0, in_channels=1)
    assert "same bytes" not in caplog.text
    (folder / "w.nii.gz").write_bytes((folder / "v3.nii.gz").read_bytes())
    prepare_volumes(settings, seed=0, in_channels=1)
    assert "1 volume of 9 hold the same bytes as another, for example v3.nii.gz and w.nii.gz" in caplog.text


@pytest.mark.parametrize(
    ("voxels", "intensity"),
    [
        (np.linspace(-3e38, 3e38, 960), {}),
        (np.linspace(0, 1e-39, 960), {}),
        (np.linspace(1e8, 1e8 + 100, 960), {}),
        (np.arange(960) + 10**8, {"mode": "window", "lower": 1e8, "upper": 1e8 + 300}),
        (np.linspace(0, 1, 960), {"mode": "window", "lower": -1e39, "upper": 1e39}),
    ],
)
def test_a_range_that_float32_cannot_scale_is_named(tmp_path, voxels, intensity):
    np.save(tmp_path / "v.npy", voxels.reshape(12, 10, 8))
    np.save(tmp_path / "w.npy", np.linspace(1e6, 1e6 + 100, 960).reshape(12, 10, 8))
    source = check_source(build_settings(source=str(tmp_path), intensity=intensity), 0, 1)
    assert re.search(
        r"channel 0 is scaled from .*, a range that float32 cannot resolve; change", source.problems[0].text
    )
    assert len(source.problems) == (2 if intensity else 1)


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
def test_preparation_killed_five_times_continues_where_it_stopped(folder, tmp_path):
    for i in range(8, 26):
        write_nifti(folder / f"v{i}.nii.gz", random_voxels(i), AFFINE)
    settings = build_settings(source=str(folder))
    for kill in range(5):
        process = start_preparing(folder, 0.05)
        deadline = time.monotonic() + 60
        while len(files_of(settings)) < 2 * (kill + 1) and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.join()
    assert 10 <= len(files_of(settings)) <= 26
    volumes = prepare_volumes(settings, seed=0, in_channels=1)
    assert len(files_of(settings)) == 26
    for file in (*volumes.train, *volumes.val):
        assert torch.equal(load_file(file, settings).image, load_volume(file.path, settings).image)
    # Besides what was under way when it was killed, nothing is read twice.
    assert len((tmp_path / "read.txt").read_text().splitlines()) <= 26 + 5 * len(os.sched_getaffinity(0))


@pytest.mark.timeout(120)
def test_two_processes_prepare_each_volume_once(folder, tmp_path):
    processes = [start_preparing(folder, 0.02) for _ in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted((tmp_path / "read.txt").read_text().split()) == [f"v{i}.nii.gz" for i in range(8)]
