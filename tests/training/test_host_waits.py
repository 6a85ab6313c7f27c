"""The host never waits for the device inside a step: no value is read, and only the batch is copied from the host."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.files import RunFolder
from runtime.processes import Process
from settings import Settings
from tests.training.host_waits import DEVICE, build, waits, without_values
from training.recording import Recorder, RunClock

FP16 = {"mixed_precision": True, "amp_dtype": "float16"}
ADVERSARIAL_START = 4

STAGE_1: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16, scaled gradients": {"device": FP16},
    "averaged weights, no clipping": {"ema_decay": 0.99, "max_grad_norm": 0.0},
    "checkpointed": {"use_gradient_checkpointing": True},
    "slabs": {"use_gradient_checkpointing": True, "slab_rows": 8},
    "perceptual": {"use_perceptual_loss": True, "perceptual": {"network": "structural"}},
    "codebook": {"bottleneck": "vq"},
    "warm-up and decay": {"warmup_steps": 2, "learning_rate_decay": "cosine"},
}
STAGE_2: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16, scaled gradients": {"device": FP16},
    "averaged weights, no clipping": {"ema_decay": 0.99, "max_grad_norm": 0.0},
    "checkpointed": {"use_gradient_checkpointing": True},
    "pixel loss": {"pixel_loss": {"weight": 0.5}},
    "classes": {"conditioning": {"type": "class", "num_classes": 3}},
    "rectified flow": {"scheduler": {"type": "rflow"}, "sampling": {"sampler": "rflow"}},
    "volumes, not latents": {"latents": {"cache": "none"}},
}


@pytest.fixture(autouse=True)
def _without_values(monkeypatch):
    with without_values(monkeypatch):
        yield


def step_of(values: dict[str, Any], stage: str, changes: dict[str, Any]) -> Any:
    section = values[stage]
    for key, change in changes.items():
        if key == "device":
            values["device"] = {"type": "cpu", **change}
        elif key == "bottleneck":
            section.update(bottleneck=change, codebook_size=16)
        elif key in ("conditioning", "scheduler", "sampling", "latents"):
            section.setdefault(key, {}).update(change)
        else:
            section["training"][key] = change
    values["autoencoder"]["training"]["adversarial_start_step"] = ADVERSARIAL_START
    return build(Settings.model_validate(values), stage)


@pytest.mark.parametrize("changes", STAGE_1.values(), ids=STAGE_1)
def test_stage_1_never_waits(tiny_values, changes):
    assert waits(step_of(tiny_values, "autoencoder", changes), ADVERSARIAL_START) == []


@pytest.mark.parametrize("name", ["fp32", "fp16, scaled gradients"])
def test_stage_1_never_waits_before_the_discriminator_takes_part(tiny_values, name):
    step = step_of(tiny_values, "autoencoder", STAGE_1[name])
    assert not step.is_adversarial(1)
    assert waits(step, 0) == []


@pytest.mark.parametrize("changes", STAGE_2.values(), ids=STAGE_2)
def test_stage_2_never_waits(tiny_values, changes):
    assert waits(step_of(tiny_values, "ldm", changes), 0) == []


def test_recorder_never_waits_between_log_lines(tiny_values, tmp_path):
    step = step_of(tiny_values, "autoencoder", {})
    run = RunFolder(tmp_path)
    with Recorder(run, "autoencoder", Process(DEVICE), RunClock(0, 8)) as recorder:
        assert waits(step, 0, lambda terms: recorder.add(terms, 1)) == []
