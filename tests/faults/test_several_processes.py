"""Processes that train together stop together; a run goes on with another number of them; a kill loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.conftest import NUM_STEPS, adopt_stage_one, rank_of_two
from tests.faults.runs import checkpoints, free_port, losses, num_lines, wait_for
from tests.nested_values import leaves

ROOT = Path(__file__).resolve().parents[2]


def test_killed_process_ends_the_other_and_one_process_resumes_with_the_same_losses(
    start, start_two, undisturbed, tmp_path
):
    first, second = start_two("autoencoder", signalled="SIGKILL")
    assert second.wait() == -signal.SIGKILL, second.output
    assert first.wait() == 2, first.output
    assert "another process of this run ended" in first.output
    assert "run the same command again to resume from the last checkpoint" in first.output
    assert "Traceback" not in first.output

    alone = start("autoencoder", "autoencoder.training.gradient_accumulation_steps=1")
    assert alone.wait() == 0, alone.output
    assert "resuming autoencoder after step" in alone.output
    assert "autoencoder.training.gradient_accumulation_steps: 1 -> 2, so that an update on 1 ranks" in alone.output
    found, expected = (losses(folder, "autoencoder", "reconstruction") for folder in (tmp_path, undisturbed))
    assert len(expected) == NUM_STEPS
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    found, expected = (losses(folder, "autoencoder", "val_psnr")[-1:] for folder in (tmp_path, undisturbed))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("autoencoder.training.learning_rate=0.5", "learning_rate: 0.001 on rank 0 and 0.5 on rank 1"),
        ("device.amp_dtype=bfloat16", "precision: float32 on rank 0 and bfloat16 on rank 1"),
    ],
)
def test_ranks_that_would_train_differently_are_refused_with_one_sentence(start, override, said):
    base = ("autoencoder.training.learning_rate=0.001", "device.mixed_precision=true")
    port = free_port()
    ranks = [
        start("autoencoder", *overrides, output=f"output_{rank}.log", **rank_of_two(rank, port))
        for rank, overrides in enumerate([base, (*base, override)])
    ]
    assert [rank.wait() for rank in ranks] == [2, 2]
    texts = [rank.output for rank in ranks]
    assert sum(said in text for text in texts) == 1, texts
    assert "Traceback" not in "".join(texts)


def test_signal_to_one_process_stops_both_after_the_same_step(start_two, tmp_path):
    commands = start_two("autoencoder", "autoencoder.training.max_steps=500")
    wait_for(lambda: num_lines(tmp_path) >= 3, *commands)
    commands[1].send(signal.SIGUSR1)
    assert [command.wait() for command in commands] == [130, 130], commands[0].output
    saved = int(checkpoints(tmp_path, "autoencoder")[-1].name.split("_")[2])
    assert all(f"stopped after step {saved};" in command.output for command in commands)


def test_out_of_memory_in_one_process_ends_both_with_the_same_code_and_says_what_to_do(start):
    # As torchrun does it: the store belongs to none of the processes.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"signalled": "MemoryError", "moment": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    commands = [
        start(
            "autoencoder",
            "--on-oom",
            "next-rung",
            output=f"output_{rank}.log",
            **shared | rank_of_two(rank, store.port),
        )
        for rank in range(2)
    ]
    assert [command.wait() for command in commands] == [3, 3], [command.output for command in commands]
    output = commands[0].output + commands[1].output
    assert output.count("step 3, training: out of memory; the last checkpoint is good (step 2)") == 1
    assert "--on-oom next-rung does this automatically, but only for a single process" in output
    assert "starting again" not in output
    assert "resuming from the checkpoint" not in output
    assert "Traceback" not in output


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "WORLD_SIZE"])
def test_wrong_environment_is_refused(start, missing):
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}
    command = start("autoencoder", **environment | {missing: ""})
    assert command.wait() == 2, command.output
    assert "start" in command.output
    assert "torchrun" in command.output
    assert "Traceback" not in command.output


def test_torchrun_restarts_after_a_killed_process_and_finishes_the_run(undisturbed, tmp_path):
    (tmp_path / "tiny.yaml").write_text((undisturbed / "tiny.yaml").read_text())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    launcher = [str(ROOT / "tests/faults/train_and_signal.py"), "SIGKILL", "4", str(ROOT / "train_autoencoder.py")]
    single = "autoencoder.training.gradient_accumulation_steps=1"
    with (tmp_path / "output.log").open("w") as output:
        done = subprocess.run(
            [*torchrun, *launcher, "--config", "tiny.yaml", single],
            cwd=tmp_path,
            stderr=output,
            stdout=output,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            timeout=500,
        )
    assert done.returncode == 0, (tmp_path / "output.log").read_text()
    # torchrun may end the other process before that says why it stops.
    assert "resuming autoencoder after step" in (tmp_path / "output.log").read_text()
    mine, expected = (
        load_file(place / "runs" / "tiny" / "autoencoder.safetensors") for place in (tmp_path, undisturbed)
    )
    torch.testing.assert_close(mine, expected, rtol=1e-2, atol=1e-4)  # Adam turns rounding into steps
    torch.testing.assert_close(
        losses(tmp_path, "autoencoder", "reconstruction"),
        losses(undisturbed, "autoencoder", "reconstruction"),
        rtol=1e-5,
        atol=0,
    )


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
