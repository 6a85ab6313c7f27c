"""Step time beside stock MONAI: needs a quiet machine and a minute, so it runs with `-m slow`."""

import pytest

from benchmarks.step_times import VARIANTS, step_times
from settings import Settings

BARS = {"lean": 0.95, "checkpointing": 1.15, "slabs": 1.6, "slabs, nested": 1.6}


def test_every_variant_runs_and_is_timed():
    settings = Settings.model_validate({"autoencoder": {"num_channels": [8, 16], "attention_levels": [False, True]}})
    times = step_times(settings.autoencoder, grid=(8, 8, 8), repeats=1)
    assert list(times) == list(VARIANTS)
    assert all(seconds > 0 for seconds in times.values())


@pytest.mark.slow
def test_step_times_stay_below_their_bars():
    times = step_times(Settings.model_validate({}).autoencoder, repeats=5)
    ratios = {name: times[name] / times["stock"] for name in BARS}
    assert all(ratios[name] <= bar for name, bar in BARS.items()), ratios
