"""The benchmark: its document shows the stored figures, and these are current."""

from __future__ import annotations

import json

import pytest

from evaluation.benchmarks import (
    REFERENCE,
    STOCK_CHECKPOINTED,
    VARIANTS,
    base_settings,
    document_text,
    fresh_processes,
    track_reference,
)
from memory.predict import Predictor
from tests.conftest import ROOT

ROWS = json.loads((ROOT / "docs" / "benchmarks.json").read_text())["peaks"]


def test_the_document_shows_the_stored_figures():
    assert document_text(ROWS) == (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert list(dict.fromkeys(row["variant"] for row in ROWS)) == [REFERENCE, *(variant.name for variant in VARIANTS)]


def test_predicted_figures_of_the_document_are_current():
    """The smallest grid of three rows."""
    stored = {row["variant"]: row for row in ROWS if row["grid"] == [64, 64, 64]}
    settings = base_settings((64, 64, 64))
    chosen = [variant for variant in VARIANTS if variant.name in (STOCK_CHECKPOINTED, "ours, checkpointing")]
    with Predictor(2) as predictor, fresh_processes() as processes:
        reference = processes.submit(track_reference, settings)
        asked = {v.name: predictor.submit(settings.with_overrides(v.changes), "autoencoder") for v in chosen}
        for name, answer in asked.items():
            assert answer.result().peak_allocated_bytes == stored[name]["peak_allocated_bytes"]
            assert answer.result().flops["total"] == stored[name]["flops"]
        peak = stored[REFERENCE]["peak_allocated_bytes"]
        assert reference.result()["peak_allocated_bytes"] == pytest.approx(peak, abs=1024)
