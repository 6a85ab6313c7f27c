"""The commands on GPUs: both stages trained, resumed and sampled; two GPUs train what one does."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path: Path, tiny_values: dict[str, Any]) -> Path:
    tiny_values["device"] = {"type": "cuda", "mixed_precision": True}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_values))
    return path


def metrics(folder: Path, name: str, stage: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == stage]


def test_both_stages_train_resume_and_sample(config, command, tmp_path):
    first = command("train_autoencoder.py", "--config", config, "autoencoder.training.max_steps=2")
    assert first.returncode == 0, first.stderr
    resumed = command("train_autoencoder.py", "--config", config)
    assert resumed.returncode == 0, resumed.stderr
    assert [line["step"] for line in metrics(tmp_path, "tiny", "autoencoder") if "kl" in line] == [1, 2, 3, 4]
    second = command("train_ldm.py", "--config", config, "data.pin_memory=true")
    assert second.returncode == 0, second.stderr
    lines = [*metrics(tmp_path, "tiny", "autoencoder"), *metrics(tmp_path, "tiny", "ldm")]
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    sampled = command("scripts/sample.py", "--run", "runs/tiny", "--num", "1", "--steps", "2", "--out", "samples")
    assert sampled.returncode == 0, sampled.stderr
    assert list((tmp_path / "samples").glob("*.nii.gz"))


def test_two_gpus_train_what_one_does(config, command, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; this machine has {torch.cuda.device_count()}")
    alone = command("train_autoencoder.py", "--config", config, "device.mixed_precision=false", "name=one")
    assert alone.returncode == 0, alone.stderr
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = [str(ROOT / "train_autoencoder.py"), "--config", str(config), "device.mixed_precision=false", "name=two"]
    together = subprocess.run(
        [*launch, *script, "autoencoder.training.gradient_accumulation_steps=1"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert together.returncode == 0, together.stderr
    one, two = (metrics(tmp_path, name, "autoencoder")[0] for name in ("one", "two"))
    for name in ("reconstruction", "kl", "autoencoder_gradient_norm"):
        assert two[name] == pytest.approx(one[name], rel=0.02), name
