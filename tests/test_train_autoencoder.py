"""Stage 1 as a user runs it: dry run, training, resuming, stopping, and refusing."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import ROOT
from tests.finished_run import run_here


def test_dry_run_says_what_would_happen_and_leaves_no_run_and_a_gpu_is_named_for_it_only(
    tiny_config, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert run_here("train_autoencoder.py", "--config", tiny_config, "--dry-run") == 0
    said = capsys.readouterr().err
    assert "1 x 16x16x16 -> 3 x 8x8x8" in said
    assert "effective batch: 1 x 2 accumulated x 1 process = 2" in said
    assert "steps per pass:  " in said
    assert run_here("train_autoencoder.py", "--config", tiny_config, "--gpu", "RTX 4090") == 2
    assert "--gpu: given without --dry-run; allowed: with it; leave it out to train" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_dry_run_without_a_gpu_predicts_for_one_and_takes_seconds(tmp_path):
    """256x256x64 in 48 phantoms, of which none is generated: 9 CPU seconds with all imports on a server's core."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = ["--config", str(ROOT / "configs/high_res.yaml"), "--dry-run", "--gpu", "RTX 4090"]
    command = [sys.executable, str(ROOT / "train_autoencoder.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 40
    assert "memory: on a GPU: predicted peak 2.6" in done.stderr
    assert re.search(r"Time on RTX 4090: [\d.]+ to [\d.]+ s an update", done.stderr)
    here = [line for line in done.stderr.splitlines() if " GiB of it Python and its libraries" in line]
    assert len(here) == 1
    assert "memory: predicted peak" in here[0]
    assert not (tmp_path / "runs").exists()


def test_run_writes_all_its_files_and_the_same_command_finds_it_finished(command, tiny_config, tmp_path):
    warm_up = ("autoencoder.training.learning_rate=1e-4", "autoencoder.training.warmup_steps=2")
    done = command("train_autoencoder.py", "--config", tiny_config, *warm_up)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tiny"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reconstruction" in line] == [1, 2, 3, 4]
    rates = [line["autoencoder_learning_rate"] for line in lines if "reconstruction" in line]
    assert rates == pytest.approx([5e-5, 1e-4, 1e-4, 1e-4])
    assert any(line.get("val_psnr", 0) > 0 for line in lines)
    assert "val_psnr" in done.stderr
    assert (run / "config.yaml").exists()
    assert (run / "environment.json").exists()
    assert len(list((run / "checkpoints").glob("autoencoder_step_*.pt"))) == 2
    assert list((run / "previews").glob("*.png"))
    board = EventAccumulator(str(run / "tensorboard" / "autoencoder")).Reload()
    assert [value.step for value in board.Scalars("reconstruction")] == [1, 2, 3, 4]
    assert [value.step for value in board.Scalars("val_psnr")] == [4]
    assert board.Tags()["images"]
    before = load_file(run / "autoencoder.safetensors")

    # In a file, the output is one plain line each `log_every`, and few others.
    output = done.stderr.splitlines()
    steps = [line for line in output if line.startswith("autoencoder step ")]
    figures = r"loss [\d.e-]+(, [\d.e-]+ s per step)?(, .* left)?, peak \d+\.\d\d GiB(, .* waiting for data: .*)?"
    matches = [re.fullmatch(rf"autoencoder step (\d)/4: {figures}", line) for line in steps]
    assert [match and match[1] for match in matches] == ["1", "2", "3", "4"], steps
    assert "s per step" in steps[-1]
    assert "\r" not in done.stderr
    assert len(output) - len(steps) < 20

    again = command("train_autoencoder.py", "--config", tiny_config, *warm_up)
    assert again.returncode == 0, again.stderr
    assert "resuming autoencoder after step 4" in again.stderr
    torch.testing.assert_close(load_file(run / "autoencoder.safetensors"), before, rtol=0, atol=0)
