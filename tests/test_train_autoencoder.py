"""Stage 1 as a user runs it: dry run, training, resuming, stopping, and refusing."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "runs" / "tiny" / "autoencoder.safetensors")


def test_dry_run_says_what_would_happen_and_leaves_no_run(command, tiny_config, tmp_path):
    done = command("train_autoencoder.py", "--config", tiny_config, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "1 x 16x16x16 -> 3 x 8x8x8" in done.stderr
    assert "effective batch: 1 x 2 accumulated x 1 process = 2" in done.stderr
    assert "steps per pass:  " in done.stderr
    assert "autoencoder " in done.stderr
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_dry_run_without_a_gpu_predicts_for_one_and_takes_seconds(tmp_path):
    """256x256x64 in 48 phantoms, of which none is generated: 9 CPU seconds with all imports; twice that is allowed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    arguments = ["--config", str(ROOT / "configs/high_res.yaml"), "--dry-run", "--gpu", "RTX 4090"]
    command = [sys.executable, str(ROOT / "train_autoencoder.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 18
    assert "memory: on a GPU: predicted peak 2.6" in done.stderr
    assert re.search(r"Time on RTX 4090: [\d.]+ to [\d.]+ s an update", done.stderr)
    here = [line for line in done.stderr.splitlines() if " GiB of it Python and its libraries" in line]
    assert len(here) == 1
    assert "memory: predicted peak" in here[0]
    assert not (tmp_path / "runs").exists()


def test_a_gpu_is_named_for_a_dry_run_only(command, tiny_config):
    done = command("train_autoencoder.py", "--config", tiny_config, "--gpu", "RTX 4090")
    assert done.returncode == 2
    assert "--gpu: given without --dry-run; allowed: with it; leave it out to train" in done.stderr


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
    before = weights(tmp_path)

    again = command("train_autoencoder.py", "--config", tiny_config, *warm_up)
    assert again.returncode == 0, again.stderr
    assert "resuming autoencoder after step 4" in again.stderr
    torch.testing.assert_close(weights(tmp_path), before, rtol=0, atol=0)


def test_output_in_a_file_is_one_plain_line_each_log_every(command, tiny_config):
    training = ("max_steps=60", "log_every=10", "validate_every=60", "save_every=60")
    done = command(
        "train_autoencoder.py", "--config", tiny_config, *(f"autoencoder.training.{one}" for one in training)
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    steps = [line for line in lines if line.startswith("autoencoder step ")]
    figures = r"loss [\d.e-]+, [\d.e-]+ s per step(, .* left)?, peak \d+\.\d\d GiB(, .* waiting for data: .*)?"
    found = [re.fullmatch(rf"autoencoder step (\d+)/60: {figures}", line) for line in steps]
    assert [match and match[1] for match in found] == ["10", "20", "30", "40", "50", "60"], steps
    assert "\r" not in done.stderr
    assert len(lines) - len(steps) < 20  # so 1,000 steps with 10 between lines stay far below 200
