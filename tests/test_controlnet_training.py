"""A ControlNet as a user trains it: on a finished U-Net that stays as it is, sampled with and without label maps."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from diffusion.conditioning.command_line import AskedConditions
from diffusion.conditioning.kind import Asked
from evaluation.trained_run import TrainedRun
from models.controlnet import PREFIX
from models.weight_files import load_weights, save_weights
from runtime.processes import Process
from settings import ConfigError, Settings
from tests.conditional_run import conditional_config
from tests.finished_run import run_here, train_ldm
from tests.support.tiny_config import TINY
from training.ldm_step import LatentDiffusionStep

LABEL_MAP = "ldm.conditioning.label_map"
MAPS = [f"{LABEL_MAP}.source=maps", f"{LABEL_MAP}.num_classes=3"]
CONTROLLED = ["name=controlled", "ldm.autoencoder=runs/tiny/autoencoder.safetensors", *MAPS]
CONTROLLED += ["ldm.pretrained=runs/tiny/ldm.safetensors", f"{LABEL_MAP}.controlnet=[4,8]"]

label_map = {"source": "maps", "num_classes": 3, "controlnet": [4, 8]}
ldm = {**TINY["ldm"], "conditioning": {"label_map": label_map}, "pretrained": "ldm.safetensors"}
SETTINGS = Settings.model_validate({**TINY, "ldm": ldm})


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    """Cases with label maps, and a finished U-Net that knows nothing of them."""
    monkeypatch.chdir(tmp_path)
    path = conditional_config(tmp_path, {})
    assert train_ldm(path) == 0
    return path


def voxels(folder: str) -> np.ndarray:
    return np.stack([np.asarray(nib.load(path).dataobj) for path in sorted(Path(folder).glob("*.nii.gz"))])


def test_a_controlnet_is_trained_on_a_finished_unet_and_sampled(config, capsys):
    # Three weights that start at zero stand between a label map and the prediction.
    command = [*CONTROLLED, "ldm.training.learning_rate=1e-2"]
    assert run_here("train_ldm.py", "--config", config, "--dry-run", *command) == 0
    assert train_ldm(config, *command) == 0
    unet, _ = load_weights(Path("runs/tiny/ldm.safetensors"))
    path = Path("runs/controlled/ldm.safetensors")
    weights, metadata = load_weights(path)
    assert all(torch.equal(weights[name], value) for name, value in unet.items())
    moved = [name for name in weights if name.startswith(PREFIX) and name.endswith(".weight")]
    copies = {name: unet.get(name.removeprefix(PREFIX), torch.zeros(())) for name in moved}
    assert not any(torch.equal(weights[name], copy.expand_as(weights[name])) for name, copy in copies.items())
    checkpoint = torch.load(next(Path("runs/controlled/checkpoints").glob("ldm_step_00000004*")), weights_only=True)
    trained = sum(name.startswith(PREFIX) for name in weights)
    states = [checkpoint["optimizers"]["ldm"]["state"], checkpoint["optimizers"]["ldm"]["muon"]["state"]]
    assert sum(map(len, states)) == len(checkpoint["average"]) == trained
    assert Path("runs/controlled/previews/volumes/ldm_00000004_labelmap_0.png").is_file()

    # Stopped after two steps and resumed, without the kept label maps.
    for old in [*Path("runs/controlled/checkpoints").glob("ldm_step_00000004*"), *Path("runs/latents").rglob("*.*")]:
        old.unlink()
    assert train_ldm(config, *command) == 0
    again, _ = load_weights(path)
    assert all(torch.equal(value, weights[name]) for name, value in again.items())

    # Without a label map the U-Net is alone. After four steps one has little effect, so it is followed a hundredfold.
    sample = ("scripts/sample.py", "--steps", "2", "--num", "1", "--run")
    assert run_here(*sample, "runs/tiny", "--out", "alone") == 0
    assert run_here(*sample, "runs/controlled", "--out", "without") == 0
    assert np.array_equal(voxels("alone"), voxels("without"))
    for labels in ("maps/case_3.nii.gz", "maps/case_5.nii.gz"):
        guided = ("--labels", labels, "--guidance-scale", "100", "--out", Path(labels).name[:6])
        assert run_here(*sample, "runs/controlled", *guided) == 0
    assert np.abs(voxels("case_3") - voxels("case_5")).max() > 1e-2
    assert run_here("scripts/evaluate.py", "--run", "runs/controlled", "--num", "2", "--steps", "2") == 0
    assert "with that of another volume" in capsys.readouterr().out
    estimate = ("scripts/estimate_memory.py", "--config", config, "--stage", "ldm")
    assert run_here(*estimate, *CONTROLLED) == 0
    assert "unet.controlnet." in capsys.readouterr().out

    # The ControlNet alone goes to MONAI and comes back to its U-Net.
    save_weights(path, weights, metadata | {"licence": "Theirs"})
    assert run_here("scripts/export_checkpoint.py", "--weights", path, "--out", "unet.pt") == 0
    scope: dict = {}
    exec(capsys.readouterr().out, scope)
    assert type(scope["controlnet"]).__name__ == "ControlNet"
    importing = [
        "scripts/import_checkpoint.py",
        "--from",
        "monai",
        "--weights",
        "unet_controlnet.pt",
        "--config",
        config,
    ]
    assert run_here(*importing, "--out", "runs/back", *CONTROLLED) == 0
    said = capsys.readouterr().err
    assert "next: python scripts/sample.py --run runs/back --labels FILE_OR_FOLDER" in said
    assert "ldm.autoencoder=runs/tiny/autoencoder.safetensors ldm.pretrained=runs/back/ldm.safetensors" in said
    network, frame = TrainedRun("runs/back").unet()
    assert all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())
    assert torch.equal(frame.normalisation.mean, metadata["latent_mean"])
    assert run_here(*importing, "--out", "runs/other", *MAPS) == 2
    assert "unet_controlnet.pt: holds a ControlNet, and the config has none" in capsys.readouterr().err
    importing[4] = "unet.pt"
    assert run_here(*importing, "--out", "runs/other", *CONTROLLED) == 2
    assert "unet.pt: holds a U-Net alone, and the config has a ControlNet beside it" in capsys.readouterr().err

    other = ["ldm.pretrained=runs/controlled/ldm.safetensors", f"{LABEL_MAP}.controlnet=[8,8]"]
    for overrides, text in (
        (["ldm.pretrained=gone.safetensors"], "gone.safetensors: no such file"),
        ([f"{LABEL_MAP}.source=images"], "no partner in ldm.conditioning.label_map.source"),
        (["ldm.unet.num_channels=[32,32]"], "the pretrained U-Net has different settings"),
        (["--dry-run", *other], "ldm.conditioning.label_map.controlnet: [4, 8] -> [8, 8]"),
    ):
        assert run_here("train_ldm.py", "--config", config, *CONTROLLED, *overrides) == 2
        said = capsys.readouterr().err
        assert text in said
        assert "Traceback" not in said


def test_numbers_mean_to_a_frozen_unet_what_they_meant_when_it_was_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tabular = {"table": "people.csv", "continuous": ["age"], "categorical": ["sex"]}
    path = conditional_config(tmp_path, {"tabular": tabular})
    short = ["ldm.training.max_steps=1", "ldm.training.validate_every=1"]
    for number, words, options in ((1, "FM", []), (2, "MM", CONTROLLED)):
        rows = [f"case_{place}.nii.gz,{number * place},{words[place % 2]}" for place in range(8)]
        Path("people.csv").write_text("\n".join(["file,age,sex", *rows]))
        assert train_ldm(path, *short, *options) == 0
    before, after = (load_weights(Path(f"runs/{name}/ldm.safetensors"))[1] for name in ("tiny", "controlled"))
    assert after["numbers"] == before["numbers"]


def test_without_its_label_map_the_unet_predicts_whatever_dropout_says():
    settings = SETTINGS.with_overrides({"ldm.conditioning.dropout": 0, "ldm.sampling.guidance_scale": 2})
    batch = AskedConditions(Asked(settings, {}), [], None).batch([0], 1, (1, 1, 1))
    assert batch.parts["control map"].eq(-1).all()
    with pytest.raises(ConfigError, match="never learns to predict without a condition"):
        settings.with_overrides({"ldm.conditioning.type": "class", "ldm.conditioning.num_classes": 2})


def test_the_loss_falls_and_only_the_controlnet_is_trained():
    settings = SETTINGS.with_overrides({"ldm.training.learning_rate": 1e-2})
    step = LatentDiffusionStep(settings, Process(torch.device("cpu")), load_weights=False)
    # At zero, as a new U-Net has it, nothing would get past it.
    torch.nn.init.normal_(step.unet.out[2].conv.weight, std=0.1)
    before = {name: value.clone() for name, value in step.unet.state_dict().items()}
    batch = step.example_batch(2)
    torch.manual_seed(0)
    control = torch.randint(0, 3, batch.condition.parts["control map"].shape).float()
    batch.condition.parts["control map"].copy_(control)
    losses = [float(step([batch], number)["diffusion"]) for number in range(40)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), losses
    for name, value in step.unet.state_dict().items():
        if not name.startswith(PREFIX):
            assert torch.equal(value, before[name]), name
