"""Runs that are killed lose nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.conftest import NUM_STEPS, adopt_stage_one
from tests.faults.runs import checkpoints
from tests.nested_values import leaves

MOMENTS = {"0": [], "save": [2], "5": [2, 4]}
"""When a run is killed, one time after the other, and the checkpoints that it then has."""


@pytest.mark.parametrize(("stage", "moments"), [("autoencoder", ("0", "save", "5")), ("ldm", ("save", "5"))])
def test_run_killed_before_while_and_after_it_saves_ends_bit_identical(start, undisturbed, tmp_path, stage, moments):
    if stage == "ldm":
        adopt_stage_one(undisturbed, tmp_path)
    worker = "data.num_workers=1"  # it must not hold the run's lock after its parent was killed
    for moment in moments:
        killed = start(stage, worker, signalled="SIGKILL", moment=moment)
        assert killed.wait() == -signal.SIGKILL, killed.output
        assert [int(path.name.split("_")[2]) for path in checkpoints(tmp_path, stage)] == MOMENTS[moment]
        half_written = list((tmp_path / "runs" / "tiny" / "checkpoints").glob(f".{stage}_*.tmp"))
        assert bool(half_written) == (moment == "save")
    last = start(stage, worker)
    assert last.wait() == 0, last.output
    assert f"resuming {stage} after step 4" in last.output
    for (name, mine), (same_name, expected) in zip(results(tmp_path, stage), results(undisturbed, stage), strict=True):
        assert name == same_name
        assert torch.equal(mine, expected) if isinstance(mine, torch.Tensor) else mine == expected, name
    lines = map(json.loads, (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines())
    steps = [line["step"] for line in lines if line["stage"] == stage and f"{stage}_gradient_norm" in line]
    assert steps == list(range(1, NUM_STEPS + 1))


def results(folder: Path, stage: str) -> list[tuple[str, Any]]:
    """Return the exported weights and everything in the last checkpoint but the settings, by dotted names."""
    state = torch.load(checkpoints(folder, stage)[-1], weights_only=True)
    del state["settings"]
    weights = load_file(folder / "runs" / "tiny" / f"{stage}.safetensors")
    return list(leaves({"weights": weights, "state": state}))
