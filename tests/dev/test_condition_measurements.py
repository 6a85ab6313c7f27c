"""What is measured of conditions is written as it was found, section by section."""

from __future__ import annotations

import numpy as np

from dev.conditions.document import section_of_surfaces, section_of_task, sections_of
from dev.conditions.surfaces import GRID, surfaces
from dev.conditions.tasks import Result, Task, Way


def result(steps: int, right: float, shuffled: float, hidden: float) -> Result:
    l1 = {"right": right, "shuffled": shuffled, "hidden": hidden}
    return Result(Way(steps, 1.0), {told: {"l1": value, "psnr": 20.0} for told, value in l1.items()}, 0.0)


def test_gains_are_those_of_the_best_way_against_the_same_and_against_a_usual_sample():
    task = Task("Filling", {}, 7, ())
    title, text = section_of_task(task, [result(1, 0.06, 0.1, 0.08), result(12, 0.1, 0.12, 0.12)])
    assert title == "Filling"
    assert "| 1 | 1 | 20 | 1 | 0.0600 | 0.1000 | 0.0800 | 20.00 |" in text
    assert "With 1 step and guidance 1, L1 is 40.0 % lower with the right condition than with another's" in text
    assert "no condition has an L1 of 0.1200; 1 step and guidance 1 with the right one is 50.0 % below it." in text


def test_sections_are_found_again():
    surface_title, surface_text = section_of_surfaces({1.0: 0.2, 10.0: 0.5}, 9)
    found = sections_of(f"# Top\n\nwords\n\n## {surface_title}\n\n{surface_text}\n\n## Other\n\ntext\n")
    assert list(found) == [surface_title, "Other"]
    assert found[surface_title].strip() == surface_text
    assert "adds 0.300 to the IoU" in surface_text


def test_surfaces_are_thin_differ_and_depend_on_their_number_only():
    first, second = surfaces(0), surfaces(1)
    assert first.shape == GRID
    assert set(np.unique(first)) == {0.0, 1.0}
    assert 0.01 < first.mean() < 0.12
    assert np.array_equal(first, surfaces(0))
    assert not np.array_equal(first, second)
