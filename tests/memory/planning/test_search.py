"""The search finds the same item as trying all of them, and asks for few."""

from __future__ import annotations

import pytest

from memory.kernels.gpus import check_gpu
from memory.planning.planner import last_that_fits, of_run
from settings import Settings
from tests.memory.planning.pretended import PretendedPredictor

COSTS = [float(n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)]
NEEDS = [0.5 + cost for cost in COSTS]


def searched(limit: float, start: int) -> tuple[int, int]:
    asked: list[int] = []

    def need(item: int) -> float:
        asked.append(item)
        return NEEDS[item]

    found = last_that_fits(range(len(NEEDS)), lambda item: COSTS[item], need, limit, start, fixed=0.5)
    assert len(asked) == len(set(asked)), "nothing is asked twice"
    return found, len(asked)


@pytest.mark.parametrize("start", [0, 5, 11, 40])
@pytest.mark.parametrize("limit", [0.1, 1.6, 2.0, 7.3, 20.0, 64.4, 64.6, 1000.0])
def test_last_item_within_the_limit_is_found(limit, start):
    expected = max((n for n, need in enumerate(NEEDS) if need <= limit), default=-1)
    assert searched(limit, start)[0] == expected


def test_few_items_are_asked_for():
    assert max(searched(limit, 6)[1] for limit in range(1, 70)) <= 4


def test_needs_that_are_equal_or_fall_do_not_mislead_the_search():
    needs = [662, 666, 673, 682, 695, 731, 784, 859, 959, 808, 808, 808]  # from 808 on, patches of one size
    costs = [number**3 for number in (16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 106)]
    found = last_that_fits(range(12), costs.__getitem__, needs.__getitem__, 752, start=12, fixed=537)
    assert needs[found] == 731


def test_hours_are_those_of_a_candidates_own_steps_and_of_the_volumes_it_holds_out():
    """Candidates share a prediction, so its own numbers of steps and validations may be another candidate's."""
    values = {"data": {"val_fraction": 0.1}, "autoencoder": {"training": {"max_steps": 1000, "validate_every": 300}}}
    settings, gpu = Settings.model_validate(values), check_gpu("RTX 4090")
    other = settings.with_overrides({"autoencoder.training.max_steps": 7})
    prediction = of_run(PretendedPredictor().submit(other, "autoencoder").result(), settings, "autoencoder", (45, 5))
    update = prediction.seconds_per_step(gpu)
    assert prediction.hours(gpu) * 3600 == pytest.approx(1000 * update + 4 * 5 * update)
