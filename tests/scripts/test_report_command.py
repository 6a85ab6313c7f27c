"""scripts/report.py as a user runs it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.finished_run import run_here
from tests.report_run import make_run


def test_report_is_rebuilt_and_runs_are_compared(tmp_path, capsys):
    first, second = make_run(tmp_path / "runs", "first"), make_run(tmp_path / "runs", "second", seed=3)
    assert run_here("scripts/report.py", "--run", first) == 0
    assert capsys.readouterr().err.strip() == str(first / "report.html")
    assert (first / "report.html").is_file()
    assert run_here("scripts/report.py", "--run", first, "--run", second, "--quiet") == 0
    assert capsys.readouterr().err == ""
    page = (tmp_path / "runs" / "comparison.html").read_text()
    assert "first vs. second" in page


FILES = ("metrics.jsonl", "environment.json", "memory_autoencoder.json", "oom_report.json")
CONTENTS: tuple[bytes, ...] = (
    *(b"", b"{", b"\xff\xfe\0", b"[]", b"3", b"[" * 100_000, b"1" * 5000),
    *(b'{"step": 1e400, "stage": "autoencoder"}', b'{"step": true, "stage": 3}', b'{"stage": "ldm", "step": -1}'),
    b'{"stage": "autoencoder", "step": 1' + b"0" * 400 + b', "kl": 1}\n',
    b'{"command": ["--config", "\\u0000"], "packages": {"torch": null}, "device": {}}',
    b'{"prediction": {"peak_allocated_bytes": NaN}}',
    b'{"stage": "autoencoder", "step": 3, "phase": null, "next_rung": {}}',
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FILES)
def test_damaged_file_of_a_run_is_reported_and_the_rest_is_shown(tmp_path, capsys, name):
    run = make_run(tmp_path / "runs", with_volumes=False)
    for content in CONTENTS:
        (run / name).write_bytes(content)
        (run / "report.html").unlink(missing_ok=True)
        assert run_here("scripts/report.py", "--run", run) == 0, content
        assert "<h1>" in (run / "report.html").read_text(encoding="utf-8")
        said = capsys.readouterr().err
        if content in (b"{", b"3", b"\xff\xfe\0") and name != "metrics.jsonl":
            assert re.search(rf"{name}: damaged \(.+\); left out of the report", said), said


def test_damaged_lines_of_metrics_are_counted_but_not_the_one_that_was_cut_off(tmp_path, capsys):
    run = make_run(tmp_path / "runs", with_volumes=False)
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text + '{"stage": "autoenc')
    assert run_here("scripts/report.py", "--run", run) == 0
    assert "left out of the report" not in capsys.readouterr().err
    (run / "metrics.jsonl").write_text("x\n[3]\n" + text)
    assert run_here("scripts/report.py", "--run", run) == 0
    assert "metrics.jsonl: 2 damaged lines; left out of the report" in capsys.readouterr().err


@pytest.mark.timeout(300)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_not_a_regular_file_in_a_run_is_left_out(tmp_path, make: Callable[[Path], None]):
    run = make_run(tmp_path / "runs")
    pictures = sorted((run / "previews" / "volumes").glob("*.png"))
    for path in [*(run / name for name in FILES), pictures[0]]:
        path.unlink(missing_ok=True)
        make(path)
    assert run_here("scripts/report.py", "--run", run) == 0


def test_damaged_pictures_are_left_out(tmp_path):
    run = make_run(tmp_path / "runs")
    pictures = sorted((run / "previews" / "volumes").glob("*.png"))
    for number, path in enumerate(pictures):
        content = path.read_bytes()
        damaged = (b"", content[:60], content[:-40], content.replace(b'"shape": [16', b'"shape": [-6'))
        path.write_bytes(damaged[number % len(damaged)])
    assert run_here("scripts/report.py", "--run", run) == 0
    page = (run / "report.html").read_text()
    assert "data:image/png" not in page


def test_damaged_config_of_a_run_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "runs", with_volumes=False)
    for content in (b"seed: [", b"\xff\xfe\0", b"seed: x", b"[" * 3000):
        (run / "config.yaml").write_bytes(content)
        assert run_here("scripts/report.py", "--run", run) == 2
        assert "config.yaml" in capsys.readouterr().err


def test_names_that_no_encoding_has_are_escaped_in_the_page(tmp_path):
    run = make_run(tmp_path / os.fsdecode(b"runs-\xff"), with_volumes=False)
    assert run_here("scripts/report.py", "--run", run) == 0
    assert r"runs-\udcff" in (run / "report.html").read_text(encoding="utf-8")
