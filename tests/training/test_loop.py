"""A step is saved before it is validated: whatever happens to a validation, no step is lost or repeated."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import evaluation.report
import training.optimization
from runtime.cli import INTERRUPTED, OUT_OF_MEMORY
from runtime.processes import Process
from tests.finished_run import export_autoencoder, run_here
from training.step import TrainingStep
from training.validation import stages

RUN = Path("runs") / "tiny"
Train = Callable[..., int]


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """The steps that were made so far, counted from 1."""
    steps: list[int] = []
    accumulate = TrainingStep.accumulate

    def counted(self: TrainingStep, micro_batches: Any, step: int, run: Any) -> Any:
        steps.append(step + 1)
        return accumulate(self, micro_batches, step, run)

    monkeypatch.setattr(TrainingStep, "accumulate", counted)
    return steps


@pytest.fixture
def train(tmp_path, monkeypatch, tiny_values, made) -> Train:
    """Train six steps of a stage that is validated after each third, and saved by `save_every` after none but those.

    Both stages run the same loop, so each of its promises is tried on one of them.
    """
    monkeypatch.chdir(tmp_path)
    for stage in ("autoencoder", "ldm"):
        tiny_values[stage]["training"] |= {"max_steps": 6, "validate_every": 3, "save_every": 100}
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny_values))

    def start(stage: str, *options: str) -> int:
        if stage == "ldm" and not (RUN / "autoencoder.safetensors").exists():
            export_autoencoder(tiny_values)
        return run_here(f"train_{stage}.py", "--config", "tiny.yaml", *options)

    return start


def fail_in_validation(monkeypatch: pytest.MonkeyPatch, stage: str, calls: tuple[int, ...], error: BaseException):
    """Let these calls of a stage's validation fail, counted from 1."""
    place: Any = stages if stage == "autoencoder" else stages.LdmValidation
    name = "validate_autoencoder" if stage == "autoencoder" else "__call__"
    validate, number = getattr(place, name), iter(range(1, 100))

    def failing(*arguments: Any) -> Any:
        if next(number) in calls:
            raise error
        return validate(*arguments)

    monkeypatch.setattr(place, name, failing)


def stop_after(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Ask the run to stop during this step, counted from 1."""
    accumulate = TrainingStep.accumulate

    def interrupted(self: TrainingStep, micro_batches: Any, step: int, run: Any) -> Any:
        if step + 1 == number:
            os.kill(os.getpid(), signal.SIGUSR1)
        return accumulate(self, micro_batches, step, run)

    monkeypatch.setattr(TrainingStep, "accumulate", interrupted)


def lines(stage: str) -> list[dict[str, Any]]:
    everything = map(json.loads, (RUN / "metrics.jsonl").read_text().splitlines())
    return [line for line in everything if line["stage"] == stage]


def steps_of(stage: str, name: str) -> list[int]:
    return [line["step"] for line in lines(stage) if name in line]


def test_validation_that_runs_out_of_memory_takes_rungs_and_repeats_no_step(train, made, monkeypatch, capsys):
    fail_in_validation(monkeypatch, "ldm", (1, 3), MemoryError())
    assert train("ldm", "--on-oom", "next-rung", "ldm.training.batch_size=2") == 0
    assert made == [1, 2, 3, 4, 5, 6]
    said = capsys.readouterr().err
    assert "step 3, validation: out of memory; the last checkpoint is good (step 3)" in said
    assert "step 6, validation: out of memory; the last checkpoint is good (step 6)" in said
    assert "resuming from the checkpoint of step 3 with" in said
    assert steps_of("ldm", "val_diffusion") == [3, 6]
    assert json.loads((RUN / "oom_report.json").read_text())["phase"] == "validation"


def test_run_that_died_in_its_last_validation_is_finished_by_the_same_command(train, made, monkeypatch):
    weights = RUN / "autoencoder.safetensors"
    with monkeypatch.context() as patch:
        fail_in_validation(patch, "autoencoder", (2,), MemoryError())
        assert train("autoencoder") == OUT_OF_MEMORY
    assert not weights.exists()
    assert steps_of("autoencoder", "val_psnr") == [3]
    (RUN / "report.html").unlink()

    assert train("autoencoder") == 0
    assert made == [1, 2, 3, 4, 5, 6]
    assert steps_of("autoencoder", "val_psnr") == [3, 6]
    assert (RUN / "previews" / "autoencoder_00000006.png").is_file()
    assert (RUN / "report.html").is_file()
    exported = load_file(weights)

    # Nothing is left to do: what was validated is not validated again.
    fail_in_validation(monkeypatch, "autoencoder", (1,), AssertionError("validated again"))
    assert train("autoencoder") == 0
    assert steps_of("autoencoder", "val_psnr") == [3, 6]
    torch.testing.assert_close(load_file(weights), exported, rtol=0, atol=0)


def test_ranks_wait_for_the_preview_before_the_next_step(train, made, monkeypatch):
    """Rank zero draws and shows it alone; gradients would wait for 30 minutes at most."""
    events: list[str] = []
    show = evaluation.report.show_validation

    def shown(*given: Any) -> None:
        show(*given)
        events.append("shown")

    monkeypatch.setattr(evaluation.report, "show_validation", shown)
    monkeypatch.setattr(Process, "barrier", lambda self: events.append(f"all wait after step {made[-1]}"))
    assert train("autoencoder") == 0
    assert events == ["shown", "all wait after step 3", "shown", "all wait after step 6"]


def test_run_asked_to_stop_saves_and_postpones_its_validation(train, made, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        fail_in_validation(patch, "autoencoder", (1,), AssertionError("validated although asked to stop"))
        assert train("autoencoder") == INTERRUPTED
    assert [path.name[:25] for path in (RUN / "checkpoints").iterdir()] == ["autoencoder_step_00000003"]
    assert train("autoencoder") == 0
    assert made == [1, 2, 3, 4, 5, 6]
    assert steps_of("autoencoder", "val_psnr") == [3, 6]


class Clock:
    """Stands for the module `time` in training.optimization: every look at the clock takes ten seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        self.seconds += 10
        return self.seconds


def test_a_run_with_a_time_limit_ends_there_with_its_learning_rate_and_resumes_where_it_stopped(
    train, made, monkeypatch
):
    monkeypatch.setattr(training.optimization, "time", Clock())
    stage, decay = "ldm", "ldm.training.learning_rate_decay=cosine"
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        assert train(stage, decay, "--minutes", "1.5") == INTERRUPTED
    assert made == [1, 2, 3, 4]
    assert train(stage, decay, "--minutes", "1.5") == 0
    # Ninety seconds, ten a step, whatever max_steps is; saved at every tenth of them, not only with each validation.
    assert made == list(range(1, 10))
    saved = sorted(path.name[:17] for path in (RUN / "checkpoints").iterdir())
    assert saved == ["ldm_step_00000008", "ldm_step_00000009"]
    rates = [line["ldm_learning_rate"] for line in lines(stage) if "ldm_learning_rate" in line]
    assert rates == pytest.approx([rates[0] * 0.5 * (1 + math.cos(math.pi * number / 9)) for number in range(9)])
    assert steps_of(stage, "val_diffusion")[-1] == 9
    # Finished: the same command makes no further step, and another time would be another schedule.
    assert train(stage, decay, "--minutes", "1.5") == 0
    assert len(made) == 9
    assert train(stage, decay, "--hours", "2") == 2
    assert train(stage, "--hours", "1", "--minutes", "5") == 2
    assert train(stage, "--hours", "0") == 2
