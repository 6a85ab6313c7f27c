"""The report of a run: what it reads, what it shows, and that a real browser shows it without an error."""

from __future__ import annotations

import json
import math
import re
import time

import numpy as np
import pytest
import torch
from PIL import Image

from dev.tiny_config import TINY
from evaluation.previews import MAX_VOXELS, ViewerVolume, save_viewer_volumes, shown_grid
from memory.watch.run_record import ladder_position, write_memory_record
from report import write_comparison, write_report
from report.run_data import MAX_POINTS, read_run
from report.volumes import stored_volumes
from settings import Settings, UserError
from storage.run_folder import RunFolder
from tests.browser import Browser
from tests.report_run import make_run, volume_with_gradient


def page_data(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_viewer_volume_survives_the_file_exactly(tmp_path):
    voxels = np.random.default_rng(0).integers(0, 256, (5, 7, 9), dtype=np.uint8)
    run = RunFolder(tmp_path)
    save_viewer_volumes(run, "autoencoder", 3, {"input": ViewerVolume(voxels, (5, 7, 9))})
    (stored,) = stored_volumes(run)
    facts = stored.to_page()
    assert facts is not None
    with Image.open(stored.path) as picture:
        tiles = np.asarray(picture)
    for number in range(5):
        row, column = divmod(number, facts["columns"])
        np.testing.assert_array_equal(tiles[row * 7 : row * 7 + 7, column * 9 : column * 9 + 9], voxels[number])


@pytest.mark.parametrize("grid", [(256, 256, 64), (512, 512, 128), (16, 16, 16), (64, 64, 64)])
def test_large_volumes_are_shown_smaller_with_all_their_range(grid):
    shown = shown_grid(grid)
    assert math.prod(shown) <= MAX_VOXELS
    assert shown == grid or math.prod(shown) > MAX_VOXELS * 0.95
    volume = ViewerVolume.of(volume_with_gradient((80, 80, 90)))
    assert volume.grid == (80, 80, 90)
    assert volume.voxels.max() > 250
    assert volume.voxels.min() < 5


def test_report_shows_figures_curves_memory_and_differences(tmp_path):
    page = write_report(make_run(tmp_path)).read_text()
    data = page_data(page)
    titles = [chart["title"] for chart in data["curves"]]
    assert {"Reconstruction loss", "KL divergence", "Held-out PSNR, dB", "Diffusion loss"} <= set(titles)
    assert data["memory"][0]["rules"] == [{"label": "predicted", "value": 900 / 1024}]
    assert "23.00 dB" in page
    assert "stage 1: step 30 of 4" in page
    assert "1 of" in page
    assert "<td>seed</td><td>8</td><td>7</td>" in page
    assert "generator backward" in page
    assert "checkpointing, 1 of 2 levels" in page
    assert len(data["pictures"]) == 1 + 2 + 3, "the input is embedded once for both steps"


def test_spikes_survive_thinning_and_broken_values_break_the_line(tmp_path):
    folder = make_run(tmp_path, num_lines=5000, with_volumes=False)
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write(
            '{"stage": "autoencoder", "step": 5001, "kl": NaN}\n{"stage": "autoencoder", "step": 5002, "kl": 99}\n'
        )
        lines.write('{"stage": "autoencoder", "step": 50')
    curve = read_run(folder)["stages"][0]["curves"]["kl"]
    assert len(curve) <= MAX_POINTS + 2
    assert [5002, 99.0] in curve
    assert "NaN" not in write_report(folder).read_text()


def test_a_run_that_has_only_begun_has_a_report(tmp_path):
    folder = make_run(tmp_path, with_volumes=False)
    (folder / "metrics.jsonl").unlink()
    (folder / "environment.json").unlink()
    (folder / "memory_autoencoder.json").unlink()
    assert "not started" in write_report(folder).read_text()


def test_running_out_of_memory_is_shown_until_the_run_goes_on(tmp_path):
    folder = make_run(tmp_path, with_volumes=False)
    rung = {"name": "offload", "promise": "same mathematics"}
    report = {"stage": "autoencoder", "phase": "generator backward", "step": 30, "next_rung": rung}
    (folder / "oom_report.json").write_text(json.dumps(report))
    page = write_report(folder).read_text()
    assert "Ran out of memory in step 31, generator backward. Next rung: offload (same mathematics)." in page
    (folder / "oom_report.json").write_text(json.dumps({**report, "step": 20}))
    assert "Ran out of memory" not in write_report(folder).read_text()


def test_what_is_not_a_run_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no config\.yaml; give the folder of a run"):
        write_report(tmp_path)


def test_text_from_outside_never_becomes_markup(tmp_path):
    evil = "<img src=x onerror=alert(1)></script>'\""
    folder = make_run(tmp_path, data={**TINY["data"], "source": f"/data/{evil}"})
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**environment, "device": evil, evil: evil}))
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"stage": "autoencoder", "step": 31, evil: 1.0}) + "\n")
    page = write_report(folder).read_text()
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert "&lt;img src=x" in page


