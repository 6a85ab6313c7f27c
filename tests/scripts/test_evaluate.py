"""scripts/evaluate.py: one table and one JSON with everything, also before stage 2 is there."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from tests.finished_run import finished_run, run_here


def test_both_stages_are_measured_beside_their_anchors(tmp_path, tmp_path_factory, capsys):
    run = finished_run(tmp_path_factory)
    arguments = ["--run", run, "--num", "3", "--steps", "2", "--json", tmp_path / "out" / "e.json"]
    assert run_here("scripts/evaluate.py", *arguments) == 0
    printed = capsys.readouterr().out
    values = json.loads((tmp_path / "out" / "e.json").read_text())
    rows = values["reconstruction"]["volumes"]
    assert len(rows) >= 2
    for name in ("psnr", "ssim", "ms_ssim"):
        assert values["reconstruction"]["mean"][name] == pytest.approx(sum(r[name] for r in rows) / len(rows))
        assert all(row["volume"] in printed for row in rows)
    assert values["samples"]["num"] == len(values["samples"]["nearest_training"]) == 3
    volumes = ["training volumes", "reconstructed training volumes"]
    assert list(values["anchors"]) == [*volumes, "Gaussian with their covariance", "network switched off"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    [logged] = [line for line in lines if "val_skill" in line]
    assert values["skill"] == pytest.approx({name: logged[name] for name in values["skill"]}, rel=1e-4)
    assert values["skill"].keys() > {"val_diffusion", "val_skill", "val_skill_0.01", "val_skill_0.99"}
    assert -1 <= values["samples"]["correlation_with_silent_network"] <= 1
    for name in (*values["anchors"], "sharpness", "95 % low", "skill", "switched off"):
        assert name in printed
    for stage in ("reconstruction", "samples"):
        assert values[stage]["sharpness"]["gradient_magnitude"] > 0
    low, high = values["reconstruction"]["interval"]["psnr"]
    assert low < values["reconstruction"]["mean"]["psnr"] < high


def test_without_stage_two_only_reconstructions_are_measured(tmp_path, tmp_path_factory, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "half"
    shutil.copytree(finished_run(tmp_path_factory), run)
    (run / "ldm.safetensors").unlink()
    shutil.rmtree(run / "checkpoints")
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["autoencoder"]["training"]["occupied_weight"] = 5.0
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert run_here("scripts/evaluate.py", "--run", run, "--json", "e.json") == 0
    printed = capsys.readouterr()
    assert "only reconstructions are evaluated" in printed.err
    found = json.loads((tmp_path / "e.json").read_text())
    assert "samples" not in found
    # Volumes that are mostly empty are compared by their occupied voxels too.
    mean = found["reconstruction"]["mean"]
    rows = found["reconstruction"]["volumes"]
    assert mean["iou"] == pytest.approx(sum(row["iou"] for row in rows) / len(rows))
    head, first = printed.out.splitlines()[:2]
    assert head.index("Chamfer") + len("Chamfer") == len(first)
    assert f"{mean['ms_ssim']:8.4f} {mean['iou']:8.3f} {mean['chamfer']:8.3f}" in printed.out
    assert head in (run / "report.html").read_text()
