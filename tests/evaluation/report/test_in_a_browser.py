"""The report in a real Chromium, at the width of a desk and of a phone, light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluation.report import write_report
from tests.browser import HEIGHT, Browser
from tests.report_run import make_run, volume_with_gradient
from training.validation.previews import ViewerVolume

pytestmark = pytest.mark.browser

ALL_TILES = "document.querySelectorAll('canvas').length === 3 * 2 + 2 + 2 * 3 + 9"
INPUT = "#reconstruction-gallery canvas[data-role=input]"
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def show(browser: Browser, run: Path, width: int = WIDTHS[0], is_dark: bool = False) -> None:
    browser.open(write_report(run), width, is_dark)
    browser.wait_for(ALL_TILES)


def box(browser: Browser, selector: str) -> dict[str, float]:
    return browser.run(f"return document.querySelector({selector!r}).getBoundingClientRect().toJSON()")


def set_value(browser: Browser, name: str, value: Any, event: str = "input") -> None:
    browser.run(
        f"const e = document.getElementById({name!r}); e.value = {str(value)!r}; e.dispatchEvent(new Event({event!r}))"
    )


def pointer(browser: Browser, selector: str, points: list[tuple[float, float]]) -> None:
    """Press the mouse at the first point, move to the others, and release; points are shares of the element."""
    browser.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
    frame = box(browser, selector)
    places = [(frame["left"] + x * frame["width"], frame["top"] + y * frame["height"]) for x, y in points]
    kinds = ["mousePressed", *["mouseMoved"] * (len(places) - 1), "mouseReleased"]
    for kind, (x, y) in zip(kinds, [*places, places[-1]], strict=True):
        event = {"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
        browser.protocol("Input.dispatchMouseEvent", event)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_dark", [False, True])
def test_first_screen_has_samples_beside_real_volumes(tmp_path, browser, width, is_dark):
    show(browser, make_run(tmp_path), width, is_dark)
    sample, real, nearest = (
        box(browser, f"#sample-gallery canvas[data-role={role}]") for role in ("sample", "real", "nearest")
    )
    for frame in (sample, real):
        assert 0 < frame["top"] < frame["bottom"] < HEIGHT
        assert frame["width"] > 100
    assert sample["right"] < real["left"], "side by side"
    assert sample["bottom"] < nearest["top"], "the nearest training volume is under its sample"
    assert abs(sample["left"] - nearest["left"]) < 2
    assert "class lesion" in browser.run("return document.querySelector('#sample-gallery').innerText")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == is_dark
    assert browser.errors() == browser.requests() == []

    browser.protocol("Emulation.setEmulatedMedia", {"media": "print"})
    shown = (
        "return ['#jump', '#viewer-bar', 'canvas', 'table'].map(s => document.querySelector(s).offsetParent !== null)"
    )
    assert browser.run(shown) == [False, False, True, True], "paper has pictures and tables and no controls"
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("width", WIDTHS)
def test_anisotropic_volume_has_true_proportions_in_every_plane(tmp_path, browser, width):
    extents = (16 * 1.0, 20 * 1.0, 24 * 4.0)
    show(browser, make_run(tmp_path, spacing_mm=(1.0, 1.0, 4.0)), width)
    tiles = browser.run(
        "return Array.from(document.querySelectorAll('canvas')).map(c => "
        "[Number(c.dataset.axis), c.getBoundingClientRect().width, c.getBoundingClientRect().height])"
    )
    assert {axis for axis, *_ in tiles} == {0, 1, 2}
    for axis, across_pixels, up_pixels in tiles:
        across, up = (extents[other] for other in range(3) if other != axis)
        # Browsers lay out in fractions of a pixel, so the shorter side may be off by one.
        assert across_pixels / up_pixels == pytest.approx(across / up, rel=1.5 / min(across_pixels, up_pixels))


def test_pixels_are_the_voxels_and_follow_the_window(tmp_path, browser):
    read = (
        f"const c = document.querySelector({INPUT!r});"
        "return Array.from(c.getContext('2d').getImageData(0, 19, 1, 1).data)"
    )
    expected = ViewerVolume.of(volume_with_gradient((16, 20, 24)), (1.0, 1.0, 1.0), "").voxels
    show(browser, make_run(tmp_path))
    for place in (0, 23):
        set_value(browser, "slice", place)
        value = int(expected[0, 0, place])
        assert browser.run(read) == [value, value, value, 255]
    # Dragging to the left narrows the window around its level; dragging down raises the level.
    pointer(browser, INPUT, [(0.5, 0.5), (0.4, 0.5), (0.1, 0.5)])
    width, level = browser.run("return [view.width, view.level]")
    assert (width < 0.99, level) == (True, 0.5)
    low, span = (0.5 - width / 2) * 255, width * 255
    value = min(255, max(0, round((int(expected[0, 0, 23]) - low) / span * 255)))
    assert browser.run(read)[0] == pytest.approx(value, abs=1)
    pointer(browser, INPUT, [(0.5, 0.2), (0.5, 0.4), (0.5, 0.8)])
    assert browser.run("return view.level") > 0.5
    browser.run("document.getElementById('reset').click()")
    assert browser.run("return [view.width, view.level]") == [1, 0.5]
    assert browser.errors() == []


def test_plane_pixels_sets_and_other_choices_draw_without_an_error(tmp_path, browser):
    show(browser, make_run(tmp_path))
    browser.run("for (const id of ['exact', 'log', 'smooth']) document.getElementById(id).click()")
    assert browser.run("return getComputedStyle(document.querySelector('canvas')).imageRendering") == "pixelated"
    set_value(browser, "plane", 0, "change")
    browser.wait_for("document.querySelector('#sample-gallery canvas').dataset.axis === '0'")
    set_value(browser, "gain", 8, "change")
    browser.wait_for("document.querySelector('#reconstruction-gallery').innerText.includes('error \\u00d7 8')")
    options = "Array.from(document.querySelectorAll('#reconstruction-set option')).map(o => o.textContent)"
    assert browser.run(f"return {options}") == ["newest", "step 20", "step 10"]
    set_value(browser, "reconstruction-set", "10", "change")
    # A click on a column of the gallery shows its three planes.
    browser.wait_for(ALL_TILES)
    pointer(browser, "#reconstruction-gallery .column:nth-child(2) canvas", [(0.5, 0.5)])
    browser.wait_for("document.getElementById('closer-name').textContent.includes('held_out_1.nii.gz, step 10')")
    assert browser.run("return document.querySelectorAll('#planes canvas[data-role=error]').length") == 3
    assert browser.errors() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_jump_links_reach_their_sections_and_charts_fill_their_width_with_titles_on_their_axes(
    tmp_path, browser, width
):
    show(browser, make_run(tmp_path), width)
    shown = browser.run("return Array.from(document.querySelectorAll('#jump a:not([hidden])')).map(a => a.textContent)")
    assert shown == ["samples", "figures", "reconstructions", "curves", "memory", "config", "environment"]
    ends = browser.run(
        "return Array.from(document.querySelectorAll('#jump a')).map(a => a.getBoundingClientRect().right)"
    )
    assert max(ends) <= width, "no link is cut off"
    for name in shown:
        browser.run(f"Array.from(document.querySelectorAll('#jump a')).find(a => a.textContent === {name!r}).click()")
        assert box(browser, f"#{name}")["top"] < HEIGHT
    charts = browser.run(
        "return Array.from(document.querySelectorAll('.chart')).map(c => { const s = c.querySelector('svg');"
        "return [...Array.from(c.querySelectorAll('.axis'), t => t.textContent),"
        " s.getBoundingClientRect().width / s.viewBox.baseVal.width]; })"
    )
    assert all(across == "step" and up and abs(scale - 1) < 0.1 for across, up, scale in charts)
    assert {"dB", "GiB"} <= {up for _, up, _ in charts}
    assert browser.errors() == []
    browser.open(write_report(make_run(tmp_path, name="bare", with_volumes=False)), width)
    browser.wait_for("document.querySelectorAll('#jump a[hidden]').length === 2")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_radiological_switch_mirrors_left_and_right_and_the_crosshair(tmp_path, browser, width):
    show(browser, make_run(tmp_path), width)
    read = (
        f"const c = document.querySelector({INPUT!r});"
        "const row = Array.from(c.getContext('2d').getImageData(0, 10, c.width, 1).data).filter((_, n) => n % 4 === 0);"
        "return [row, ['left', 'right'].map(s => c.parentElement.querySelector('.letter.' + s).textContent)]"
    )
    pixels, letters = browser.run(read)
    assert letters == ["L", "R"]
    browser.run("document.getElementById('radiological').click()")
    assert browser.run(read) == [pixels[::-1], ["R", "L"]]
    pointer(browser, INPUT, [(0.25, 0.5)])
    assert browser.run("return view.at[0]") == pytest.approx(0.75, abs=0.03)
    hair = f"return parseFloat(document.querySelector({INPUT!r}).parentElement.querySelector('.down').style.left)"
    assert browser.run(hair) == pytest.approx(25, abs=3)
    # The sagittal plane has no left and right.
    assert browser.run("return document.querySelector('#planes [data-axis=\"0\"] .letter.right').textContent") == "A"
    assert browser.errors() == []
