"""Weights & Biases and MLflow get what a run logs; neither is imported unless asked for."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import yaml

from runtime.files.run_folder import RunFolder
from settings import LoggingSettings, Settings, UserError
from tests.conftest import TINY
from tests.finished_run import run_here
from training.recording.trackers import check_trackers, open_trackers


@pytest.fixture
def package(tmp_path, monkeypatch) -> Callable[[str], MagicMock]:
    """Put a stand-in in the place of a tracker's package and return it."""
    monkeypatch.chdir(tmp_path)

    def put(name: str) -> MagicMock:
        fake = MagicMock(__spec__=ModuleSpec(name, None, origin="here"))
        fake.MlflowClient.return_value.get_experiment_by_name.return_value = None
        for part in (name, f"{name}.tracking"):
            monkeypatch.setitem(sys.modules, part, fake)
        return fake

    return put


def feed(tracker: str, is_complete: bool = True) -> None:
    settings = Settings.model_validate({**TINY, "logging": {"tracker": tracker}})
    for opened in open_trackers(settings, RunFolder(Path("run")), "autoencoder", 0):
        opened.log(3, {"kl": 0.5, "loss": math.inf})
        opened.image(3, "reconstruction", np.zeros((4, 5), np.uint8))
        opened.close(is_complete)


def test_wandb_gets_config_values_and_pictures(package):
    wandb = package("wandb")
    feed("wandb-offline")
    options = wandb.init.call_args.kwargs
    names = {"mode": "offline", "dir": "run", "name": "tiny autoencoder", "group": "tiny", "job_type": "autoencoder"}
    assert {name: options[name] for name in names} == names
    assert options["config"]["seed"] == 7
    assert wandb.init.return_value.method_calls == [
        call.log({"kl": 0.5, "loss": math.inf}, step=3),
        call.log({"reconstruction": wandb.Image.return_value}, step=3),
        call.finish(exit_code=0),
    ]


def test_mlflow_gets_config_finite_values_and_pictures(package, tmp_path):
    mlflow = package("mlflow")
    feed("mlflow-offline", is_complete=False)
    mlflow.MlflowClient.assert_called_once_with(tracking_uri=f"sqlite:///{tmp_path}/run/mlflow.db")
    client = mlflow.MlflowClient.return_value
    client.create_experiment.assert_called_once_with("tiny", f"file://{tmp_path}/run/mlflow")
    client.create_run.assert_called_once_with(client.create_experiment.return_value, run_name="autoencoder")
    number = client.create_run.return_value.info.run_id
    assert client.log_dict.call_args.args[2] == "config.json"
    assert client.log_metric.call_args_list == [call(number, "kl", 0.5, step=3)]
    assert client.log_image.call_args.args[2] == "reconstruction_00000003.png"
    client.set_terminated.assert_called_once_with(number, "FAILED")


def test_mlflow_online_goes_to_the_server_of_the_environment(package, monkeypatch):
    mlflow = package("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserError, match=r"logging\.tracker: mlflow needs the address .+ set MLFLOW_TRACKING_URI"):
        check_trackers(LoggingSettings(tracker="mlflow"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    feed("mlflow")
    mlflow.MlflowClient.assert_called_once_with(tracking_uri="http://127.0.0.1:5000")
    mlflow.MlflowClient.return_value.create_experiment.assert_called_once_with("tiny", None)


def test_training_tells_a_tracker_each_logged_step_and_the_validation(package, tiny_values):
    wandb = package("wandb")
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny_values))
    assert run_here("train_autoencoder.py", "--config", "tiny.yaml", "logging.tracker=wandb-offline") == 0
    run = wandb.init.return_value
    logged = [(each.kwargs["step"], set(each.args[0])) for each in run.log.call_args_list]
    assert [step for step, names in logged if "reconstruction" in names and "kl" in names] == [1, 2, 3, 4]
    assert [step for step, names in logged if "val_psnr" in names] == [4]
    assert [step for step, names in logged if names == {"reconstruction"}] == [4], "the picture"
    assert not any("elapsed_seconds" in names for _, names in logged)
    *_, step, validation = map(json.loads, Path("runs/tiny/metrics.jsonl").read_text().splitlines())
    assert "val_psnr" in validation
    assert validation["elapsed_seconds"] > step["elapsed_seconds"], "the duration of a run has its last validation"
    run.finish.assert_called_once_with(exit_code=0)


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
