"""Real steps on the CPU make the resident memory grow as predicted, and calibrated predictions are not below that."""

from pathlib import Path

import pytest

from memory.predict.prediction import Prediction
from memory.watch import calibration
from memory.watch.readings import reset_resident_peak
from tests.memory.predict import resident

# High enough for torch to use oneDNN for every slab.
SMALL, LARGER = (48, 96, 16), (48, 96, 20)
# Slabs take so little that on the small grid a few MiB of the heap would be a tenth of it.
OF_SLABS = (48, 96, 32)
WITHIN = 0.10
TIERS = ("stock", "plain", "checkpointed", "offload", "slabs")
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the peaks that Linux keeps")


@pytest.fixture(scope="module")
def rows():
    """Return the measured rows of each tier, in one process; the checkpointed step runs again, and on a larger grid."""
    asked = [(name, OF_SLABS if name == "slabs" else SMALL) for name in TIERS]
    asked += [("checkpointed", SMALL), ("checkpointed", LARGER)]
    return resident.measure(asked)


def test_the_peak_can_be_reset():
    assert reset_resident_peak()


def test_every_tier_takes_what_is_predicted(rows):
    found = {row["tier"]: row["resident"][1] / row["resident"][0] for row in rows}
    assert set(found) == set(TIERS)
    assert all(abs(ratio - 1) < WITHIN for ratio in found.values()), found


def test_a_calibrated_prediction_is_never_below_what_a_full_step_then_takes(rows, tmp_path, monkeypatch):
    """Calibrated by one config; its next step, a larger grid of its tier, and a tier that was never measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, again, larger = (row for row in rows if row["name"] == "checkpointed")
    calibration.record(predicted(first), first["resident"][0])
    for row in (again, larger, next(row for row in rows if row["name"] == "stock")):
        prediction = calibration.corrected(predicted(row))
        assert prediction.required_bytes * (1 + prediction.margin) >= row["resident"][0]
    own = calibration.corrected(predicted(again))
    assert 0 < own.margin < predicted(again).margin
    # Never below the prediction itself.
    assert own.correction == pytest.approx(max(1.0, first["resident"][0] / first["resident"][1]), rel=1e-3)


def predicted(row) -> Prediction:
    return Prediction.from_json(row["prediction"])
