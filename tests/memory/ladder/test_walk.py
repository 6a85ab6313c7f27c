"""The ladder's order, promises and choice."""

from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml

from memory.kernels.gpus import WorkPart
from memory.ladder.rungs import build_rungs
from memory.ladder.walk import PredictedRung, config_with_reasons, describe_ladder, next_same_mathematics_rung, walk
from memory.predict.prediction import GIB, Prediction, Predictor
from settings import known_keys, load_settings
from settings.load import validate
from tests.conftest import ROOT

PRESETS = {path.stem: load_settings(path) for path in sorted((ROOT / "configs").glob("*.yaml"))}
TRAINING = "autoencoder.training"
HEAVY = {
    "autoencoder.implementation": "monai",
    "autoencoder.num_channels": (32, 64, 128),
    "autoencoder.attention_levels": (False, True, True),
    f"{TRAINING}.batch_size": 4,
    f"{TRAINING}.gradient_accumulation_steps": 2,
    f"{TRAINING}.use_gradient_checkpointing": False,
    f"{TRAINING}.use_perceptual_loss": True,
    f"{TRAINING}.discriminator.num_layers_d": 3,
    f"{TRAINING}.discriminator.num_channels": 32,
    "device.mixed_precision": False,
}


def found(rung: PredictedRung | None) -> PredictedRung:
    assert rung is not None
    return rung


def heavy(**changes):
    return PRESETS["high_res"].with_overrides({**HEAVY, **changes})


def test_default_order_is_the_same_mathematics_first_then_least_harm():
    names = [rung.name for rung in build_rungs(heavy(), "autoencoder", "lossless-first")]
    assert names == [
        "as configured",
        "SDPA and lean blocks",
        "micro-batch 2",
        "micro-batch 1",
        "checkpointing, 1 of 3 levels",
        "checkpointing, 2 of 3 levels",
        "checkpointing, 3 of 3 levels",
        "nested checkpointing",
        *(f"slabs of {rows} rows" for rows in (32, 16)),
        "offload",
        *(f"offload, slabs of {rows} rows" for rows in (32, 16)),
        "1 of 3 levels in host memory",
        "perceptual loss one slice at a time",
        "mixed precision",
        "no perceptual loss",
        "smaller discriminator",
        "no attention at level 1",
        "no attention",
        "channels [24, 48, 96]",
        "channels [16, 32, 64]",
        "channels [8, 16, 32]",
        "grid 128x128x64",
        "grid 64x64x64",
        "grid 32x32x32",
        "grid 16x16x16",
    ]


def test_guide_order_follows_the_guide():
    names = [rung.name for rung in build_rungs(heavy(), "autoencoder", "guide")]
    landmarks = ["mixed precision", "micro-batch 1", "no perceptual loss", "channels [16, 32, 64]", "checkpointing"]
    assert [name for name in names if name in landmarks] == landmarks
    assert names.index("checkpointing") < names.index("grid 128x128x64") < names.index("offload")


ALL = {**PRESETS, "heavy": heavy(**{"ldm.training.pixel_loss.weight": 0.1, "ldm.latents.cache": "none"})}


@pytest.mark.parametrize("stage", ["autoencoder", "ldm"])
@pytest.mark.parametrize("name", ALL)
def test_rungs_keep_the_batch_and_those_with_the_same_mathematics_change_only_keys_with_that_promise(name, stage):
    settings = ALL[name]
    promises = {name: field.json_schema_extra["promise"] for name, field in known_keys() if field.json_schema_extra}
    effective = settings.training_of(stage).samples_per_rank
    for order in ("lossless-first", "guide"):
        rungs = build_rungs(settings, stage, order)
        same = [rung for rung in rungs if rung.same_mathematics]
        assert len(rungs) > 4
        assert order == "guide" or rungs[: len(same)] == same
        for above, rung in pairwise(rungs):
            assert not rung.same_mathematics or {promises[key] for key in rung.all_changes} == {"same mathematics"}
            assert rung.settings.training_of(stage).samples_per_rank == effective
            assert rung.settings == above.settings.with_overrides(rung.changes) != above.settings
            assert rung.settings == settings.with_overrides(rung.all_changes)


def test_next_rung_leaves_the_mathematics_alone_until_none_is_left():
    settings, seen = heavy(), []
    while (rung := next_same_mathematics_rung(settings, "autoencoder")) is not None:
        seen.append(rung.name)
        settings = rung.settings
        assert len(seen) < 40
    assert seen[:3] == ["SDPA and lean blocks", "micro-batch 2", "micro-batch 1"]
    assert seen[-1] == "perceptual loss one slice at a time"
    assert not settings.device.mixed_precision


