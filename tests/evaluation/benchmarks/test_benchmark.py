"""The benchmark: a fair comparison, and a document that says where we are behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evaluation.benchmarks import measurements
from evaluation.benchmarks.document import document_text
from evaluation.benchmarks.variants import STOCK, STOCK_CHECKPOINTED, VARIANTS, base_settings
from memory.predict import Predictor
from settings import Settings

DOCS = Path(__file__).resolve().parents[3] / "docs"


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
