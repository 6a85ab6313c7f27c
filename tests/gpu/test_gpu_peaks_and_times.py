"""Steps of every preset on the GPU: their peaks beside the predictions, and their times beside stock MONAI's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memory.predict import predict
from memory.predict.prediction import GIB
from settings import load_settings
from tests.gpu.conftest import PEAKS, ROOT, TIMES
from tests.gpu.table import Row

pytestmark = pytest.mark.gpu

LIBRARIES_BYTES = 128 << 20
"""Workspaces of cuBLAS and partly used segments, which matter beside the smallest steps only."""

PRESETS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
TRAINING = "autoencoder.training."
PLAIN = [
    TRAINING + "use_gradient_checkpointing=false",
    TRAINING + "use_gradient_checkpointing_offload=false",
    TRAINING + "slab_rows=0",
    TRAINING + "use_perceptual_loss=false",
]
CHECKPOINTED = [*PLAIN, TRAINING + "use_gradient_checkpointing=true"]
STOCK = [*PLAIN, "autoencoder.implementation=monai"]
KNOBS = {
    "lean": PLAIN,
    "checkpointed": CHECKPOINTED,
    "slabs of 16": [*CHECKPOINTED, TRAINING + "slab_rows=16"],
    "offloaded": [*CHECKPOINTED, TRAINING + "use_gradient_checkpointing_offload=true"],
}
MOST_OF_STOCK = {"lean": 1.1, "checkpointed": 1.5}
"""How many times as long as stock a step may take; slabs and offload trade time for memory."""


def predicted(config: Path, stage: Any, overrides: list[str]) -> Any:
    """Return the prediction, or skip the test if the step does not fit into the GPU."""
    settings = load_settings(config, [*overrides, "device.type=cuda"], stage=stage)
    found = predict(settings, stage)
    room = torch.cuda.get_device_properties(0).total_memory
    if found.required_bytes * (1 + found.margin) > room:
        pytest.skip(f"needs {found.required_bytes / GIB:.1f} GiB; this GPU has {room / GIB:.1f}")
    return found


def check_peak(note: Any, measured_step: Any, what: str, config: Path, stage: str, overrides: list[str]) -> None:
    found = predicted(config, stage, overrides)
    real = measured_step(str(config), stage, *overrides)
    note(PEAKS, Row(what, found.peak_reserved_bytes / GIB, real["peak_reserved_bytes"] / GIB))
    assert real["peak_reserved_bytes"] <= (1 + found.margin) * found.peak_reserved_bytes + LIBRARIES_BYTES
    assert real["peak_reserved_bytes"] >= 0.6 * found.peak_reserved_bytes


@pytest.mark.parametrize("stage", ["autoencoder", "ldm"])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_peak_of_a_preset_is_within_its_margin(preset, stage, note, measured_step):
    check_peak(note, measured_step, f"{preset}, {stage}", ROOT / "configs" / f"{preset}.yaml", stage, [])


@pytest.mark.parametrize("knob", KNOBS)
def test_the_peak_of_a_memory_knob_is_within_its_margin(knob, note, measured_step):
    check_peak(note, measured_step, f"high_res, {knob}", ROOT / "configs" / "high_res.yaml", "autoencoder", KNOBS[knob])


@pytest.mark.parametrize("knob", KNOBS)
def test_a_step_takes_about_as_long_as_stock(knob, note, measured_step):
    config = ROOT / "configs" / "high_res.yaml"
    predicted(config, "autoencoder", STOCK)
    stock = measured_step(str(config), "autoencoder", *STOCK)["seconds"]
    ours = measured_step(str(config), "autoencoder", *KNOBS[knob])["seconds"]
    note(TIMES, Row(f"high_res, {knob}", stock, ours))
    assert ours <= MOST_OF_STOCK.get(knob, 4.0) * stock