def test_report_is_small_and_quick(tmp_path):
    run = RunFolder(make_run(tmp_path, num_lines=20_000))
    noise = torch.rand(1, 256, 256, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for step in range(100, 1000, 100):
        volumes = {"input": ViewerVolume.of(noise), "reconstruction": ViewerVolume.of(noise.roll(step, 1))}
        save_viewer_volumes(run, "autoencoder", step, volumes)
    start = time.process_time()
    path = write_report(run.path)
    assert path.stat().st_size < 5_000_000
    assert time.process_time() - start < 3
    assert page_data(path.read_text())["sets"][0]["step"] == 900


def test_comparison_names_runs_and_what_differs(tmp_path):
    folders = [make_run(tmp_path, "first"), make_run(tmp_path, "second", seed=9)]
    page = write_comparison(folders, tmp_path / "comparison.html").read_text()
    charts = page_data(page)["curves"]
    assert [line["label"] for line in charts[0]["series"]] == ["first", "second"]
    assert "<td>seed</td><td>7</td><td>9</td>" in page
    assert "2 keys differ" in page


def test_ladder_position_tells_what_is_on_and_what_is_left(tmp_path):
    settings = Settings.model_validate(TINY).with_overrides({"autoencoder.training.use_gradient_checkpointing": True})
    states = {rung["name"]: rung["state"] for rung in ladder_position(settings, "autoencoder")}
    assert states["checkpointing"] == "taken"
    assert states["as configured"] == "here"
    assert states["offload"] == "left"
    record = json.loads(write_memory_record(tmp_path, settings, "ldm", None).read_text())
    assert record["prediction"] is None
    assert {"name": "checkpointing of the U-Net", "state": "left", "same_mathematics": True} in record["ladder"]


@pytest.mark.browser
@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (390, True)])
def test_report_works_in_a_real_browser(tmp_path, width, is_dark):
    path = write_report(make_run(tmp_path))
    with Browser(width, 900, is_dark) as browser:
        browser.open(path)
        browser.wait_for("document.querySelectorAll('#planes canvas').length === 9")
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.run("return document.querySelectorAll('#curve-charts path').length") >= 3

        # Drawn for the width they have: nothing is scaled down to fit.
        scales = browser.run(
            "return Array.from(document.querySelectorAll('.chart svg'))"
            ".map(s => s.getBoundingClientRect().width / s.viewBox.baseVal.width)"
        )
        assert all(abs(scale - 1) < 0.1 for scale in scales)

        # The slider changes the slice that is shown, and the pixel is the voxel's.
        read = (
            "const c = document.querySelector('[data-axis=\"2\"] canvas[data-role=input]');"
            "return Array.from(c.getContext('2d').getImageData(0, 19, 1, 1).data)"
        )
        move = (
            "const s = document.querySelector('[data-axis=\"2\"] input'); s.value = {};"
            "s.dispatchEvent(new Event('input'));"
        )
        expected = ViewerVolume.of(volume_with_gradient((16, 20, 24))).voxels
        for place in (0, 23):
            browser.run(move.format(place))
            value = int(expected[0, 0, place])
            assert browser.run(read) == [value, value, value, 255]

        # Samples, log scale, smoothing and another gain draw without an error.
        browser.run("for (const id of ['log', 'smooth']) document.getElementById(id).click()")
        browser.run("const g = document.getElementById('gain'); g.value = 8; g.dispatchEvent(new Event('change'))")
        options = browser.run("return Array.from(document.querySelectorAll('#set option')).map(o => o.textContent)")
        assert options == ["reconstruction, step 20", "reconstruction, step 10", "samples, step 5"]
        browser.run("const s = document.getElementById('set'); s.value = 2; s.dispatchEvent(new Event('change'))")
        browser.wait_for("document.querySelector('#planes canvas').dataset.role === 'sample 0'")
        background = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 200) == is_dark
        assert browser.errors() == []
        outside = [url for url in browser.requests() if url.startswith(("http:", "https:", "ws"))]
        assert outside == [], "the page asked the network"
