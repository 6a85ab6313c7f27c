"""The benchmark: a fair comparison, and a document that says where we are behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from data import Batch
from evaluation.benchmarks import measurements
from evaluation.benchmarks.document import document_text
from evaluation.benchmarks.reference_loop import KL_WEIGHT, ReferenceLoop
from evaluation.benchmarks.variants import STOCK, STOCK_CHECKPOINTED, VARIANTS, base_settings
from memory.predict import Predictor
from runtime.processes import Process
from settings import Settings
from training.autoencoder_step import AutoencoderStep

DOCS = Path(__file__).resolve().parents[3] / "docs"


def loop_settings(size: int, batch_size: int) -> Settings:
    """The settings with which our step optimises what the loop with our objective does."""
    training = {
        "batch_size": batch_size,
        # Ours is per voxel: the same objective as a sum with KL_WEIGHT.
        "kl_weight": KL_WEIGHT * size**3,
        "adversarial_weight": 0.01,
        "adversarial_start_step": 1,
        "use_gradient_checkpointing": False,
    }
    changes = {f"autoencoder.training.{name}": value for name, value in training.items()}
    settings = base_settings((size,) * 3, mixed_precision=False, channels=(8, 16))
    return settings.with_overrides({**changes, "device.type": "cpu"})


def gradients_of_one_step():
    """Gradients of our step and of a loop's, same weights, batch and noise, without an optimizer's sign steps."""
    settings = loop_settings(size=12, batch_size=2)
    loop = ReferenceLoop(settings, has_our_objective=True)
    ours = AutoencoderStep(settings, Process(torch.device("cpu")))
    assert ours.discriminator is not None
    ours.autoencoder.load_state_dict(loop.autoencoder.state_dict())
    ours.discriminator.load_state_dict(loop.discriminator.state_dict())
    image = torch.rand(2, 1, 12, 12, 12, generator=torch.Generator().manual_seed(3)) * 2 - 1
    batch = Batch(image, (0, 1), None, ("", ""))
    ours.backward([batch], step=1)
    s = settings.autoencoder
    noise = ours.noise.normal("latent", batch.positions, (s.latent_channels, *s.latent_grid(image.shape[2:])))
    reconstruction = loop.generator_pass(image, noise)
    loop.discriminator.zero_grad(set_to_none=True)
    loop.discriminator_pass(image, reconstruction)
    for network in ("autoencoder", "discriminator"):
        theirs = dict(getattr(loop, network).named_parameters())
        for name, parameter in getattr(ours, network).named_parameters():
            yield network, name, parameter.grad, theirs[name].grad


def test_the_loop_with_our_objective_has_our_gradients():
    compared = list(gradients_of_one_step())
    assert len(compared) > 40
    # Against the network's largest: biases in front of a norm have no gradient but rounding.
    for wanted in ("autoencoder", "discriminator"):
        largest = max(float(theirs.abs().max()) for network, _, _, theirs in compared if network == wanted)
        for network, name, ours, theirs in compared:
            if network == wanted:
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5 * largest, msg=f"{name} differs")


def test_default_attention_needs_its_matrix():
    """4,096 positions: one matrix in bf16 is 32 MiB, and every attention block keeps at least one for backward."""
    settings = base_settings((32, 32, 32), mixed_precision=True, channels=(8, 16))
    peak = measurements.default_attention_peak(settings.with_overrides(VARIANTS[0].changes))["peak_allocated_bytes"]
    assert peak > 4 * 4096**2 * 2


def test_steps_are_timed_in_turn_and_predicted_on_the_same_settings(monkeypatch):
    asked: list[Settings] = []

    def predict(settings, progress):
        asked.append(settings)
        return {variant.name: {"peak_allocated_bytes": 1 << 20} for variant in VARIANTS}

    monkeypatch.setattr(measurements, "_predicted", predict)
    turns: list[str] = []
    rows = measurements.measure_steps((16, 16, 16), rounds=1, progress=turns.append, channels=(8, 16))
    names = [variant.name for variant in VARIANTS]
    assert turns == [f"{name}, round {number}" for number in range(2) for name in names]
    assert [row["variant"] for row in rows] == names
    assert {row["variant"]: row["ratio"] for row in rows}[STOCK] == 1.0
    assert all(row["seconds"] > 0 for row in rows)
    assert asked == [base_settings((16, 16, 16), mixed_precision=False, channels=(8, 16))]


def test_the_document_shows_the_stored_figures():
    results = json.loads((DOCS / "benchmarks.json").read_text())
    assert document_text(results) == (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    names = [variant.name for variant in VARIANTS]
    assert list(dict.fromkeys(row["variant"] for row in results["peaks"])) == [measurements.REFERENCE, *names]


def test_predicted_figures_of_the_document_are_current():
    """Memory only, and the smallest grid of three rows: times are of the machine that the document names."""
    results = json.loads((DOCS / "benchmarks.json").read_text())
    stored = {row["variant"]: row for row in results["peaks"] if row["grid"] == [64, 64, 64]}
    settings = base_settings((64, 64, 64), mixed_precision=True)
    chosen = [variant for variant in VARIANTS if variant.name in (STOCK_CHECKPOINTED, "ours, checkpointing")]
    with Predictor(2) as predictor, measurements._fresh_processes() as processes:
        reference = processes.submit(measurements._track_reference, settings)
        asked = {v.name: predictor.submit(settings.with_overrides(v.changes), "autoencoder") for v in chosen}
        for name, answer in asked.items():
            assert answer.result().peak_allocated_bytes == stored[name]["peak_allocated_bytes"]
            assert answer.result().flops["total"] == stored[name]["flops"]
        peak = stored[measurements.REFERENCE]["peak_allocated_bytes"]
        assert reference.result()["peak_allocated_bytes"] == pytest.approx(peak, abs=1024)


def test_document_says_where_we_are_behind():
    rows = [
        {"grid": [64, 64, 64], "variant": v.name, "is_ours": v.is_ours, "seconds": 1.0, "flops": 1}
        | {"peak_allocated_bytes": 3 << 30, "ratio": 1.5 if v.is_ours else 1.0}
        for v in VARIANTS
    ]
    machine = {"processor": "x", "torch": "2", "python": "3.11"}
    text = document_text({"machine": machine, "peaks": rows, "steps": rows})
    assert f"behind {STOCK_CHECKPOINTED}" in text
    assert "| **ours, lean blocks** | 3.00 | 1.00 | 1.50 | behind stock MONAI, SDPA |" in text
