"""The report in a real Chromium, at the width of a desk and of a phone, light and dark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from evaluation.report import write_report
from tests.browser import Browser
from tests.report_run import make_run, volume_with_gradient
from training.validation.previews import ViewerVolume

pytestmark = pytest.mark.browser

HEIGHT = 900
SCREENS = [(1280, False), (1280, True), (390, False), (390, True)]
ALL_TILES = "document.querySelectorAll('canvas').length === 3 * 2 + 2 + 2 * 3 + 9"


@pytest.fixture(scope="module")
def screen() -> Iterator[Callable[[int, bool, Path], Browser]]:
    """Show the report of a run in the browser of a size and a scheme, which is opened once."""
    open_ones: dict[tuple[int, bool], Browser] = {}
    with ExitStack() as stack:

        def show(width: int, is_dark: bool, run: Path) -> Browser:
            if (width, is_dark) not in open_ones:
                open_ones[width, is_dark] = stack.enter_context(Browser(width, HEIGHT, is_dark))
            browser = open_ones[width, is_dark]
            browser.errors(), browser.requests()  # forget those of earlier tests
            browser.open(write_report(run))
            browser.wait_for(ALL_TILES)
            return browser

        yield show


def box(browser: Browser, selector: str) -> dict[str, float]:
    return browser.run(
        f"const b = document.querySelector({selector!r}).getBoundingClientRect();"
        "return {left: b.left, right: b.right, top: b.top, bottom: b.bottom, width: b.width, height: b.height}"
    )


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


@pytest.mark.parametrize(("width", "is_dark"), SCREENS)
def test_first_screen_has_samples_beside_real_volumes(tmp_path, screen, width, is_dark):
    browser = screen(width, is_dark, make_run(tmp_path))
    sample = box(browser, "#sample-gallery canvas[data-role=sample]")
    real = box(browser, "#sample-gallery canvas[data-role=real]")
    nearest = box(browser, "#sample-gallery canvas[data-role=nearest]")
    assert 0 < sample["top"] < sample["bottom"] < HEIGHT
    assert 0 < real["top"] < real["bottom"] < HEIGHT
    assert sample["right"] < real["left"], "side by side"
    assert sample["bottom"] < nearest["top"], "the nearest training volume is under its sample"
    assert abs(sample["left"] - nearest["left"]) < 2
    assert min(sample["width"], real["width"]) > 100
    assert "class lesion" in browser.run("return document.querySelector('#sample-gallery').innerText")

    assert browser.run("return document.documentElement.scrollWidth") <= width
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == is_dark
    assert browser.errors() == []
    outside = [url for url in browser.requests() if url.startswith(("http:", "https:", "ws"))]
    assert outside == [], "the page asked the network"


@pytest.mark.parametrize("width", [1280, 390])
def test_anisotropic_volume_has_true_proportions_in_every_plane(tmp_path, screen, width):
    extents = (16 * 1.0, 20 * 1.0, 24 * 4.0)
    browser = screen(width, False, make_run(tmp_path, spacing_mm=(1.0, 1.0, 4.0)))
    tiles = browser.run(
        "return Array.from(document.querySelectorAll('canvas')).map(c => "
        "[Number(c.dataset.axis), c.getBoundingClientRect().width, c.getBoundingClientRect().height])"
    )
    assert {axis for axis, *_ in tiles} == {0, 1, 2}
    for axis, across_pixels, up_pixels in tiles:
        across, up = (extents[other] for other in range(3) if other != axis)
        # Browsers lay out in fractions of a pixel, so the shorter side may be off by one.
        assert across_pixels / up_pixels == pytest.approx(across / up, rel=1.5 / min(across_pixels, up_pixels))


def test_pixels_are_the_voxels_and_follow_the_window(tmp_path, screen):
    read = (
        "const c = document.querySelector('#reconstruction-gallery canvas[data-role=input]');"
        "return Array.from(c.getContext('2d').getImageData(0, 19, 1, 1).data)"
    )
    expected = ViewerVolume.of(volume_with_gradient((16, 20, 24)), (1.0, 1.0, 1.0), "").voxels
    browser = screen(1280, False, make_run(tmp_path))
    for place in (0, 23):
        set_value(browser, "slice", place)
        value = int(expected[0, 0, place])
        assert browser.run(read) == [value, value, value, 255]

    # Dragging to the left narrows the window around its level; dragging down raises the level.
    tile = "#reconstruction-gallery canvas[data-role=input]"
    pointer(browser, tile, [(0.5, 0.5), (0.4, 0.5), (0.1, 0.5)])
    width, level = browser.run("return [view.width, view.level]")
    assert width < 0.99
    assert level == 0.5
    low, span = (0.5 - width / 2) * 255, width * 255
    value = min(255, max(0, round((int(expected[0, 0, 23]) - low) / span * 255)))
    assert browser.run(read)[0] == pytest.approx(value, abs=1)
    pointer(browser, tile, [(0.5, 0.2), (0.5, 0.4), (0.5, 0.8)])
    assert browser.run("return view.level") > 0.5
    browser.run("document.getElementById('reset').click()")
    assert browser.run("return [view.width, view.level]") == [1, 0.5]
    assert browser.errors() == []


def test_plane_pixels_sets_and_other_choices_draw_without_an_error(tmp_path, screen):
    browser = screen(1280, False, make_run(tmp_path))
    rendering = "return getComputedStyle(document.querySelector('canvas')).imageRendering"
    assert browser.run(rendering) == "auto"
    browser.run("for (const id of ['exact', 'log', 'smooth']) document.getElementById(id).click()")
    assert browser.run(rendering) == "pixelated"
    set_value(browser, "plane", 0, "change")
    browser.wait_for("document.querySelector('#sample-gallery canvas').dataset.axis === '0'")
    set_value(browser, "gain", 8, "change")
    browser.wait_for("document.querySelector('#reconstruction-gallery').innerText.includes('error \\u00d7 8')")
    choices = browser.run(
        "return Array.from(document.querySelectorAll('#reconstruction-set option')).map(o => o.textContent)"
    )
    assert choices == ["newest", "step 20", "step 10"]
    set_value(browser, "reconstruction-set", "10", "change")
    # A click on a column of the gallery shows its three planes.
    browser.wait_for(ALL_TILES)
    pointer(browser, "#reconstruction-gallery .column:nth-child(2) canvas", [(0.5, 0.5)])
    browser.wait_for("document.getElementById('closer-name').textContent.includes('held_out_1.nii.gz, step 10')")
    assert browser.run("return document.querySelectorAll('#planes canvas[data-role=error]').length") == 3
    # Drawn for the width they have: no chart is scaled down to fit.
    scales = browser.run(
        "return Array.from(document.querySelectorAll('.chart svg'))"
        ".map(s => s.getBoundingClientRect().width / s.viewBox.baseVal.width)"
    )
    assert all(abs(scale - 1) < 0.1 for scale in scales)
    assert browser.errors() == []


@pytest.mark.parametrize("width", [1280, 390])
def test_jump_links_reach_their_sections_and_axes_have_titles(tmp_path, screen, width):
    browser = screen(width, False, make_run(tmp_path))
    shown = browser.run("return Array.from(document.querySelectorAll('#jump a:not([hidden])')).map(a => a.textContent)")
    assert shown == ["samples", "figures", "reconstructions", "curves", "memory", "config", "environment"]
    for name in shown:
        browser.run(f"Array.from(document.querySelectorAll('#jump a')).find(a => a.textContent === {name!r}).click()")
        assert box(browser, f"#{name}")["top"] < HEIGHT
    found = browser.run(
        "return Array.from(document.querySelectorAll('.chart'))"
        ".map(c => Array.from(c.querySelectorAll('.axis'), t => t.textContent))"
    )
    assert all(across == "step" and up for across, up in found)
    assert ["step", "dB"] in found
    assert ["step", "GiB"] in found
    assert browser.errors() == []

    browser.open(write_report(make_run(tmp_path, name="bare", with_volumes=False)))
    browser.wait_for("document.querySelectorAll('#jump a[hidden]').length === 2")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_radiological_switch_mirrors_left_and_right_and_the_crosshair(tmp_path, screen, width):
    browser = screen(width, False, make_run(tmp_path))
    tile = "#reconstruction-gallery canvas[data-role=input]"
    read = (
        f"const c = document.querySelector({tile!r});"
        "const row = Array.from(c.getContext('2d').getImageData(0, 10, c.width, 1).data).filter((_, n) => n % 4 === 0);"
        "return [row, ['left', 'right'].map(s => c.parentElement.querySelector('.letter.' + s).textContent)]"
    )
    pixels, letters = browser.run(read)
    assert letters == ["L", "R"]
    browser.run("document.getElementById('radiological').click()")
    assert browser.run(read) == [pixels[::-1], ["R", "L"]]
    pointer(browser, tile, [(0.25, 0.5)])
    assert browser.run("return view.at[0]") == pytest.approx(0.75, abs=0.03)
    hair = f"return parseFloat(document.querySelector({tile!r}).parentElement.querySelector('.down').style.left)"
    assert browser.run(hair) == pytest.approx(25, abs=3)
    # The sagittal plane has no left and right.
    assert browser.run("return document.querySelector('#planes [data-axis=\"0\"] .letter.right').textContent") == "A"
    assert browser.errors() == []


def test_paper_has_pictures_and_tables_and_no_controls(tmp_path, screen):
    browser = screen(1280, True, make_run(tmp_path))
    browser.protocol("Emulation.setEmulatedMedia", {"media": "print"})
    visible = (
        "return ['#jump', '#viewer-bar', 'canvas', 'table'].map(s => document.querySelector(s).offsetParent !== null)"
    )
    assert browser.run(visible) == [False, False, True, True]
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    browser.protocol("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
