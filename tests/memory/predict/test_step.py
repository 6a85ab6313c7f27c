"""A prediction executes the very step of training: fake and real tensors agree, and the parts add up."""

import json
import sys
from typing import Any

import pytest

from memory.kernels.gpus import BUS_COPY
from memory.predict.prediction import Prediction, PredictionError, Predictor, tier_of
from memory.predict.step import level_of, predict_step, tracked_step
from settings import Settings, load_settings
from tests.conftest import ROOT

HIGH_RES = load_settings(ROOT / "configs" / "high_res.yaml")
TRAINING = "autoencoder.training"
GRID = {
    "data.voxel_size": (16, 16, 16),
    "autoencoder.num_channels": (8, 16),
    "autoencoder.attention_levels": (False, True),
    "autoencoder.num_res_blocks": 1,
    "device.mixed_precision": False,
}
# Each is one way to train. float16, not bfloat16: some virtual machines announce instructions for it that they lack.
STAGE_1: dict[str, dict[str, Any]] = {
    "plain": {f"{TRAINING}.use_gradient_checkpointing": False, f"{TRAINING}.ema_decay": 0.99},
    "float16": {"device.mixed_precision": True, "device.amp_dtype": "float16"},
    "checkpointed": {f"{TRAINING}.use_perceptual_loss": True, f"{TRAINING}.perceptual.network": "structural"},
    "stock": {"autoencoder.implementation": "monai"},
    "offload": {f"{TRAINING}.use_gradient_checkpointing_offload": True, f"{TRAINING}.batch_size": 2},
    "slabs": {f"{TRAINING}.slab_rows": 4},
    "strides": {"autoencoder.strides": ((2, 2, 1),), f"{TRAINING}.slab_rows": 4},
}
STAGE_2 = {
    "plain": {"ldm.training.use_gradient_checkpointing": False},
    "checkpointed": {"ldm.training.use_gradient_checkpointing": True, "ldm.training.pixel_loss.weight": 0.1},
}
UNET = {"ldm.unet.num_channels": (16, 32), "ldm.unet.attention_levels": (False, True), "ldm.training.batch_size": 2}


def make(changes):
    return HIGH_RES.with_overrides({**GRID, **UNET, **changes})


@pytest.mark.parametrize(
    ("stage", "changes"),
    [*(("autoencoder", c) for c in STAGE_1.values()), *(("ldm", c) for c in STAGE_2.values())],
    ids=[*(f"autoencoder-{name}" for name in STAGE_1), *(f"ldm-{name}" for name in STAGE_2)],
)
def test_prediction_equals_the_tracked_real_step_within_1_percent(stage, changes, monkeypatch):
    monkeypatch.setattr("models.lean.checkpointing.MIN_OFFLOAD_BYTES", 1024)
    settings = make(changes)
    with tracked_step(settings, stage) as (_, predicted):
        pass
    with tracked_step(settings, stage, fake=False) as (_, real):
        pass
    assert predicted.peak["device"] == pytest.approx(real.peak["device"], rel=0.01)
    assert predicted.peak["host"] == real.peak["host"]
    assert (real.peak["host"] > 0) == (tier_of(settings, stage) == "offload")
    assert predicted.flops == real.flops


def test_a_prediction_for_a_cpu_follows_its_precision():
    cases: list[Any] = [{}, {"device.mixed_precision": True}, STAGE_1["float16"]]
    settings = [make({**changes, "device.type": "cpu"}) for changes in cases]
    peaks = [predict_step(one, "autoencoder").required_bytes for one in settings]
    assert peaks[0] == peaks[1] != peaks[2]


def test_breakdown_adds_up_to_the_peak_and_names_what_trains():
    changes = {f"{TRAINING}.ema_decay": 0.99, f"{TRAINING}.slab_rows": 4}
    prediction = predict_step(make({**changes, f"{TRAINING}.optimizer": "adam"}), "autoencoder")
    assert sum(prediction.breakdown.values()) == prediction.peak_allocated_bytes
    parameters, gradients = prediction.breakdown["parameters"], prediction.breakdown["gradients"]
    assert prediction.breakdown["optimizer"] == pytest.approx(2 * parameters, rel=0.01)
    assert 0 < gradients <= parameters
    assert 0 < prediction.breakdown["ema"] < parameters  # the discriminator is not averaged
    assert any(part["module"].startswith("autoencoder.decoder") for part in prediction.largest)
    assert prediction.phase in prediction.phase_peaks
    assert prediction.phase_peaks[prediction.phase] == prediction.peak_allocated_bytes
    assert {"validation", "reconstruct.py"} == set(prediction.run_peaks) <= set(prediction.phase_peaks)
    assert prediction.required_bytes >= prediction.run_peaks["validation"]["reserved_bytes"]
    assert prediction.traffic_bytes > 0 < prediction.kernels
    assert prediction.tier == "slabs"
    assert prediction.peak_allocated_bytes <= prediction.peak_reserved_expandable_bytes
    assert Prediction.from_json(json.loads(json.dumps(prediction.to_json()))).to_json() == prediction.to_json()


