"""Weights & Biases and MLflow get what a run logs; neither is imported unless asked for."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from runtime.files.run_folder import RunFolder
from settings import LoggingSettings, Settings, UserError
from tests.conftest import TINY
from tests.finished_run import run_here
from training.recording.trackers import check_trackers, open_trackers

# Stands in for both packages: it writes each call to calls.jsonl of the current folder.
FAKE = """
import json

def note(*call):
    with open("calls.jsonl", "a") as lines:
        lines.write(json.dumps(call, default=str) + "\\n")

class Settings:
    def __init__(self, **options): self.options = options
    def __str__(self): return str(self.options)

class Image:
    def __init__(self, pixels): self.shape = pixels.shape
    def __str__(self): return f"image {len(self.shape)}D"

class Run:
    info = type("Info", (), {"run_id": "7"})
    def log(self, values, step): note("log", step, values)
    def finish(self, exit_code): note("finish", exit_code)

def init(**options):
    note("init", options)
    return Run()

class MlflowClient:
    def __init__(self, tracking_uri): note("client", tracking_uri)
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name, artifacts): note("experiment", name, artifacts); return "3"
    def create_run(self, experiment, run_name): note("run", experiment, run_name); return Run()
    def log_dict(self, run, values, name): note("dict", run, name)
    def log_metric(self, run, name, value, step): note("metric", run, name, value, step)
    def log_image(self, run, pixels, name): note("image", run, name, pixels.ndim)
    def set_terminated(self, run, status): note("end", run, status)
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Put fake packages on the path; return a function that reads the calls made so far."""
    packages = tmp_path / "packages"
    (packages / "mlflow").mkdir(parents=True)
    (packages / "wandb.py").write_text(FAKE)
    (packages / "mlflow" / "__init__.py").write_text("")
    (packages / "mlflow" / "tracking.py").write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(packages)
    for name in ("wandb", "mlflow", "mlflow.tracking"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield lambda: [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    for name in ("wandb", "mlflow", "mlflow.tracking"):
        sys.modules.pop(name, None)


def settings_with(tracker: str) -> Settings:
    return Settings.model_validate({**TINY, "logging": {"tracker": tracker}})


def feed(settings: Settings, folder: Path, is_complete: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for tracker in open_trackers(settings, RunFolder(folder), "autoencoder", 0):
        tracker.log(3, {"kl": 0.5, "loss": float("nan")})
        tracker.image(3, "reconstruction", np.zeros((4, 5), np.uint8))
        tracker.close(is_complete)


def test_wandb_gets_config_values_and_pictures(calls, tmp_path):
    feed(settings_with("wandb-offline"), tmp_path / "run")
    (_, options), first, picture, end = calls()
    assert options["mode"] == "offline"
    assert options["dir"] == str(tmp_path / "run")
    assert options["name"] == "tiny autoencoder"
    assert options["group"] == "tiny"
    assert options["job_type"] == "autoencoder"
    assert options["config"]["seed"] == 7
    assert first[:2] == ["log", 3]
    assert first[2]["kl"] == 0.5
    assert picture == ["log", 3, {"reconstruction": "image 2D"}]
    assert end == ["finish", 0]


def test_mlflow_gets_config_finite_values_and_pictures(calls, tmp_path):
    feed(settings_with("mlflow-offline"), tmp_path / "run", is_complete=False)
    assert calls() == [
        ["client", f"sqlite:///{tmp_path}/run/mlflow.db"],
        ["experiment", "tiny", f"file://{tmp_path}/run/mlflow"],
        ["run", "3", "autoencoder"],
        ["dict", "7", "config.json"],
        ["metric", "7", "kl", 0.5, 3],
        ["image", "7", "reconstruction_00000003.png", 2],
        ["end", "7", "FAILED"],
    ]


def test_mlflow_online_goes_to_the_server_of_the_environment(calls, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match=r"logging\.tracker: mlflow needs the address .+ set MLFLOW_TRACKING_URI"):
        check_trackers(settings_with("mlflow").logging)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    feed(settings_with("mlflow"), tmp_path / "run")
    assert calls()[:2] == [["client", "http://127.0.0.1:5000"], ["experiment", "tiny", None]]


def test_training_tells_a_tracker_each_logged_step_and_the_validation(calls, tiny_values):
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny_values))
    assert run_here("train_autoencoder.py", "--config", "tiny.yaml", "logging.tracker=wandb-offline") == 0
    logged = [(call[1], set(call[2])) for call in calls() if call[0] == "log"]
    assert [step for step, names in logged if "reconstruction" in names and "kl" in names] == [1, 2, 3, 4]
    assert [step for step, names in logged if "val_psnr" in names] == [4]
    assert [step for step, names in logged if names == {"reconstruction"}] == [4], "the picture"
    assert not any("elapsed_seconds" in names for _, names in logged)
    *_, step, validation = map(json.loads, Path("runs/tiny/metrics.jsonl").read_text().splitlines())
    assert "val_psnr" in validation
    assert validation["elapsed_seconds"] > step["elapsed_seconds"], "the duration of a run has its last validation"
    assert calls()[-1] == ["finish", 0]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_package_is_named_before_training(name, monkeypatch, tmp_path, capsys, tiny_values):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=rf"logging\.tracker: {name}-offline, .* pip install {name}"):
        check_trackers(LoggingSettings.model_validate({"tracker": f"{name}-offline"}))
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny_values))
    assert (
        run_here("train_autoencoder.py", "--config", "tiny.yaml", f"logging.tracker={name}-offline", "--dry-run") == 2
    )
    said = capsys.readouterr().err
    assert f"pip install {name}, or set none" in said
    assert "training and" not in said, "volumes were prepared first"


def test_folder_named_like_a_tracker_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="the package is missing"):
        check_trackers(LoggingSettings(tracker="wandb"))
