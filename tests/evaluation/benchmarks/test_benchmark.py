"""The benchmark: a fair comparison, and a document that says where we are behind."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from data import Batch
from evaluation.benchmarks import peaks, speed
from evaluation.benchmarks.document import document_text, write_document
from evaluation.benchmarks.reference_loop import ReferenceLoop
from evaluation.benchmarks.variants import STOCK, STOCK_CHECKPOINTED, base_settings, variants
from memory.predict import Predictor
from runtime.processes import Process
from settings import Settings
from training.autoencoder_step import AutoencoderStep

QUIET = lambda _: None  # noqa: E731
MACHINE = {"processor": "x", "torch": "2", "python": "3.11"}
ROOT = Path(__file__).resolve().parents[3]


LEARNING_RATE, KL_WEIGHT = 5e-4, 1e-7


def loop_settings(size: int, batch_size: int) -> Settings:
    """The settings with which our step optimises what the loop with our objective does."""
    training = {
        "batch_size": batch_size,
        "learning_rate": LEARNING_RATE,
        "discriminator_learning_rate": LEARNING_RATE,
        "max_grad_norm": 0.0,
        # Ours is per voxel: the same objective as a sum with KL_WEIGHT.
        "kl_weight": KL_WEIGHT * size**3,
        "adversarial_weight": 0.01,
        "adversarial_start_step": 1,
        "use_gradient_checkpointing": False,
    }
    changes = {f"autoencoder.training.{name}": value for name, value in training.items()}
    settings = base_settings((size,) * 3, mixed_precision=False, channels=(8, 16))
    return settings.with_overrides({**changes, "device.type": "cpu"})


def gradients_of_one_step(has_our_objective: bool):
    """Gradients of our step and of a loop's, same weights, batch and noise, without an optimizer's sign steps."""
    settings = loop_settings(size=12, batch_size=2)
    loop = ReferenceLoop(settings, LEARNING_RATE, KL_WEIGHT, has_our_objective)
    ours = AutoencoderStep(settings, Process(torch.device("cpu")))
    assert ours.discriminator is not None
    ours.autoencoder.load_state_dict(loop.autoencoder.state_dict())
    ours.discriminator.load_state_dict(loop.discriminator.state_dict())
    image = torch.rand(2, 1, 12, 12, 12, generator=torch.Generator().manual_seed(3)) * 2 - 1
    batch = Batch(image, (0, 1), None, ("", ""))
    ours.backward([batch], step=1)
    s = settings.autoencoder
    noise = ours.noise.normal("latent", batch.positions, (s.latent_channels, *s.latent_grid(image.shape[2:])))
    reconstruction, _ = loop.generator_pass(image, True, noise)
    loop.discriminator.zero_grad(set_to_none=True)
    loop.discriminator_pass(image, reconstruction)
    for network in ("autoencoder", "discriminator"):
        theirs = dict(getattr(loop, network).named_parameters())
        for name, parameter in getattr(ours, network).named_parameters():
            yield network, name, parameter.grad, theirs[name].grad


def test_the_loop_with_our_objective_has_our_gradients():
    compared = list(gradients_of_one_step(has_our_objective=True))
    assert len(compared) > 40
    # Against the network's largest: biases in front of a norm have no gradient but rounding.
    for wanted in ("autoencoder", "discriminator"):
        largest = max(float(theirs.abs().max()) for network, _, _, theirs in compared if network == wanted)
        for network, name, ours, theirs in compared:
            if network == wanted:
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5 * largest, msg=f"{name} differs")


def test_the_tutorials_objective_is_another_one():
    """Its discriminator has a hundredth of our gradient, and the activation before the squares changes the rest."""
    ratios = [
        float(theirs.norm() / ours.norm())
        for network, name, ours, theirs in gradients_of_one_step(has_our_objective=False)
        if network == "discriminator" and name.endswith("weight") and ours.norm() > 1e-6
    ]
    assert ratios
    assert all(ratio < 0.05 for ratio in ratios)


def test_reference_loop_has_the_gradient_of_its_objective():
    settings = base_settings((12, 12, 12), mixed_precision=False, channels=(8, 16))
    loop = ReferenceLoop(settings, learning_rate=3e-3, kl_weight=0.0)
    image = torch.rand(1, 1, 12, 12, 12, generator=torch.Generator().manual_seed(3)) * 2 - 1
    losses = [float(loop.step(image, is_adversarial=number > 5)) for number in range(10)]
    assert losses[-1] < 0.8 * losses[0]


def test_variants_make_the_same_step():
    names = [variant.name for variant in variants()]
    assert {STOCK, STOCK_CHECKPOINTED} <= set(names)
    base = base_settings((16, 16, 16), mixed_precision=False)
    for variant in variants():
        base.with_overrides(variant.changes)


def test_default_attention_needs_its_matrix():
    """4,096 positions: one matrix in bf16 is 32 MiB, and every attention block keeps at least one for backward."""
    settings = base_settings((32, 32, 32), mixed_precision=True, channels=(8, 16))
    peak = peaks.default_attention_peak(settings.with_overrides(variants()[0].changes))["peak_allocated_bytes"]
    assert peak > 4 * 4096**2 * 2


def test_steps_are_timed_in_turn_and_their_peaks_are_of_the_same_settings(monkeypatch):
    built: list[Settings] = []
    asked: list[Settings] = []

    class Step(AutoencoderStep):
        def __init__(self, settings, process):
            built.append(settings)
            super().__init__(settings, process)

    def predict(settings, progress):
        asked.extend(settings.with_overrides(variant.changes) for variant in variants())
        return dict.fromkeys([variant.name for variant in variants()], 1 << 20)

    monkeypatch.setattr(speed, "AutoencoderStep", Step)
    monkeypatch.setattr(speed, "predict_variants", predict)
    rows = speed.step_times((16, 16, 16), rounds=1, progress=QUIET, channels=(8, 16))
    ratios = {row["variant"]: row["ratio"] for row in rows}
    assert ratios[STOCK] == 1.0
    assert [row["variant"] for row in rows] == [variant.name for variant in variants()]
    assert all(row["seconds"] > 0 for row in rows)
    assert [settings.with_overrides({"device.type": "auto"}) for settings in built] == asked


def test_a_name_is_one_setting_in_every_table():
    results = json.loads((ROOT / "docs" / "benchmarks.json").read_text())
    names = [variant.name for variant in variants()]
    assert [row["variant"] for row in results.get("steps", [])] in ([], names)
    assert list(dict.fromkeys(row["variant"] for row in results["peaks"])) == [peaks.REFERENCE, *names]


def test_the_document_shows_the_stored_figures():
    results = json.loads((ROOT / "docs" / "benchmarks.json").read_text())
    assert not results["is_quick"]
    assert document_text(results) == (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_predicted_figures_of_the_document_are_current():
    """Memory only, and the smallest grid of two rows: times are of the machine that the document names."""
    results = json.loads((ROOT / "docs" / "benchmarks.json").read_text())
    found = {row["variant"]: row for row in results["peaks"] if row["grid"] == [64, 64, 64]}
    settings = base_settings((64, 64, 64), mixed_precision=True)
    chosen = [variant for variant in variants() if variant.name in (STOCK_CHECKPOINTED, "ours, checkpointing")]
    with Predictor(2) as predictor:
        asked = {v.name: predictor.submit(settings.with_overrides(v.changes), "autoencoder") for v in chosen}
        for name, answer in asked.items():
            assert answer.result().peak_allocated_bytes == found[name]["peak_allocated_bytes"]
            assert answer.result().flops["total"] == found[name]["flops"]


def test_document_says_where_we_are_behind(tmp_path):
    grid = [64, 64, 64]
    names = [(variant.name, variant.is_ours) for variant in variants()]
    peak_rows = [
        {
            "grid": grid,
            "variant": name,
            "is_ours": ours,
            "peak_allocated_bytes": (9 - n) << 30,
            "host_bytes": 0,
            "flops": 1,
        }
        for n, (name, ours) in enumerate(names)
    ]
    step_rows = [
        {
            "variant": name,
            "is_ours": ours,
            "grid": grid,
            "peak_allocated_bytes": 3 << 30,
            "seconds": 1.0,
            "ratio": 1.5 if ours else 1.0,
        }
        for name, ours in names
    ]
    results = {
        "is_quick": True,
        "machine": MACHINE,
        "seconds": 1.0,
        "peaks": peak_rows,
        "steps": step_rows,
        "start": [{"what": "ours: --help", "seconds": 0.1}],
    }
    json.dumps(results)
    text = write_document(results, tmp_path).read_text()
    assert f"behind {STOCK_CHECKPOINTED}" in text
    assert "| **ours, lean blocks** | 3.00 | 1.00 | 1.50 | behind stock MONAI, SDPA |" in text
    assert "a smoke test, not results" in text
    assert (tmp_path / "benchmark_memory.png").stat().st_size > 1000
    assert "(benchmark_time.png)" in text
