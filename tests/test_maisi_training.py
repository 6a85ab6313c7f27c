"""MAISI's U-Net as a user takes it over: imported with its scale, fine-tuned from there, sampled, and given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.apps.generation.maisi.networks.diffusion_model_unet_maisi import DiffusionModelUNetMaisi

from models.weight_files import load_weights, save_weights
from settings import CheckpointError
from tests.conditional_run import conditional_config
from tests.finished_run import run_here, train_ldm
from tests.support.tiny_config import TINY

SCAN: dict[str, Any] = {"regions": "regions.csv", "modality": 1}
START = "ldm.pretrained=runs/imported/ldm.safetensors"


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    """A config for volumes with a table of regions, a trained autoencoder and a checkpoint of MAISI's kind."""
    monkeypatch.chdir(tmp_path)
    rows = [f"case_{place}.nii.gz,chest,{'abdomen' if place % 2 else 'pelvis'}" for place in range(8)]
    Path("regions.csv").write_text("\n".join(["file,top_region,bottom_region", *rows]))
    torch.manual_seed(0)
    network = DiffusionModelUNetMaisi(
        3, 3, 3, num_channels=(16, 32), attention_levels=(False, True), num_res_blocks=(1, 1), norm_num_groups=4,
        num_head_channels=(0, 8), num_class_embeds=128, include_top_region_index_input=True, include_fc=True,
        include_bottom_region_index_input=True, include_spacing_input=True,
    )  # fmt: skip
    # MONAI starts these at zero, and then a network that is hardly trained takes no notice of the scan.
    for name, weight in network.named_parameters():
        if name.endswith(("conv2.conv.weight", "out.2.conv.weight")):
            torch.nn.init.normal_(weight, std=0.1)
    checkpoint = {"epoch": 3, "scale_factor": torch.tensor(0.8), "num_train_timesteps": 1000}
    torch.save({**checkpoint, "unet_state_dict": network.state_dict()}, "maisi.pt")
    as_maisi = {"unet": TINY["ldm"]["unet"] | {"use_mean_map": False}, "scheduler": {"type": "rflow"}}
    return conditional_config(tmp_path, {"scan": SCAN}, **as_maisi, sampling={"sampler": "rflow"})


def imported(config: Path, *more: str) -> int:
    weights = ("--from", "maisi", "--weights", "maisi.pt", "--config", str(config), "--out", "runs/imported")
    return run_here("scripts/import_checkpoint.py", *weights, *more)


def test_an_imported_unet_is_fine_tuned_with_its_scale_sampled_and_exported(config, capsys):
    assert imported(config) == 0
    said = capsys.readouterr().err
    assert "or fine-tune: python train_ldm.py --config runs/imported/config.yaml name=finetuned" in said
    before, metadata = load_weights(Path("runs/imported/ldm.safetensors"))
    assert torch.equal(metadata["latent_scale"], torch.full((3, 1, 1, 1), 0.8))
    assert not metadata["latent_mean"].any()

    export = ("--weights", "runs/imported/ldm.safetensors", "--out", "back.pt")
    assert run_here("scripts/export_checkpoint.py", *export) == 0
    scope: dict[str, Any] = {"torch": torch}
    exec(capsys.readouterr().out, scope)
    assert type(scope["network"]) is DiffusionModelUNetMaisi
    assert all(torch.equal(tensor, before[name]) for name, tensor in scope["network"].state_dict().items())

    # With a learning rate of almost nothing the weights stay, so training did start from them.
    slow = (START, "ldm.training.learning_rate=1e-12", "ldm.training.warmup_steps=0", "ldm.training.ema_decay=0")
    assert train_ldm(config, *slow) == 0
    after, metadata = load_weights(Path("runs/tiny/ldm.safetensors"))
    assert torch.equal(metadata["latent_scale"], torch.full((3, 1, 1, 1), 0.8))
    assert not metadata["latent_mean"].any()
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-10)

    arguments = ("--run", "runs/tiny", "--num", "1", "--steps", "2")
    assert run_here("scripts/sample.py", *arguments) == 2
    assert "--number: top_region is not given" in capsys.readouterr().err
    for region in ("head", "pelvis"):
        words = ("--number", "top_region=chest", "--number", f"bottom_region={region}")
        assert run_here("scripts/sample.py", *arguments, *words, "--out", region) == 0
    first, second = (nib.load(next(Path(name).glob("*.nii.gz"))).get_fdata() for name in ("head", "pelvis"))
    assert np.abs(first - second).max() > 0


def test_a_unet_of_other_settings_or_of_another_autoencoder_is_refused(config):
    assert imported(config) == 0
    with pytest.raises(CheckpointError, match=r'different settings:\n  ldm\.scheduler\.type: "rflow" -> "ddpm"'):
        train_ldm(config, START, "ldm.scheduler.type=ddpm", "ldm.sampling.sampler=ddim")
    with pytest.raises(CheckpointError, match=r"not the weights of a U-Net from this program"):
        train_ldm(config, "ldm.pretrained=runs/tiny/autoencoder.safetensors")
    state, metadata = load_weights(Path("runs/imported/ldm.safetensors"))
    save_weights(Path("other.safetensors"), state, metadata | {"autoencoder": "of other weights"})
    with pytest.raises(CheckpointError, match=r"latents of an autoencoder with other weights; set ldm\.autoencoder"):
        train_ldm(config, "ldm.pretrained=other.safetensors")
