"""All commands say the same about a config on a device: estimate_memory.py, oom_ladder.py, plan.py, and a dry run."""

import json
import random
from typing import Any

import pytest
import torch

from memory.kernels.gpus import chosen_gpu
from memory.ladder.rungs import build_rungs
from memory.ladder.walk import walk
from memory.planning.planner import of_run
from memory.predict.prediction import Predictor, Stage
from memory.predict.step import predict_step
from memory.watch.memory_watch import MemoryWatch
from runtime.processes import Process
from scripts import estimate_memory
from settings import Settings, dump_yaml

NUM_CONFIGS = 20
STAGES: tuple[Stage, Stage] = ("autoencoder", "ldm")
ROOMY = 1 << 50


def random_config(number: int) -> tuple[Stage, Settings]:
    """Return a small config of one stage, with knobs drawn at random."""
    draw, stage = random.Random(number), STAGES[number % 2]
    axes = [8 * draw.randint(1, 3) for _ in range(3)]
    first, training = "autoencoder.training", f"{stage}.training"
    changes: dict[str, Any] = {
        "data.voxel_size": axes,
        "autoencoder.num_channels": [draw.choice((4, 8)), 8],
        "autoencoder.num_res_blocks": draw.randint(0, 1),
        "autoencoder.attention_levels": [False, draw.random() < 0.3],
        "autoencoder.implementation": draw.choice(("lean", "lean", "monai")),
        f"{first}.slab_rows": draw.choice((0, 0, 4)),
        f"{first}.adversarial_weight": draw.choice((0.0, 0.01)),
        f"{first}.discriminator.num_layers_d": 1,
        "ldm.unet.num_channels": [8, 8],
        "ldm.unet.num_res_blocks": 1,
        "ldm.unet.attention_levels": [False, draw.random() < 0.5],
        "ldm.unet.num_head_channels": 8,
        "ldm.sampling.num_inference_steps": draw.choice((1, 5)),
        f"{training}.batch_size": draw.randint(1, 3),
        f"{training}.gradient_accumulation_steps": draw.randint(1, 2),
        f"{training}.use_gradient_checkpointing": draw.random() < 0.5,
        "device.mixed_precision": draw.random() < 0.7,
        "device.amp_dtype": draw.choice(("auto", "bfloat16", "float16")),
        "device.allocator": draw.choice(("", "expandable_segments:True")),
    }
    if changes["autoencoder.implementation"] == "monai":
        changes[f"{first}.slab_rows"] = 0
    return stage, Settings().with_overrides(changes)


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
@pytest.mark.parametrize("number", range(NUM_CONFIGS))
def test_four_commands_say_the_same_to_the_byte(number, tmp_path):
    stage, drawn = random_config(number)
    for device in ("cuda", "cpu"):
        settings = drawn.with_overrides({"device.type": device})
        (tmp_path / "config.yaml").write_text(dump_yaml(settings))
        given = ["--config", str(tmp_path / "config.yaml"), "--stage", stage, "--json", str(tmp_path / "out.json")]
        assert estimate_memory.main(estimate_memory.parse([*given, "--quiet"])) == 0
        estimated = json.loads((tmp_path / "out.json").read_text())
        card, process = chosen_gpu(None), Process(torch.device("cpu"))
        first = walk(settings, stage, ROOMY).rungs[0]
        volumes = tuple(estimated["num_volumes"])
        planned = of_run(Predictor().predict(settings, stage), settings, stage, volumes)
        # Without a GPU, a dry run tells of both devices if the config leaves the choice to it.
        with MemoryWatch(drawn.with_overrides({"device.type": "auto"}), stage, process, is_dry_run=True) as watch:
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
