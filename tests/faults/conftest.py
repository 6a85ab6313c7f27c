"""Commands that start in a fraction of a second, and an undisturbed run to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.faults.runs import free_port
from tests.support.tiny_config import TINY
from tests.support.warm_start import Command, WarmStart

NUM_STEPS = 8


def values() -> dict[str, Any]:
    """The tiny config with a save every second step, and one update of both stages made of two micro-batches."""
    result = copy.deepcopy(TINY)
    mechanics = {"max_steps": NUM_STEPS, "save_every": 2, "log_every": 1, "validate_every": 4, "ema_decay": 0.9}
    result["autoencoder"]["training"] |= mechanics
    result["ldm"]["training"] |= mechanics | {"gradient_accumulation_steps": 2, "batch_size": 1}
    return result


def rank_of_two(rank: int, port: int) -> dict[str, str]:
    """Return the environment of one of two processes that train together, as srun would set it."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}


@pytest.fixture
def start(warm: WarmStart, tmp_path: Path) -> Callable[..., Command]:
    """Start a stage in the test's folder; `signalled` names a signal that it sends to itself."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values()))

    def begin(
        stage: str,
        *overrides: str,
        output: str = "output.log",
        signalled: str | None = None,
        moment: str = "4",
        **environment: str,
    ) -> Command:
        script = [f"train_{stage}.py"]
        if signalled is not None:
            script = ["tests/faults/train_and_signal.py", signalled, moment, str(ROOT / script[0])]
        return warm(
            tmp_path, *script, "--config", "tiny.yaml", *overrides, output=tmp_path / output, errors=None, **environment
        )

    return begin


@pytest.fixture
def start_two(start: Callable[..., Command]) -> Callable[..., list[Command]]:
    """Start a stage as two processes that train together, as srun would; each accumulates one micro-batch."""

    def begin(stage: str, *overrides: str, signalled: str | None = None) -> list[Command]:
        port = free_port()
        single = f"{stage}.training.gradient_accumulation_steps=1"
        return [
            start(
                stage, single, *overrides, output=f"output_{rank}.log", signalled=signalled, **rank_of_two(rank, port)
            )
            for rank in range(2)
        ]

    return begin


@pytest.fixture(scope="session")
def undisturbed(warm: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of both stages that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values()))
    for script in ("train_autoencoder.py", "train_ldm.py"):
        command = warm(folder, script, "--config", "tiny.yaml", output=folder / "output.log")
        assert command.wait() == 0, command.output
    return folder


def adopt_stage_one(undisturbed: Path, folder: Path) -> None:
    """Give stage 2 the autoencoder of the undisturbed run."""
    run = folder / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / "autoencoder.safetensors").write_bytes(
        (undisturbed / "runs" / "tiny" / "autoencoder.safetensors").read_bytes()
    )
