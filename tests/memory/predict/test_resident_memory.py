"""Real steps on the CPU make the resident memory of their process grow as predicted."""

from pathlib import Path

import pytest

from tests.memory.predict import resident

# High enough for torch to use oneDNN for every slab, and large enough for a few MiB of the heap not to matter.
GRID = (48, 96, 32)
TIERS = ("stock", "plain", "checkpointed", "offload", "slabs")
BATCHES = [*((name, 1) for name in TIERS), ("checkpointed", 2), ("checkpointed", 3)]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the peaks that Linux keeps")
def test_every_tier_takes_what_is_predicted_with_one_volume_or_several():
    rows = resident.measure([(name, GRID, batch) for name, batch in BATCHES])
    assert [(row["tier"], row["batch"]) for row in rows] == BATCHES
    ratios = [row["predicted"] / row["grown"] for row in rows]
    assert ratios == pytest.approx([1.0] * len(rows), abs=0.08)
