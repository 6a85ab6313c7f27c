"""All commands say the same about a config on a device: estimate_memory.py, oom_ladder.py, plan.py, and a dry run."""

import json
from typing import Any

import pytest
import torch

from memory.kernels.gpus import chosen_gpu
from memory.ladder.rungs import build_rungs
from memory.ladder.walk import walk
from memory.planning.planner import of_run
from memory.predict.prediction import Predictor
from memory.predict.step import predict_step
from memory.watch.memory_watch import MemoryWatch
from runtime.processes import Process
from scripts import estimate_memory
from settings import Settings, dump_yaml
from tests.memory.predict.test_step import STAGE_1, STAGE_2, make

ROOMY = 1 << 50


@pytest.fixture
def _in_this_process(monkeypatch, tmp_path):
    """Answer the requests of all commands in this process, equal ones once, and let the ladder have one rung."""
    answers: dict[str, dict[str, Any]] = {}

    def answer(self: Predictor, request: dict[str, Any]) -> dict[str, Any]:
        key = json.dumps([request, self._without_triton], sort_keys=True)
        if key not in answers:
            settings = Settings.model_validate(request["settings"])
            answers[key] = predict_step(settings, request["stage"], without_triton=self._without_triton).to_json()
        return answers[key]

    monkeypatch.setattr(Predictor, "_start", lambda self: None)
    monkeypatch.setattr(Predictor, "close", lambda self: None)
    monkeypatch.setattr(Predictor, "_ask", answer)
    monkeypatch.setattr("memory.watch.memory_watch.is_tiny", lambda settings, stage: False)
    monkeypatch.setattr("memory.ladder.walk.build_rungs", lambda *asked: build_rungs(*asked)[:1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("_in_this_process")
@pytest.mark.parametrize(
    ("stage", "changes"),
    [*(("autoencoder", c) for c in STAGE_1.values()), *(("ldm", c) for c in STAGE_2.values())],
    ids=[*STAGE_1, *(f"ldm-{name}" for name in STAGE_2)],
)
def test_four_commands_say_the_same_to_the_byte(stage, changes, tmp_path):
    for device in ("cuda", "cpu"):
        settings = make({**changes, "device.type": device})
        (tmp_path / "config.yaml").write_text(dump_yaml(settings))
        given = ["--config", str(tmp_path / "config.yaml"), "--stage", stage, "--json", str(tmp_path / "out.json")]
        assert estimate_memory.main(estimate_memory.parse([*given, "--quiet"])) == 0
        estimated = json.loads((tmp_path / "out.json").read_text())
        card, process = chosen_gpu(None), Process(torch.device("cpu"))
        first = walk(settings, stage, ROOMY).rungs[0]
        volumes = tuple(estimated["num_volumes"])
        planned = of_run(Predictor().predict(settings, stage), settings, stage, volumes)
        # Without a GPU, a dry run tells of both devices if the config leaves the choice to it.
        open_choice = settings.with_overrides({"device.type": "auto"})
        with MemoryWatch(open_choice, stage, process, is_dry_run=True) as watch:
            pending = watch.pending if device == "cpu" else watch.pending_for_gpu
            assert pending is not None
            dry = pending.result((0, 0))
        assert dry is not None
        found = [first.prediction, planned, dry]
        assert [p.required_bytes for p in found] == [estimated["required_bytes"]] * 3
        assert [p.peak_allocated_bytes for p in found] == [estimated["peak_allocated_bytes"]] * 3
        hours = [p.hours(card) if p.is_for_gpu else None for p in found]
        assert hours == [estimated["hours"]] * 3
        assert (estimated["hours"] is None) == (device == "cpu")
