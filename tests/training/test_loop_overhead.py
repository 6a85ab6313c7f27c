"""The loop costs almost nothing: nearly all of a step's time is forward, backward and optimizer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from data import BatchPlan, prepare_volumes, training_batches
from runtime.processes import Process
from settings import load_settings
from training.autoencoder_step import AutoencoderStep
from training.recording.progress import RunClock
from training.recording.recorder import Recorder
from training.run_setup import open_run

ROOT = Path(__file__).resolve().parents[2]
PHASES = {
    "generator forward",
    "generator backward",
    "discriminator forward",
    "discriminator backward",
    "optimizer",
}


@pytest.mark.slow
def test_at_most_5_percent_of_a_step_is_outside_forward_backward_and_optimizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = [
        "data.voxel_size=[64, 64, 32]",
        "data.source=phantoms:4",
        "data.prepared=memory",
        "data.num_workers=0",
        "autoencoder.training.adversarial_start_step=0",
        "device.type=cpu",
        "device.mixed_precision=false",
    ]
    settings = load_settings(ROOT / "configs" / "high_res.yaml", overrides)
    training = settings.autoencoder.training
    process = Process(torch.device("cpu"))
    volumes = prepare_volumes(settings.data, settings.seed, 1)
    step = AutoencoderStep(settings, process)
    plan = BatchPlan.of(training, settings.seed, 0, 1)
    warm_up, steps = 2, 6
    clock = RunClock(0, warm_up + steps)
    batches = training_batches(volumes.train, settings.data, plan, 0, warm_up + steps)
    with open_run(settings, process) as run, Recorder(run, "autoencoder", process, clock) as recorder:
        for done in range(1, warm_up + 1):
            step(next(batches), done - 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            start = time.perf_counter()
            for done in range(warm_up + 1, warm_up + steps + 1):
                recorder.add(step(next(batches), done - 1), training.samples_per_rank)
                step.guard.raise_if_bad()
                recorder.log(done)
            seconds = time.perf_counter() - start
    inside = sum(event.cpu_time_total for event in profiler.key_averages() if event.key in PHASES) / 1e6
    share = 1 - inside / seconds
    print(f"\n{100 * share:.2f} % of {seconds / steps:.2f} s a step is outside forward, backward and optimizer")
    assert share <= 0.05
