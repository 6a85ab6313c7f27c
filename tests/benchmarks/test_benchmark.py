"""The benchmark: fair contestants, real patches, and a document that says where we are not ahead."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import peaks, quality, speed
from benchmarks.document import write_document
from benchmarks.reference_loop import ReferenceLoop
from benchmarks.variants import STOCK, STOCK_CHECKPOINTED, base_settings, variants

pytest.importorskip("nilearn", reason="the real volumes come with nilearn (requirements-dev.txt)")
QUIET = lambda _: None  # noqa: E731
MACHINE = {"processor": "x", "threads": 2, "torch": "2", "python": "3.11"}


def test_patches_are_real_seeded_and_in_range():
    from benchmarks.real_volumes import patches

    first, again, other = patches(4, 16, seed=1), patches(4, 16, seed=1), patches(4, 16, seed=2)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, other)
    assert first.shape == (4, 1, 16, 16, 16)
    assert first.min() >= -1
    assert first.max() <= 1
    assert first.std() > 0.2, "a patch of background shows nothing"


def test_both_loops_begin_alike_and_see_the_same():
    result = quality.compare_quality(num_steps=2, size=12, channels=(8, 16), batch_size=1, progress=QUIET)
    assert [entry["step"] for entry in result["history"]] == [1, 2]
    for entry in result["history"]:
        assert abs(entry["ours"] - entry["reference"]) < 1.0


def test_reference_loop_has_the_gradient_of_its_objective():
    settings = base_settings((12, 12, 12), mixed_precision=False, channels=(8, 16))
    loop = ReferenceLoop(settings, learning_rate=3e-3, kl_weight=0.0)
    image = torch.rand(1, 1, 12, 12, 12, generator=torch.Generator().manual_seed(3)) * 2 - 1
    losses = [loop.step(image, is_adversarial=number > 5) for number in range(10)]
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < 0.8 * losses[0]


def test_variants_are_one_step_in_many_ways():
    names = [variant.name for variant in variants(8)]
    assert {STOCK, STOCK_CHECKPOINTED} <= set(names)
    base = base_settings((16, 16, 16), mixed_precision=False)
    for variant in variants(8):
        base.with_overrides(variant.changes, "autoencoder")


def test_default_attention_needs_its_matrix():
    """4,096 positions: one matrix in bf16 is 32 MiB, and every attention block keeps at least one for backward."""
    settings = base_settings((32, 32, 32), mixed_precision=True, channels=(8, 16))
    peak = peaks.default_attention_peak(settings.with_overrides(variants(8)[0].changes))["peak_allocated_bytes"]
    assert peak > 4 * 4096**2 * 2


def test_steps_are_timed_in_turn():
    rows = speed.step_times((16, 16, 16), rounds=1, progress=QUIET, channels=(8, 16))
    ratios = {row["variant"]: row["ratio"] for row in rows}
    assert ratios[STOCK] == 1.0
    assert len(rows) == len(variants(8))
    assert all(row["seconds"] > 0 for row in rows)


def test_document_says_where_we_are_behind(tmp_path):
    grid = [64, 64, 64]
    names = [(variant.name, variant.is_ours) for variant in variants(8)]
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
        {"variant": name, "is_ours": ours, "grid": grid, "seconds": 1.0, "ratio": 1.5 if ours else 1.0}
        for name, ours in names
    ]
    history = [{"step": 5, "ours": 20.0, "reference": 20.3}]
    results = {
        "is_quick": True,
        "machine": MACHINE,
        "seconds": 1.0,
        "peaks": peak_rows,
        "steps": step_rows,
        "quality": {
            "num_steps": 5,
            "patch": 8,
            "batch_size": 1,
            "history": history,
            "seconds": {"ours": 1.0, "reference": 2.0},
        },
        "start": [{"what": "ours: --help", "seconds": 0.1}],
    }
    json.dumps(results)
    text = write_document(results, tmp_path).read_text()
    assert f"behind {STOCK_CHECKPOINTED}" in text
    assert "Verdict: worse (-0.30 dB)" in text
    assert "for trying out, not for reading" in text
    assert (tmp_path / "benchmark_memory.png").stat().st_size > 1000
    assert "(benchmark_time.png)" in text
