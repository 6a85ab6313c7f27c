"""The report of a run: what it reads and what it shows."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from evaluation.report import publish, write_comparison, write_report
from evaluation.report.page import page_of
from evaluation.report.run_data import MAX_POINTS, read_run, viewer_data
from runtime.files import RunFolder
from runtime.processes import Process
from tests.report_run import SPACING, make_run, volume_with_gradient
from tests.support.tiny_config import TINY
from training.recording import ELAPSED
from training.validation.previews import FACTS, MAX_VOXELS, ViewerVolume, save_viewer_volumes, shown_grid, viewer_folder


def page_data(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_viewer_volume_survives_the_file_exactly(tmp_path):
    voxels = np.random.default_rng(0).integers(0, 256, (5, 7, 9), dtype=np.uint8)
    run = RunFolder(tmp_path)
    save_viewer_volumes(run, "autoencoder", 3, {"input_0": ViewerVolume(voxels, (5, 7, 9), SPACING, "")})
    (path,) = viewer_folder(run).glob("*.png")
    with Image.open(path) as picture:
        facts, tiles = json.loads(picture.info[FACTS]), np.asarray(picture)
    for number in range(5):
        row, column = divmod(number, facts["columns"])
        np.testing.assert_array_equal(tiles[row * 7 : row * 7 + 7, column * 9 : column * 9 + 9], voxels[number])


def test_large_volumes_are_shown_smaller_with_all_their_range():
    assert 0.95 * MAX_VOXELS < math.prod(shown_grid((512, 512, 128))) <= MAX_VOXELS
    assert shown_grid((64, 64, 64)) == (64, 64, 64)
    volume = ViewerVolume.of(volume_with_gradient((80, 80, 90)), SPACING, "")
    assert (volume.grid, volume.voxels.min() < 5, volume.voxels.max() > 250) == ((80, 80, 90), True, True)


def test_report_shows_figures_curves_memory_and_differences(tmp_path):
    page = write_report(make_run(tmp_path)).read_text()
    data = page_data(page)
    titles = [chart["title"] for chart in data["curves"]]
    assert {"Reconstruction loss", "KL divergence", "Held-out PSNR, dB", "Diffusion loss"} <= set(titles)
    assert data["memory"][0]["rules"] == [{"label": "predicted", "value": 900 / 1024}]
    assert "23.00 dB" in page
    assert "stage 1: step 30 of 4" in page
    assert "off by 7.1 % of the intensity range (RMS)" in page
    assert "1 of" in page
    assert "<td>seed</td><td>42</td><td>7</td>" in page
    assert "generator backward" in page
    assert "<td>of which activations</td><td>0.78 GiB</td>" in page
    assert len(data["pictures"]) == 2 + 4 + 3 + 3 + 2, "the inputs are embedded once for both steps"


def test_spikes_survive_thinning_and_broken_values_break_the_line(tmp_path):
    folder = make_run(tmp_path, num_lines=5000, with_volumes=False)
    with (folder / "metrics.jsonl").open("a") as lines:
        for value in ("NaN", "99"):
            lines.write(f'{{"stage": "autoencoder", "step": 5002, "kl": {value}}}\n')
        lines.write('{"stage": "autoencoder", "step": 50')
    curve = read_run(folder)["stages"][0]["curves"]["kl"]
    assert len(curve) <= MAX_POINTS + 2
    assert [5002, 99.0] in curve
    assert "NaN" not in write_report(folder).read_text()


def test_a_run_that_has_only_begun_has_a_report_and_so_has_one_that_ran_out_of_memory(tmp_path):
    folder = make_run(tmp_path, with_volumes=False)
    rung = {"name": "offload", "promise": "same mathematics"}
    report = {"stage": "autoencoder", "phase": "generator backward", "step": 30, "next_rung": rung}
    (folder / "oom_report.json").write_text(json.dumps(report))
    said = "Ran out of memory in step 31, generator backward. Next rung: offload (same mathematics)."
    assert said in page_of([folder])
    (folder / "oom_report.json").write_text(json.dumps({**report, "step": 20}))
    assert "Ran out of memory" not in page_of([folder]), "the run has passed that step"
    for name in ("metrics.jsonl", "environment.json", "memory_autoencoder.json"):
        (folder / name).unlink()
    assert "not started" in page_of([folder])


def test_progress_is_that_of_the_steps_or_of_the_hours(tmp_path):
    def made(name: str, **limit: float) -> Path:
        training = {**TINY["autoencoder"]["training"], **limit}
        return make_run(tmp_path, name, with_volumes=False, autoencoder={**TINY["autoencoder"], "training": training})

    assert "stage 1: step 30, to train for 2 h 30 min" in page_of([made("hours", max_hours=2.5)])
    run = made("steps", max_steps=30)
    (run / "autoencoder.safetensors").touch()
    assert "stage 1: done, 30 steps" in page_of([run])
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("max_steps: 30", "max_steps: 60"))
    assert "stage 1: step 30 of 60" in page_of([run]), "a finished run that is continued is not done"


def test_a_report_that_cannot_be_written_does_not_end_training_and_is_tried_again(tmp_path, caplog):
    run = RunFolder(make_run(tmp_path, with_volumes=False))
    run.report.mkdir()
    publish(run, Process(torch.device("cpu")))
    assert "report.html: not written (IsADirectoryError: " in caplog.text
    run.report.rmdir()
    publish(run, Process(torch.device("cpu")))
    assert run.report.is_file()


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
    noise = torch.rand(1, 96, 96, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    volumes = {}
    for place in range(4):
        volumes[f"input_{place}"] = ViewerVolume.of(noise.roll(place, 2), SPACING, "", place=place)
        volumes[f"reconstruction_{place}"] = ViewerVolume.of(noise.roll(10 + place, 1), SPACING, "", place=place)
    for step in (100, 500, 900):
        save_viewer_volumes(run, "autoencoder", step, volumes)
    start = time.process_time()
    path = write_report(run.path)
    assert path.stat().st_size < 5_000_000
    assert time.process_time() - start < 3
    assert page_data(path.read_text())["sets"][0]["step"] == 900


def test_page_keeps_the_first_volumes_and_whole_pairs_when_the_budget_is_used_up(tmp_path):
    run = RunFolder(make_run(tmp_path))
    everything = viewer_data(run, 10**9)
    steps = [(entry["stage"], entry["step"]) for entry in everything["sets"]]
    assert steps == [("autoencoder", 20), ("autoencoder", 10), ("ldm", 5)]
    least = viewer_data(run, 0)
    pair, column = (sorted(entry["volumes"]) for entry in least["sets"])
    assert (pair, column) == (["input_0", "reconstruction_0"], ["nearest_0", "real_0", "sample_0"])
    half = viewer_data(run, sum(map(len, least["pictures"])) + len(least["pictures"][0]))
    for entry in half["sets"]:
        assert all(role.replace("input", "reconstruction") in entry["volumes"] for role in entry["volumes"])


def test_comparison_of_one_and_two_stages_shares_its_rows(tmp_path):
    both, first = make_run(tmp_path, "both"), make_run(tmp_path, "first", seed=9)
    lines = (first / "metrics.jsonl").read_text().splitlines(keepends=True)
    (first / "metrics.jsonl").write_text("".join(line for line in lines if '"ldm"' not in line))
    page = write_comparison([both, first], tmp_path / "comparison.html").read_text()
    figures = page[page.index('<div id="figures">') : page.index('<div id="evaluation">')]
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", figures)
    shared = {name: values for name, *values in rows}
    assert shared["held-out PSNR, stage 1"] == ["23.00 dB", "23.00 dB"]
    assert shared["peak allocated, stage 1"] == ["0.80 GiB", "0.80 GiB"]
    assert shared["peak allocated, stage 2"] == ["0.20 GiB", "-"]
    assert sum("-" in values for values in shared.values()) == 1
    assert [line["label"] for line in page_data(page)["curves"][0]["series"]] == ["both", "first"]
    assert "<td>seed</td><td>7</td><td>9</td>" in page
    assert "2 keys differ" in page


def test_durations_add_up_over_restarts_and_peaks_of_a_process_are_not_set_against_the_prediction(tmp_path):
    folder = make_run(tmp_path, with_volumes=False)
    memory = {"host_memory_gib": 2.0, "host_memory_peak_gib": 3.0}
    seconds = (10.0, 3600.0, 60.0, 120.0)
    lines = [{"stage": "autoencoder", "step": n, ELAPSED: s, **memory} for n, s in enumerate(seconds)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (stage,) = read_run(folder)["stages"]
    assert stage["seconds"] == 3720
    assert ELAPSED not in stage["curves"]
    page = page_of([folder])
    assert "1 h 2 min" in page
    assert page_data(page)["memory"][0]["rules"] == []
    assert "<td>peak of the process</td><td>3.00 GiB</td>" in page
    assert "predicted peak of the step&#x27;s tensors" in page


def test_the_table_of_an_evaluation_and_the_numbers_of_volumes_are_shown(tmp_path):
    folder = make_run(tmp_path, with_volumes=False)
    (folder / "evaluation.json").write_text(json.dumps({"reconstruction": {}}))
    assert "Evaluation" not in page_of([folder])
    (folder / "evaluation.json").write_text(json.dumps({"table": "PSNR dB  27.50\nvolume <b>"}))
    environment = json.loads((folder / "environment.json").read_text())
    environment["data"] = {"training": 12, "held_out": 3, "classes": ["a", "b"]}
    (folder / "environment.json").write_text(json.dumps(environment))
    page = page_of([folder])
    assert "PSNR dB  27.50\nvolume &lt;b&gt;</pre>" in page
    assert "<td>training volumes</td><td>12</td>" in page
    assert "<td>held-out volumes</td><td>3</td>" in page
