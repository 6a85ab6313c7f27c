"""scripts/report.py as a user runs it."""

from __future__ import annotations

import json

from tests.report_run import make_run


def test_report_is_rebuilt_and_runs_are_compared(command, tmp_path):
    first, second = make_run(tmp_path / "runs", "first"), make_run(tmp_path / "runs", "second", seed=3)
    done = command("scripts/report.py", "--run", first)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == str(first / "report.html")
    assert (first / "report.html").is_file()
    done = command("scripts/report.py", "--run", first, "--run", second, "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    page = (tmp_path / "runs" / "comparison.html").read_text()
    assert "first vs. second" in page


def test_missing_prediction_is_added_on_request(command, tmp_path):
    run = make_run(tmp_path / "runs")
    (run / "memory_autoencoder.json").write_text('{"prediction": null, "ladder": []}')
    (run / "metrics.jsonl").write_text('{"stage": "autoencoder", "step": 1, "kl": 1.0}\n')
    done = command("scripts/report.py", "--run", run, "--predict")
    assert done.returncode == 0, done.stderr
    record = json.loads((run / "memory_autoencoder.json").read_text())
    assert record["prediction"]["peak_allocated_bytes"] > 0
    assert "Predicted peak by category" in (run / "report.html").read_text()


def test_folder_without_a_run_is_refused_in_words(command, tmp_path):
    done = command("scripts/report.py", "--run", tmp_path)
    assert done.returncode == 2
    assert "no config.yaml; give the folder of a run" in done.stderr
    assert "Traceback" not in done.stderr
