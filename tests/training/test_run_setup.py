"""One process per run, and a run that resumes only with the settings it was started with."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch

from data import DataSplit, VolumeFile
from runtime.files import RunFolder
from runtime.processes import Process
from settings import CheckpointError, Settings, UserError
from training.autoencoder_step import AutoencoderStep
from training.checkpoints import check_resumable
from training.ldm_step import LatentDiffusionStep
from training.recording import drop_later_lines
from training.run_setup import check_run, open_run, summarise, warn_of_stage_two

CPU = Process(torch.device("cpu"))


HOLD = """
import time
import torch
from pathlib import Path
from runtime.processes import Process
from settings import Settings
from training.run_setup import open_run

with open_run(Settings(name="shared"), Process(torch.device("cpu"))):
    Path("held").touch()
    time.sleep(60)
"""


def test_second_process_on_a_run_is_refused_and_a_crash_leaves_no_lock(warm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = Settings(name="shared")
    Path("hold.py").write_text(HOLD)
    holder = warm(tmp_path, str(tmp_path / "hold.py"), output=tmp_path / "output")
    while not Path("held").exists():
        assert holder.exit_code is None, holder.output
    with pytest.raises(UserError, match=rf"runs/shared: in use by another process \(pid {holder.pid} "):
        open_run(settings, CPU).__enter__()
    with pytest.raises(UserError, match="in use by another process"):
        check_run(settings, is_dry_run=False)
    check_run(settings, is_dry_run=True)  # which writes nothing
    holder.end()
    with open_run(settings, CPU) as folder:
        assert folder.path.is_dir()


def test_a_place_for_runs_that_cannot_be_written_is_named_before_anything_slow(tmp_path, monkeypatch):
    """Preparing the volumes would say it too, but with a remedy that helps only them."""
    (tmp_path / "file").touch()
    monkeypatch.setattr("training.run_setup.RUNS", tmp_path / "file")
    with pytest.raises(UserError, match=r"LEAN3D_RUNS: .*file/mine cannot be written \(.*file: Not a directory\)"):
        check_run(Settings(name="mine"), is_dry_run=False)
    check_run(Settings(name="mine"), is_dry_run=True)


def test_temporary_files_of_a_killed_process_are_removed_when_a_run_is_opened(tmp_path, monkeypatch, tiny_values):
    monkeypatch.chdir(tmp_path)
    settings = Settings.model_validate(tiny_values)
    with open_run(settings, CPU) as folder:
        volumes = folder.previews / "volumes"
        volumes.mkdir(parents=True)
        leftovers = [
            folder.path / ".metrics.jsonl.123.tmp",
            folder.previews / ".autoencoder_00000002.png.123.tmp",
            volumes / ".autoencoder_00000002_input.png.123.tmp",
        ]
        kept = volumes / "autoencoder_00000001_input.png"
        for path in (*leftovers, kept):
            path.write_bytes(b"")
    with open_run(settings, CPU):
        assert not any(path.exists() for path in leftovers)
        assert kept.exists()


def test_changes_that_alter_the_result_are_refused_all_at_once():
    steps = "autoencoder.training.max_steps"
    before = Settings().with_overrides({steps: 100, "autoencoder.training.learning_rate_decay": "cosine"})
    changes = {"seed": 1, "autoencoder.latent_channels": 4, "data.voxel_size": [128, 128, 64], steps: 200}
    with pytest.raises(CheckpointError) as caught:
        check_resumable("autoencoder", before, before.with_overrides(changes), 4, 8)
    _, *refused, remedy = str(caught.value).splitlines()
    assert [line.strip() for line in refused] == [
        "seed: 42 -> 1",
        "data.voxel_size: [64, 64, 64] -> [128, 128, 64]",
        "autoencoder.latent_channels: 3 -> 4",
        f"{steps}: 100 -> 200 (learning_rate_decay cosine ends there)",
        "volumes per update (batch_size x gradient_accumulation_steps x processes): 4 -> 8",
    ]
    assert remedy == "set these back to resume, or choose another name for a new run"


def test_memory_knobs_step_counts_and_logging_may_change_and_are_logged(caplog):
    caplog.set_level(logging.INFO)
    constant = {"learning_rate_decay": "none", "warmup_steps": 0}
    before = Settings.model_validate({"autoencoder": {"training": constant}})
    changes = {
        "autoencoder.training.slab_rows": 8,
        "autoencoder.training.batch_size": 2,
        "autoencoder.training.gradient_accumulation_steps": 2,
        "autoencoder.training.max_steps": 30000,
        "autoencoder.training.log_every": 3,
        "data.num_workers": 4,
        "ldm.unet.num_res_blocks": 1,
        "name": "renamed",
    }
    check_resumable("autoencoder", before, before.with_overrides(changes), 4, 4)
    assert "autoencoder.training.slab_rows: 0 -> 8" in caplog.text
    assert "autoencoder.training.max_steps: 20000 -> 30000" in caplog.text


def test_lines_after_the_checkpoint_are_dropped_before_they_are_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"stage": "autoencoder", "step": 1}, {"stage": "ldm", "step": 9}, {"stage": "autoencoder", "step": 2}]
    path.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"stage": "autoenc')
    drop_later_lines(path, "autoencoder", 1)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:2]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_metrics_and_run_folders_that_cannot_be_used_are_refused(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    make(metrics)
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be used \(.*\); move it away"):
        open_run(Settings(), CPU).__enter__()
    metrics.parent.rename("elsewhere")
    Path("runs").rmdir()
    Path("runs").write_text("in the way")
    with pytest.raises(UserError, match=r"runs/run: cannot be written \(Not a directory\); make it writable"):
        open_run(Settings(), CPU).__enter__()


def test_the_summary_says_how_long_a_run_is_and_over_how_many_volumes(tiny_values):
    limited = Settings.model_validate(tiny_values).with_overrides({"ldm.training.max_hours": 0.25})
    assert "stage ldm, 15 min 0 s\n" in summarise(limited, "ldm", 1)
    assert summarise(limited, "ldm", 1).endswith("over 1 training volume")


@pytest.mark.parametrize(("stage", "step"), [("autoencoder", AutoencoderStep), ("ldm", LatentDiffusionStep)])
def test_a_rate_of_auto_is_that_of_fine_tuning_for_pretrained_weights_only_and_the_summary_says_so(
    tiny_values, stage, step
):
    for pretrained, rate, words in ((None, 1e-4, "0.0001, from random weights"), ("w.st", 1e-5, "1e-05, from w.st")):
        tiny_values[stage] |= {"pretrained": pretrained}
        tiny_values[stage]["training"] |= {"learning_rate": "auto"}
        settings = Settings.model_validate(tiny_values)
        assert step(settings, CPU, load_weights=False).updaters[stage].learning_rate == rate
        assert f"learning rate:   {words}\n" in summarise(settings, stage, 1)
    assert Settings().autoencoder.training.rate_from("w.st") == 1e-4, "a given rate is taken as it is"


TARGET = {"encoding": "resample", "source": "target"}
CONDITION = " --condition FILE_OR_FOLDER"


@pytest.mark.parametrize(
    ("conditioning", "expected"),
    [
        ({}, ""),
        ({"label_map": {"source": "maps", "num_classes": 3}}, " --labels FILE_OR_FOLDER"),
        ({"volume": TARGET | {"degrade": {"downsample": [1, 1, 2]}}}, CONDITION),
        ({"volume": TARGET | {"degrade": {"hole": [4, 4, 4]}}}, f"{CONDITION} --mask FILE_OR_FOLDER"),
    ],
)
def test_the_next_command_names_the_conditions_of_the_run(tiny_values, conditioning, expected):
    tiny_values["ldm"]["conditioning"] = conditioning
    step = LatentDiffusionStep(Settings.model_validate(tiny_values), CPU, load_weights=False)
    assert step.next_command(RunFolder(Path("runs/a b"))) == f"python scripts/sample.py --run 'runs/a b'{expected}"


def test_stage_one_warns_of_what_stage_two_would_refuse(tiny_values, caplog):
    tiny_values["ldm"]["conditioning"] = {"type": "class", "num_classes": 3}
    files = tuple(VolumeFile(Path(f"{name}.nii"), name, label) for label, name in enumerate(("a", "b")))
    volumes = DataSplit(files[:1], files[1:], ("healthy", "lesion"))
    warn_of_stage_two(Settings.model_validate(tiny_values), volumes, CPU)
    assert "ldm.conditioning.num_classes: 3, but the data has 2 (healthy, lesion)" in caplog.text
