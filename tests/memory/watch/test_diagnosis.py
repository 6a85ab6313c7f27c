"""Running out of memory is recognised, reported with the next rung, and can be survived."""

import errno
import json
import logging
import re
from dataclasses import replace

import psutil
import pytest
import torch

from memory.kernels.gpus import chosen_gpu
from memory.predict.prediction import GIB
from memory.watch.memory_watch import (
    REPORT,
    MemoryReadings,
    MemoryWatch,
    TrainingOutOfMemoryError,
    device_bytes,
    is_out_of_memory,
    is_tiny,
    train_with_rungs,
)
from runtime.cli import OUT_OF_MEMORY
from runtime.observer import phase
from runtime.processes import Process
from settings import Settings, load_settings
from tests.conftest import ROOT
from tests.memory.ladder.test_walk import BLANK

CPU = torch.device("cpu")
HIGH_RES = load_settings(ROOT / "configs" / "high_res.yaml")
TRAINING = "autoencoder.training"
ALLOCATOR = "[enforce fail at alloc_cpu.cpp:125] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError(ALLOCATOR), True),
        (RuntimeError("std::bad_alloc"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
    ids=str,
)
def test_out_of_memory_is_distinguished_from_other_errors(error, expected):
    assert is_out_of_memory(error) is expected


def failed(folder, settings, prediction, error, step, saved, failing):
    """Return what is raised when a run ends with an error in a phase."""
    with MemoryWatch(settings.with_overrides({"data.voxel_size": (16, 16, 16)}), "autoencoder", Process(CPU)) as watch:
        watch.settings, watch.prediction = settings, prediction
        with pytest.raises(TrainingOutOfMemoryError) as raised, watch.guard(folder, step, saved=saved), phase(failing):
            raise error
    return raised.value, json.loads((folder / REPORT).read_text())


def test_report_holds_phase_step_breakdown_and_the_next_rung_as_a_diff(tmp_path):
    settings = HIGH_RES.with_overrides({f"{TRAINING}.batch_size": 2})
    stop, report = failed(tmp_path, settings, BLANK, RuntimeError(ALLOCATOR), 41, 40, "generator backward")
    assert (report["phase"], report["step"], report["stage"]) == ("generator backward", 41, "autoencoder")
    assert report["next_rung"]["name"] == "micro-batch 1"
    assert report["next_rung"]["promise"] == "same mathematics"
    assert report["next_rung"]["changes"] == {f"{TRAINING}.batch_size": 1, f"{TRAINING}.gradient_accumulation_steps": 8}
    assert "batch_size: 1" in report["next_rung"]["yaml_diff"]
    assert report["largest"][0]["module"] == "autoencoder.decoder.blocks.12"
    assert "host_memory_gib" in report["readings"]
    assert stop.exit_code == OUT_OF_MEMORY == 3
    assert "step 42, generator backward: out of memory; the last checkpoint is good (step 40)" in str(stop)
    for part in ("micro-batch 1", "--on-oom next-rung"):
        assert part in str(stop)


def test_report_without_prediction_and_without_rung_says_so(tmp_path):
    knobs = {"use_gradient_checkpointing_offload": True, "use_nested_checkpointing": False, "slab_rows": 16}
    knobs["offload_levels"] = HIGH_RES.autoencoder.most_offload_levels
    settings = HIGH_RES.with_overrides({f"{TRAINING}.{name}": value for name, value in knobs.items()})
    stop, report = failed(tmp_path, settings, None, MemoryError(), 0, 0, "optimizer")
    assert report["next_rung"] is None
    assert "out of memory; there is no checkpoint yet" in str(stop)
    assert "no rung with the same mathematics is left" in str(stop)


def test_guard_names_the_activity_and_passes_other_errors_on(tmp_path):
    settings = HIGH_RES.with_overrides({"data.voxel_size": (16, 16, 16)})
    assert is_tiny(settings, "autoencoder")
    with MemoryWatch(settings, "autoencoder", Process(CPU)) as watch:
        named = pytest.raises(TrainingOutOfMemoryError, match="encoding the latents: out of memory")
        with named, watch.guard(tmp_path, 0, "encoding the latents"):
            torch.empty(1 << 60, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="shapes"), watch.guard(tmp_path, 4):
            torch.zeros(2, 3) @ torch.zeros(2, 3)


def test_next_rung_is_taken_until_training_fits(caplog):
    seen = []

    def train(settings):
        seen.append(settings.autoencoder.training)
        if not settings.autoencoder.training.slab_rows:
            raise TrainingOutOfMemoryError("it does not fit", saved=len(seen) - 1)
        return 0

    with caplog.at_level(logging.WARNING):
        assert train_with_rungs(train, HIGH_RES, "autoencoder", "next-rung") == 0
    assert [(t.nests_checkpoints, t.slab_rows) for t in seen] == [(False, 0), (True, 0), (True, 32)]
    assert "there is no checkpoint yet; starting again with nested checkpointing" in caplog.text
    assert "resuming from the checkpoint of step 1 with slabs of 32 rows" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU block inputs can move to the host")
def test_training_stops_without_next_rung_or_when_none_is_left_and_a_cpu_offloads_nothing():
    seen = []

    def train(settings):
        seen.append(settings)
        raise TrainingOutOfMemoryError("it does not fit")

    settings = Settings().with_overrides({f"{TRAINING}.use_gradient_checkpointing": True})
    for on_oom in ("stop", "next-rung"):
        with pytest.raises(TrainingOutOfMemoryError):
            train_with_rungs(train, settings, "autoencoder", on_oom)
    assert seen[:2] == [settings, settings]
    assert {settings.device.type for settings in seen} == {"auto"}
    assert not any(settings.autoencoder.training.use_gradient_checkpointing_offload for settings in seen)
    assert seen[-1].autoencoder.training.slab_rows == 16


def test_announcement_warns_with_the_next_rung_when_it_will_not_fit(caplog, monkeypatch):
    settings = HIGH_RES.with_overrides({"data.voxel_size": (64, 64, 64), f"{TRAINING}.batch_size": 2})
    assert not is_tiny(settings, "autoencoder")
    predicted = replace(BLANK, context_bytes=0, peak_allocated_bytes=GIB, peak_reserved_bytes=GIB)
    monkeypatch.setattr("memory.watch.memory_watch.device_bytes", lambda device: 1 << 20)
    monkeypatch.setattr("memory.watch.memory_watch.PendingPrediction.result", lambda *_: predicted)
    with caplog.at_level(logging.INFO), MemoryWatch(settings, "autoencoder", Process(CPU)) as watch:
        watch.announce()
    assert watch.prediction == predicted
    assert re.search(r"memory: predicted peak [\d.]+ GiB of 0\.00 GiB \(in ", caplog.text)
    assert "Time on a CPU: not known before training has measured its first steps." in caplog.text
    assert f"next rung: micro-batch 1 ({TRAINING}.batch_size=1" in caplog.text


def test_on_a_cpu_python_itself_must_fit_too(caplog):
    prediction = replace(BLANK, context_bytes=0, peak_allocated_bytes=GIB, peak_reserved_bytes=GIB)
    watch = MemoryWatch(HIGH_RES.with_overrides({"data.voxel_size": (16, 16, 16)}), "autoencoder", Process(CPU))
    resident = psutil.Process().memory_info().rss
    needed = prediction.needed_bytes(1)
    for available, is_enough in ((needed + resident // 2, False), (needed + 2 * resident, True)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            watch._announce(prediction, chosen_gpu(None), available=available)
        assert ("this will probably not fit" not in caplog.text) == is_enough
        assert "GiB of it Python and its libraries" in caplog.text


def test_readings_see_an_allocation_and_begin_a_new_interval():
    readings = MemoryReadings(CPU)
    block = torch.ones(32 << 20)
    during = readings.read()
    del block
    readings.read()
    after = readings.read()
    assert during["host_memory_peak_gib"] - after["host_memory_gib"] > 0.1
    assert after["host_memory_peak_gib"] - after["host_memory_gib"] < 0.05
    assert device_bytes(CPU) > GIB
