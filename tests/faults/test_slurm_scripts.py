"""The batch script of docs/several_gpus.md, with stand-ins for srun, scontrol and python."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
[SCRIPT] = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", (ROOT / "docs" / "several_gpus.md").read_text(), re.DOTALL)

# Starts the tasks of two nodes as Slurm numbers them, and ends with the highest of their codes.
SRUN = """#!/bin/bash
trap : TERM
while [[ $1 == --* ]]; do shift; done
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % SLURM_NTASKS_PER_NODE)) "$@" &
    tasks+=($!)
done
code=0
for task in "${tasks[@]}"; do
    wait "$task"; last=$?
    while kill -0 "$task" 2> /dev/null; do wait "$task"; last=$?; done  # a signal ends wait, not the task
    [ $last -gt $code ] && code=$last
done
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1 $2 $3" = 'show hostnames node[1-2]' ]; then printf 'node1\\nnode2\\n'; else echo "$@" >> scontrol.log; fi
"""
PYTHON = """#!/bin/bash
echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*" >> python.log
exit $ENDS_WITH
"""
# Training that needs a second to save when it is asked to stop, and that finishes when it is started again.
PREEMPTED = """#!/bin/bash
[ -e saved ] && exit 0
trap 'sleep 1; touch saved; exit 130' TERM
touch started
while true; do sleep 0.05; done
"""


def install(folder: Path, **commands: str) -> None:
    for name, text in commands.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("code", [0, 2, 130])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_batch_script_numbers_processes_and_requeues_only_what_was_stopped(tmp_path, num_nodes, code):
    install(tmp_path, srun=SRUN, scontrol=SCONTROL, python=PYTHON, job=SCRIPT)
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": str(4 * num_nodes), "SLURM_NTASKS_PER_NODE": "4"}
    environment = {**os.environ, **slurm, "SLURM_JOB_NODELIST": "node[1-2]", "ENDS_WITH": str(code)}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "job"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    started = sorted(
        map(str.split, (tmp_path / "python.log").read_text().splitlines()), key=lambda words: int(words[0])
    )
    expected = [[str(rank), str(rank % 4), str(4 * num_nodes), "4", "node1", "24711"] for rank in range(4 * num_nodes)]
    assert [words[:6] for words in started] == expected
    assert started[0][6:] == ["train_autoencoder.py", "--config", "configs/balanced.yaml"]
    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == ("requeue 4711\n" if code == 130 else "")


def test_a_preempted_job_waits_for_training_to_save_requeues_itself_and_finishes_when_run_again(tmp_path):
    """The scheduler signals the whole process group: shell, srun and training."""
    install(tmp_path, srun=SRUN, scontrol=SCONTROL, python=PREEMPTED, job=SCRIPT)
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"}
    environment = {**os.environ, **slurm, "SLURM_JOB_NODELIST": "node[1-2]"}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    job = subprocess.Popen(["bash", "job"], cwd=tmp_path, env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(job.pid, signal.SIGTERM)
    assert job.wait(60) == 130
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "scontrol.log").read_text() == "requeue 4711\n"
    assert subprocess.run(["bash", "job"], cwd=tmp_path, env=environment, timeout=60).returncode == 0
    assert (tmp_path / "scontrol.log").read_text() == "requeue 4711\n"
