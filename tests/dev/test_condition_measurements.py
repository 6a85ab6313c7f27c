"""What is measured of conditions is written as it was found, section by section."""

from __future__ import annotations

import numpy as np

from dev.conditions.document import section_of_surfaces, section_of_task, sections_of
from dev.conditions.surfaces import GRID, surfaces
from dev.conditions.tasks import Result, Task, Way


def result(steps: int, *networks: tuple[float, float, float]) -> Result:
    names = ("right", "shuffled", "hidden")
    found = [dict(zip(names, errors, strict=True)) for errors in networks]
    return Result(Way(steps, 1.0), tuple({k: {"l1": e, "psnr": 20.0} for k, e in one.items()} for one in found), 20)


def test_gains_are_said_for_each_way_each_network_and_against_a_usual_sample():
    task = Task("Filling", "fill", {}, 7, (), (1, 2))
    once, often = result(1, (0.06, 0.1, 0.08), (0.05, 0.1, 0.08)), result(12, (0.1, 0.12, 0.12), (0.1, 0.12, 0.12))
    title, text = section_of_task(task, [once, often])
    assert title == "Filling"
    assert "7 updates on an autoencoder of 1,000, 2 networks, 20 held-out volumes." in text
    assert "| 1 | 1 | 2 | 0.0550 | 0.1000 | 0.0800 | 20.00 |" in text
    assert (
        "1 step and guidance 1: L1 is 45.0 % lower with the right condition than with another's (40.0 %, 50.0 %)"
        in text
    )
    assert "and 31.2 % lower than with none" in text
    assert "is 54.2 % below 12 steps and guidance 1 with none, which has an L1 of 0.1200." in text


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
