"""Processes that train together also stop together, and a run goes on with another number of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.conftest import NUM_STEPS, adopt_stage_one, rank_of_two
from tests.faults.runs import checkpoints, free_port, losses, num_lines, wait_for

ROOT = Path(__file__).resolve().parents[2]
TERM = {"autoencoder": "reconstruction", "ldm": "diffusion"}


@pytest.mark.parametrize("stage", ["autoencoder", "ldm"])
def test_killed_process_ends_the_other_and_one_process_resumes_with_the_same_losses(
    start, start_two, undisturbed, tmp_path, stage
):
    if stage == "ldm":
        adopt_stage_one(undisturbed, tmp_path)
    first, second = start_two(stage, signalled="SIGKILL")
    assert second.wait() == -signal.SIGKILL, second.output
    assert first.wait() == 2, first.output
    assert "another process of this run ended" in first.output
    assert "run the same command again to resume from the last checkpoint" in first.output
    assert "Traceback" not in first.output

    alone = start(stage, f"{stage}.training.gradient_accumulation_steps=1")
    assert alone.wait() == 0, alone.output
    assert f"resuming {stage} after step" in alone.output
    assert f"{stage}.training.gradient_accumulation_steps: 1 -> 2, so that an update on 1 ranks" in alone.output
    expected = losses(undisturbed, stage, TERM[stage])
    assert len(expected) == NUM_STEPS
    torch.testing.assert_close(losses(tmp_path, stage, TERM[stage]), expected, rtol=1e-5, atol=0)
    for name in [name for name in ("val_psnr", "val_diffusion") if losses(undisturbed, stage, name)]:
        torch.testing.assert_close(
            losses(tmp_path, stage, name)[-1], losses(undisturbed, stage, name)[-1], rtol=1e-4, atol=0
        )


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
