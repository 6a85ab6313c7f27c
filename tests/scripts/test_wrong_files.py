"""Files that are not what a command needs, and paths it cannot write: one sentence and exit code 2, before any work."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from data.formats import write_nifti
from models.weight_files import load_weights, save_weights
from tests.finished_run import export_autoencoder, finished_run, run_here, train_ldm


@pytest.fixture
def run(tmp_path, tmp_path_factory, monkeypatch) -> Path:
    """A finished run that the test may spoil, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    finished = finished_run(tmp_path_factory)
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    for name in ("config.yaml", "autoencoder.safetensors", "ldm.safetensors"):
        shutil.copy(finished / name, folder)
    return folder


COMMANDS: dict[str, list[str]] = {
    "sample": ["scripts/sample.py", "--run", "runs/tiny", "--num", "1", "--steps", "1", "--out", "out"],
    "evaluate": ["scripts/evaluate.py", "--run", "runs/tiny", "--num", "2", "--steps", "1"],
    "reconstruct": ["scripts/reconstruct.py", "--run", "runs/tiny", "--input", "in", "--out", "out"],
}


def refused(capsys, command: Sequence[str | Path], *sentences: str) -> None:
    """Assert that a command ends with code 2 and one sentence that says all this."""
    assert run_here(*map(str, command)) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    for sentence in sentences:
        assert sentence in said, said


def spoil(path: Path, how: str) -> None:
    """Make a file of weights into something else."""
    state, metadata = load_weights(path)
    first = next(iter(state))
    if how == "text":
        path.write_text("these are not weights\n" * 20)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "without metadata":
        save_file(state, path)
    elif how == "of another program":
        save_file(state, path, metadata={"format": "pt"})
    elif how == "wrong shape":
        save_weights(path, {**state, first: torch.zeros(1, 2)}, metadata)
    elif how == "weight missing":
        save_weights(path, {name: tensor for name, tensor in state.items() if name != first}, metadata)
    else:
        name, _, value = how.partition("=")
        save_weights(path, state, {**metadata, name: json.loads(value)})


NOT_OURS = "not weights written by train_ldm.py"
FOREIGN = "not written by train_autoencoder.py"


@pytest.mark.parametrize(
    ("stage", "how", "sentence"),
    [
        ("autoencoder", "cut", "not a readable safetensors file"),
        ("autoencoder", "without metadata", FOREIGN),
        ("autoencoder", "of another program", "was not written by this program"),
        ("autoencoder", "wrong shape", "does not fit the network of this config"),
        ("autoencoder", 'settings="text"', FOREIGN),
        ("autoencoder", 'settings={"seed": "x", "version": 1}', "its settings lack name"),
        ("ldm", "text", "not a readable safetensors file"),
        ("ldm", "weight missing", "does not fit the network of this config"),
        ("ldm", "latent_scale=0", NOT_OURS),
        ("ldm", "lower=[0, 0]", "was trained on volumes with 2 channels"),
        ("ldm", "settings=null", NOT_OURS),
    ],
)
def test_wrong_weights_are_refused_by_every_command_that_uses_them(run, stage, how, sentence, capsys):
    write_nifti(Path("in/a.nii"), np.random.default_rng(0).normal(0, 1, (1, 16, 16, 16)).astype(np.float32), np.eye(4))
    spoil(run / f"{stage}.safetensors", how)
    for name in ("sample", "evaluate", *(["reconstruct"] if stage == "autoencoder" else [])):
        refused(capsys, [*COMMANDS[name]], f"{stage}.safetensors: ", sentence)
    assert not Path("out").exists()


def test_wrong_weights_are_not_exported(run, capsys):
    weights, reasons = run / "autoencoder.safetensors", ("not weights of a run", "rejects these weights")
    command = ["scripts/export_checkpoint.py", "--weights", weights, "--out", "out.pt"]
    refused(capsys, [*command[:-1], "out.bin"], "allowed: .safetensors, .pt, .pth")
    whole = weights.read_bytes()
    for how in ("without metadata", "wrong shape", "stage=[]"):
        weights.write_bytes(whole)
        spoil(weights, how)
        refused(capsys, command, reasons[how == "wrong shape"])
    assert not Path("out.pt").exists()


IMPORT = ["scripts/import_checkpoint.py", "--from", "monai", "--weights"]
OUT = ["--config", "runs/tiny/config.yaml", "--out", "imported"]


def test_what_is_not_weights_is_not_imported(run, capsys):
    scalars = dict.fromkeys(("quant_conv_mu.conv.weight", "post_quant_conv.conv.weight"), torch.zeros(()))
    Path("opcodes.pt").write_bytes(b"\x80\x02.")
    torch.save([torch.zeros(2)], "list.pt")
    torch.save(scalars, "scalars.pt")
    for name in ("opcodes.pt", "list.pt", "scalars.pt"):
        refused(capsys, [*IMPORT, name, *OUT], f"{name}: ")
    assert not Path("imported").exists()


