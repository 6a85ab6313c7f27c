"""A training whose allocations really fail ends with a report and a good checkpoint, or goes on by itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TRAINING = "autoencoder.training"
DIVISOR = 2.5
# A step takes about 280 MiB, so that the limit is far below it and far above what micro-batches of one or two need.
OVERRIDES = [
    "data.voxel_size=[32,32,32]",
    "data.source=phantoms:4",
    "autoencoder.num_channels=[8,8]",
    "autoencoder.attention_levels=[false,false]",
    f"{TRAINING}.adversarial_weight=0",
    f"{TRAINING}.edge_weight=0",
    f"{TRAINING}.batch_size=16",
    f"{TRAINING}.gradient_accumulation_steps=1",
    f"{TRAINING}.max_steps=3",
    f"{TRAINING}.save_every=1",
    f"{TRAINING}.validate_every=3",
]


@pytest.mark.timeout(600)
def test_failed_allocation_is_reported_and_the_next_rungs_finish_the_run(tmp_path, tiny_config):
    # Released blocks go back to the system, so that the limit meets what the step needs and not what the heap keeps.
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    environment |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_ARENA_MAX": "1"}

    def train(*options):
        launcher = ROOT / "tests/memory/watch/train_with_little_memory.py"
        command = [sys.executable, launcher, str(DIVISOR), ROOT / "train_autoencoder.py", "--config", tiny_config]
        return subprocess.run(
            [*command, *options, *OVERRIDES],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

    stopped = train()
    assert stopped.returncode == 3, stopped.stderr
    assert "step 2, generator" in stopped.stderr
    assert "out of memory; the last checkpoint is good (step 1)" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    run = tmp_path / "runs" / "tiny"
    report = json.loads((run / "oom_report.json").read_text())
    assert report["step"] == 1
    assert report["phase"].startswith("generator")
    assert report["breakdown"]["activations"] > 80 << 20
    assert report["next_rung"]["changes"] == {f"{TRAINING}.batch_size": 8, f"{TRAINING}.gradient_accumulation_steps": 2}

    # Step 2 is the first of this process and has no limit yet; the third meets it.
    finished = train("--on-oom", "next-rung")
    assert finished.returncode == 0, finished.stderr
    assert "resuming from the checkpoint of step 2 with micro-batch 8" in finished.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reconstruction" in line] == [1, 2, 3]
    assert all(line["host_memory_peak_gib"] > 0 for line in lines if "reconstruction" in line)
