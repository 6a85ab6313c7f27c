"""Real steps on the CPU make the resident memory grow as predicted, and calibrated predictions are not below that."""

from pathlib import Path

import pytest

from memory.predict.prediction import Prediction
from memory.watch import calibration
from memory.watch.memory_watch import reset_resident_peak
from tests.memory.predict import resident

# High enough for torch to use oneDNN for every slab, and large enough for a few MiB of the heap not to matter.
GRID = (48, 96, 32)
WITHIN = 0.08
TIERS = ("stock", "plain", "checkpointed", "offload", "slabs")
BATCHES = [*((name, 1) for name in TIERS), ("checkpointed", 2), ("checkpointed", 3)]
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the peaks that Linux keeps")


@pytest.fixture(scope="module")
def rows():
    """Return the measured rows of each tier, in one process; the checkpointed step runs again."""
    return resident.measure([(name, GRID, batch) for name, batch in [*BATCHES, ("checkpointed", 1)]])


def test_the_peak_can_be_reset():
    assert reset_resident_peak()


def test_every_tier_takes_what_is_predicted_with_one_volume_or_several(rows):
    found = {(row["tier"], row["batch"]): row["resident"][1] / row["resident"][0] for row in rows}
    assert set(found) == set(BATCHES)
    assert all(abs(ratio - 1) < WITHIN for ratio in found.values()), found


def test_a_calibrated_prediction_is_never_below_what_a_full_step_then_takes(rows, tmp_path, monkeypatch):
    """Calibrated by one config; its next step, a larger batch of its tier, and a tier that was never measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, again = (row for row in rows if (row["name"], row["batch"]) == ("checkpointed", 1))
    calibration.record(predicted(first), "memory", *first["resident"])
    others = [row for row in rows if (row["name"], row["batch"]) in (("checkpointed", 2), ("stock", 1))]
    assert len(others) == 2
    for row in (again, *others):
        prediction = calibration.corrected(predicted(row))
        assert prediction.required_bytes * (1 + prediction.margin) >= row["resident"][0]
    own = calibration.corrected(predicted(again))
    assert 0 < own.margin < predicted(again).margin
    # Never below the prediction itself.
    assert own.correction == pytest.approx(max(1.0, first["resident"][0] / first["resident"][1]), rel=1e-3)


def predicted(row) -> Prediction:
    return Prediction.from_json(row["prediction"])