def test_scales_and_what_lies_beside_imported_weights_are_checked(run, capsys):
    state, _ = load_weights(run / "ldm.safetensors")
    torch.save(state, "unet.pt")
    for scale in ("0", "-0.5", "nan", "inf", "much"):
        refused(capsys, [*IMPORT, "unet.pt", *OUT, f"--latent-scale={scale}"], f"'{scale}' is not a finite number ab")
    beside: list[tuple[str, dict[str, Any]]] = [
        *(
            ("its scale_factor, by which", {"scale_factor": value})
            for value in (None, 0.0, float("nan"), torch.tensor(-1.0), torch.zeros(2), "x", 1e40)
        ),
        ("set ldm.scheduler.num_train_timesteps=7", {"num_train_timesteps": torch.tensor(7)}),
        ("was trained with 7.0 timesteps", {"num_train_timesteps": 7.0}),
        ("(it holds numpy.", {"loss": np.float64(0.5)}),
    ]
    for said, values in beside:
        torch.save({"unet_state_dict": state, "scale_factor": 1.0, **values}, "unet.pt")
        refused(capsys, [*IMPORT, "unet.pt", *OUT], "unet.pt: ", said)
    assert not Path("imported").exists()


def test_a_folder_that_cannot_be_written_is_reported_before_the_work(run, capsys):
    Path("file").write_text("in the way")
    # Neither volumes nor weights are there to be worked on.
    (run / "autoencoder.safetensors").unlink()
    (run / "ldm.safetensors").unlink()
    for command in (COMMANDS["sample"][:-2], COMMANDS["reconstruct"][:-2], [*IMPORT, "gone", "--config", "gone"]):
        refused(capsys, [*command, "--out", "file/deep"], "--out: file/deep cannot be written")


def test_volumes_that_differ_in_their_suffix_only_get_files_of_their_own_and_no_input_is_overwritten(run, capsys):
    voxels = np.random.default_rng(0).normal(100, 30, (1, 16, 16, 16)).astype(np.float32)
    for name in ("a.nii", "a.nii.gz", "b.nii", "sub/b.nii", "a.npy.nii"):
        write_nifti(Path("in") / name, voxels, np.eye(4))
    np.save("in/a.npy", voxels[0])
    assert run_here(*COMMANDS["reconstruct"]) == 0
    written = sorted(path.relative_to("out").as_posix() for path in Path("out").rglob("*.nii.gz"))
    assert written == [
        "a.nii.gz_reconstruction.nii.gz",
        "a.nii_reconstruction.nii.gz",
        "a.npy.nii_reconstruction.nii.gz",
        "a.npy_reconstruction.nii.gz",
        "b_reconstruction.nii.gz",
        "sub/b_reconstruction.nii.gz",
    ]
    write_nifti(Path("in/sub/b_reconstruction.nii.gz"), voxels, np.eye(4))
    said = "--out: in/sub/b_reconstruction.nii.gz is one of the input volumes"
    refused(capsys, [*COMMANDS["reconstruct"][:-1], "in"], said)


def test_samples_of_other_options_do_not_overwrite_each_other(run):
    command = ["scripts/sample.py", "--run", "runs/tiny", "--num", "1", "--out", "out"]
    for options in ([], ["--steps", "1"], ["--class", "lesion"], ["--class", "healthy", "--guidance-scale", "2.5"]):
        assert run_here(*command, *options) == 0
    assert sorted(path.name for path in Path("out").glob("*.nii.gz")) == [
        "sample_seed0_0000.nii.gz",
        "sample_seed0_healthy_guidance2.5_0000.nii.gz",
        "sample_seed0_lesion_0000.nii.gz",
        "sample_seed0_steps1_0000.nii.gz",
    ]
    assert len(list(Path("out").glob("montage_*.png"))) == 4


def test_identical_held_out_volumes_and_a_thin_axis_give_valid_json(tmp_path, monkeypatch, tiny_values, capsys):
    monkeypatch.chdir(tmp_path)
    voxels = np.random.default_rng(0).normal(100, 30, (1, 16, 16, 2)).astype(np.float32)
    for number in range(6):
        write_nifti(tmp_path / "volumes" / f"v{number}.nii", voxels, np.eye(4))
    tiny_values["data"] |= {"source": str(tmp_path / "volumes"), "voxel_size": [16, 16, 2], "val_fraction": 0.5}
    tiny_values["autoencoder"]["training"]["adversarial_weight"] = 0
    tiny_values["ldm"]["training"]["max_steps"] = 1
    config = tmp_path / "tiny.yaml"
    config.write_text(yaml.safe_dump(tiny_values))
    export_autoencoder(tiny_values)
    train_ldm(config)
    assert run_here(*COMMANDS["evaluate"], "--json", "e.json") == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    values = json.loads(Path("e.json").read_text(), parse_constant=refuse)
    assert 0 < values["reconstruction"]["mean"]["ms_ssim"] <= 1
    assert values["samples"]["num_memorised"] is values["samples"]["laplacian_kurtosis"] is None
    assert "val_skill" not in values["skill"]
    assert values["samples"]["nearest_training"][0]["ratio"] is None
    assert "; volumes that are identical or constant" in capsys.readouterr().err


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("make", "words"),
    [(os.mkfifo, "not a regular file"), (os.mkdir, "a folder, not a file"), (lambda path: None, "no such file")],
)
def test_weights_that_are_not_a_regular_file_are_refused(tmp_path, capsys, monkeypatch, tiny_config, make, words):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "w.safetensors")
    command = [*IMPORT, "w.safetensors", "--config", tiny_config, "--out", "out"]
    refused(capsys, command, f"w.safetensors: {words}; give a")
    # The volumes are not there either, but are looked for later.
    chosen = ["data.source=nowhere", "autoencoder.pretrained=w.safetensors"]
    refused(capsys, ["train_autoencoder.py", "--config", tiny_config, *chosen], "w.safetensors: ", words)