BLANK = Prediction(
    stage="autoencoder",
    tier="plain",
    peak_allocated_bytes=0,
    peak_reserved_bytes=0,
    phase="generator backward",
    largest=[{"module": "autoencoder.decoder.blocks.12", "bytes": GIB, "shape": [1, 32, 256, 256, 64], "category": ""}],
    flops={"total": 100},
    margin=0.1,
)


class FakePredictor(Predictor):
    """Answers from the knobs, so that the walk can be tested without a process."""

    def __init__(self, workers, without_triton):
        pass

    def close(self):
        pass

    def submit(self, settings, stage):
        training = settings.autoencoder.training
        size = 40.0 * training.batch_size / 4
        size /= 2 if training.checkpoints_blocks else 1
        size /= (1 + 32 / training.slab_rows) if training.slab_rows else 1
        size /= 2 if settings.device.mixed_precision else 1
        flops = 100 + 10 * training.checkpoints_blocks + 10 * training.nests_checkpoints + training.slab_rows // 32
        prediction = replace(
            BLANK,
            peak_allocated_bytes=round(size * GIB),
            peak_reserved_bytes=round(size * GIB),
            flops={"total": flops},
            work=[WorkPart("convolution", 0, True, nbytes=GIB, flops=flops * 10**12, kernels=1).to_json()],
            max_steps=1000,
        )
        done: Future[Prediction] = Future()
        done.set_result(prediction)
        return done


@pytest.fixture(autouse=True)
def _fake_predictor(monkeypatch):
    monkeypatch.setattr("memory.ladder.walk.Predictor", FakePredictor)


def test_walk_names_the_first_and_the_fastest_and_stops_before_changing_the_mathematics():
    progress = []
    ladder = walk(heavy(), "autoencoder", 6 * GIB, progress=lambda *values: progress.append(values))
    assert found(ladder.first).rung.name == "checkpointing, 1 of 3 levels"
    assert found(ladder.fastest).seconds == min(step.seconds for step in ladder.rungs if step.fits)
    assert all(step.rung.same_mathematics for step in ladder.rungs)
    assert [done for done, _, _ in progress] == list(range(1, len(ladder.rungs) + 1))


def test_recommended_rung_leaves_its_margin_when_one_does():
    # Checkpointing needs 5.5 GiB with the context, and 10 % of its 5 GiB as margin.
    tight, roomy = (walk(heavy(), "autoencoder", round(gib * GIB)) for gib in (5.8, 6.1))
    assert found(tight.fastest).rung.name == found(roomy.fastest).rung.name == "checkpointing, 1 of 3 levels"
    assert roomy.recommended == roomy.fastest
    assert tight.recommended != tight.fastest
    assert found(tight.recommended).fits_with_margin


def test_each_row_of_a_walk_is_the_row_above_with_its_own_changes():
    """Also below slabs that were left out: what they save must not be put down to the next rung."""
    settings = heavy()
    for budget in (4, 6, 8):
        ladder = walk(settings, "autoencoder", budget * GIB)
        for above, step in pairwise(ladder.rungs):
            assert step.rung.changes
            assert step.rung.settings == above.rung.settings.with_overrides(step.rung.changes)
            assert step.rung.settings == settings.with_overrides(step.rung.all_changes)
    assert [step.rung.name for step in ladder.rungs][-1] == "perceptual loss one slice at a time"
    # Of a family, later rungs are skipped once one is known to fit; two are predicted at a time.
    names = [step.rung.name for step in walk(settings, "autoencoder", 6 * GIB).rungs]
    assert "checkpointing, 1 of 3 levels" in names
    assert "checkpointing, 3 of 3 levels" not in names


def test_budget_out_of_reach_says_the_smallest_and_what_holds_it():
    ladder = walk(heavy(), "autoencoder", GIB // 4)
    assert ladder.recommended is None
    last_resort = found(walk(heavy(), "autoencoder", round(1.3 * GIB)).recommended)
    assert (last_resort.rung.name, last_resort.rung.same_mathematics) == ("mixed precision", False)
    text = describe_ladder(ladder)
    assert "Nothing on the ladder fits 0.25 GiB" in text
    assert "autoencoder.decoder.blocks.12" in text


def test_written_config_is_complete_and_carries_the_reasons():
    ladder = walk(heavy(), "autoencoder", 6 * GIB)
    text = config_with_reasons(ladder, "configs/heavy.yaml")
    assert validate(yaml.safe_load(text)) == found(ladder.recommended).rung.settings
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert any("configs/heavy.yaml changed to fit 6 GiB" in line for line in head)
    assert any(f"{TRAINING}.batch_size: 1, was 4 (same mathematics)" in line for line in head)
