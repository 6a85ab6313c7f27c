"""The check of the data suggests the grid that a plan chooses."""

from __future__ import annotations

import pytest

from data.overview import stage_problems
from memory.planning.suggestion import suggested_values
from settings import Settings, look_up
from tests.memory.planning.pretended import SETS, planned


@pytest.mark.parametrize("name", SETS)
def test_with_the_networks_of_a_plan_its_grid_is_suggested(name):
    plan = planned(SETS[name], 1000)
    settings = plan.recommended.settings
    values = suggested_values(plan.fingerprint, settings)
    assert values is not None
    # Without its spacing a volume that is cropped would lose another part.
    assert ("data.spacing" in values) == (settings.data.resize == "crop_or_pad")
    for key, value in values.items():
        assert look_up(settings, key) == (tuple(value) if isinstance(value, list) else value), key


def test_both_ways_to_a_grid_are_among_the_sets():
    ways = {planned(found, 1000).recommended.settings.data.resize for found in SETS.values()}
    assert ways == {"resample", "crop_or_pad"}


@pytest.mark.parametrize("name", SETS)
def test_a_suggested_grid_is_accepted_by_both_stages(name):
    settings = Settings()
    assert stage_problems(settings, (37, 36, 36))
    values = suggested_values(planned(SETS[name], 1000).fingerprint, settings)
    assert values is not None
    assert stage_problems(settings.with_overrides(values), values["data.voxel_size"]) == []
