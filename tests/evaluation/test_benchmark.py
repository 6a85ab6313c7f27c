"""The benchmark: its document shows the stored figures, and these are current."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from evaluation.benchmarks import MATRIX, STOCK_CHECKPOINTED, VARIANTS, base_settings, document_text, track_matrix
from memory.predict import Predictor
from tests.conftest import ROOT

ROWS = json.loads((ROOT / "docs" / "benchmarks.json").read_text())["peaks"]


def test_the_document_shows_the_stored_figures():
    assert document_text(ROWS) == (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert list(dict.fromkeys(row["variant"] for row in ROWS)) == [*VARIANTS]


@pytest.mark.usefixtures("shared_workers")
def test_predicted_figures_of_the_document_are_current():
    """The smallest grid of three rows."""
    stored = {row["variant"]: row for row in ROWS if row["grid"] == [64, 64, 64]}
    settings = base_settings((64, 64, 64))
    changed = {name: settings.with_overrides(VARIANTS[name]) for name in (STOCK_CHECKPOINTED, "ours, checkpointing")}
    processes = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with Predictor(2) as predictor, processes:
        matrix = processes.submit(track_matrix, settings.with_overrides(VARIANTS[MATRIX]))
        asked = {name: predictor.submit(one, "autoencoder") for name, one in changed.items()}
        for name, answer in asked.items():
            assert answer.result().peak_allocated_bytes == stored[name]["peak_allocated_bytes"]
            assert answer.result().flops["total"] == stored[name]["flops"]
        assert matrix.result()["peak_allocated_bytes"] == pytest.approx(
            stored[MATRIX]["peak_allocated_bytes"], abs=1024
        )