def test_offload_moves_bytes_from_the_device_to_the_host():
    knob, grid = f"{TRAINING}.use_gradient_checkpointing_offload", {"data.voxel_size": (128, 128, 64)}
    kept, moved = (predict_step(make({knob: on, **grid}), "autoencoder", whole_run=False) for on in (False, True))
    assert BUS_COPY in {part.kind for part in moved.work_parts} > {part.kind for part in kept.work_parts}
    assert kept.host_bytes == 0 < moved.host_bytes
    assert moved.peak_allocated_bytes < kept.peak_allocated_bytes
    assert moved.flops["backward"] == kept.flops["backward"]
    # Volumes that upsampling made are computed again rather than copied.
    assert 0 < moved.flops["recompute"] - kept.flops["recompute"] < 0.01 * kept.flops["forward"]


def test_compute_counts_all_micro_batches_of_an_update_and_memory_their_gradients():
    one, four = (accumulated("adam", number) for number in (1, 4))
    assert four.flops["total"] == 4 * one.flops["total"]
    assert one.breakdown["gradients"] < 0.1 * one.breakdown["parameters"]
    assert four.breakdown["gradients"] == pytest.approx(four.breakdown["parameters"], rel=0.01)


def test_muon_works_once_per_update_and_keeps_one_state_per_weight_of_a_kernel():
    (one, four), (without, _) = ([accumulated(name, number) for number in (1, 4)] for name in ("muon", "adam"))
    of_muon = one.flops["total"] - without.flops["total"]
    assert of_muon > 0
    assert four.flops["total"] == 4 * without.flops["total"] + of_muon
    assert one.kernels < four.kernels < 4 * one.kernels
    assert one.breakdown["parameters"] < one.breakdown["optimizer"] < without.breakdown["optimizer"]


def accumulated(optimizer, number):
    changes = {f"{TRAINING}.optimizer": optimizer, f"{TRAINING}.gradient_accumulation_steps": number}
    return predict_step(make(changes), "autoencoder", whole_run=False)


@pytest.mark.parametrize(
    ("shape", "level"),
    [
        ((1, 16, 256, 256, 64), 0),
        ((1, 16, 10, 256, 64), 0),
        ((1, 32, 129, 129, 33), 1),
        ((1, 32, 8, 128, 64), 1),
        ((1, 1, 65536, 64), 2),
        ((16, 16, 3, 3, 3), None),
        ((8,), None),
    ],
)
def test_level_follows_from_the_shape(shape, level):
    assert level_of(shape, (256, 256, 64)) == level


def test_levels_of_a_padded_latent_are_counted_from_the_padded_grid(tiny_values):
    tiny_values["data"]["voxel_size"] = [42, 74, 42]
    tiny_values["ldm"]["unet"] |= {"attention_levels": [True, True]}
    settings = Settings.model_validate(tiny_values)
    # The latent of 21x37x21 is padded to multiples of 2.
    shapes = [(1, 3, 21, 37, 21), (1, 16, 22, 38, 22), (1, 32, 11, 19, 11)]
    assert [level_of(shape, settings.unet_grid) for shape in shapes] == [0, 0, 1]


def test_tiers_follow_from_the_knobs():
    tiers = {name: tier_of(make(changes), "autoencoder") for name, changes in STAGE_1.items()}
    lean = {name: name for name in ("plain", "checkpointed", "offload", "slabs")}
    # What MONAI's blocks checkpoint counts as checkpointed.
    assert tiers == {**lean, "float16": "checkpointed", "stock": "checkpointed", "strides": "slabs"}
    assert tier_of(make({**STAGE_1["plain"], **STAGE_1["stock"]}), "autoencoder") == "stock"
    assert tier_of(make({}), "ldm") == "plain"


def test_worker_process_answers_many_questions_and_says_what_went_wrong(monkeypatch):
    settings = make({})
    with Predictor(workers=1) as predictor:
        first = predictor.predict(settings, "autoencoder")
        with pytest.raises(PredictionError, match="unknown stage"):
            predictor.predict(settings, "nonsense")  # type: ignore[arg-type]
        second = predictor.predict(settings, "autoencoder")
    assert first.peak_allocated_bytes == second.peak_allocated_bytes > 0
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Predictor(workers=1) as predictor, pytest.raises(PredictionError, match="exited with code 1"):
        predictor.predict(make({}), "autoencoder")


def test_buckets_of_several_gpus_hold_the_gradients_of_what_trains():
    """With accumulation all gradients exist at the peak already, and live in the buckets."""
    decoder = {f"{TRAINING}.trainable": "decoder", "autoencoder.pretrained": "autoencoder.safetensors"}
    knobs = {**decoder, f"{TRAINING}.gradient_accumulation_steps": 2}
    assert predict_step(make(knobs), "autoencoder", whole_run=False).bucket_bytes == 0
