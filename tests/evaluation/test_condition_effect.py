"""What a condition is worth: a network that draws its condition scores with the right one only."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from data import DataSplit, VolumeFile, prepare_volumes
from data.formats import write_nifti
from data.loading import load_file, to_unit
from diffusion.conditioning import ConditionStore, Preparation, check_conditions, prepare_conditions
from diffusion.conditioning.kind import KnownVoxels, Partners
from diffusion.conditioning.tabular import NumberCode, Tabular
from diffusion.conditioning.volume import held_out_with_hole
from diffusion.latents import Latents
from diffusion.normalisation import Normalisation
from diffusion.sampling import VolumeSampler
from evaluation.quality import condition_effect, effect_lines
from runtime.precision import Precision
from runtime.processes import Process
from settings import CheckpointError, DataError, Settings
from settings.conditioning import ConditioningSettings

TARGET = {"encoding": "resample", "source": "target"}


class DrawsItsCondition(torch.nn.Module):
    """Predicts the noise that leaves the first concatenated channel, whatever the noisy latent."""

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """Return what makes the clean latent equal to the condition, for rectified flow."""
        return (x[:, 3:4] - x[:, :3]) * (1000 / times.view(-1, 1, 1, 1, 1))


@pytest.fixture
def cases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("settings.autoencoder.OCCUPIED_THRESHOLD", 0.5)
    for place in range(6):
        voxels = np.random.default_rng(place).normal(0, 1, (1, 16, 16, 16)).astype(np.float32)
        write_nifti(tmp_path / "images" / f"{place}.nii.gz", voxels, np.eye(4))


def effect(values, volume, is_right: bool = True, decode=lambda latent: latent[:1]):
    """Measure with latents that are volumes, in their range."""
    values = copy.deepcopy(values)
    values["autoencoder"] |= {"num_channels": [8], "attention_levels": [False]}
    values["autoencoder"]["training"] |= {"occupied_weight": 5.0}
    values["data"] |= {"source": "images", "val_fraction": 0.8}
    values["ldm"] |= {"conditioning": {"volume": volume}, "scheduler": {"type": "rflow"}}
    values["ldm"]["sampling"] |= {"sampler": "rflow", "num_inference_steps": 3}
    values["ldm"]["unet"] |= {"num_channels": [16], "attention_levels": [False], "num_head_channels": 8}
    settings = Settings.model_validate(values)
    split = prepare_volumes(settings.data, settings.seed, 1)
    images = [load_file(file, settings.data).image for file in (*split.train, *split.val)]
    cpu, normalisation = torch.device("cpu"), Normalisation.uniform(3, 1.0)
    codec = cast(Any, SimpleNamespace(precision=Precision(settings.device, cpu), decode=decode))

    def read(index: int, number: int, copy: int) -> Tensor:
        return torch.cat([images[index] if is_right else -images[index], torch.ones(1, 16, 16, 16)])

    pairs = check_conditions(settings, split)
    store = prepare_conditions(pairs, Preparation(settings, split, Process(cpu), codec))
    store = ConditionStore({"volume": replace(store.prepared["volume"], read=read)})
    facts = ((1.0, 1.0, 1.0), (0.0,), (1.0,), "")
    latents = Latents(split, settings.data, None, normalisation, torch.zeros(()), *facts, conditions=store)
    held_out = held_out_with_hole(pairs["volume"], split.val, settings.data)
    sampler = VolumeSampler(DrawsItsCondition(), codec, settings, normalisation, batch_size=2)
    targets = [to_unit(load_file(split.val[place], settings.data).image) for place in held_out]
    return condition_effect(sampler, latents, held_out), targets


@pytest.mark.parametrize("degrade", [{"hole": [4, 4, 4]}, {"downsample": [1, 2, 1]}])
def test_the_right_condition_has_no_error_and_another_has_one(tiny_values, cases, degrade):
    found, targets = effect(tiny_values, TARGET | {"degrade": degrade})
    assert found["num"] == len(targets) >= 2
    assert found["region"] == ("hole" if "hole" in degrade else "volume")
    assert found["right"]["l1"] < 1e-5
    assert min(found[name]["l1"] for name in ("shuffled", "hidden")) > 0.05
    assert (found["right"]["iou"], found["right"]["chamfer"]) == (1, 0)
    assert 0.1 < found["shuffled"]["iou"] < 0.9
    assert 0 < found["shuffled"]["chamfer"] < 2
    _, head, right, *_, last = effect_lines(found)
    assert head.split()[-2:] == ["IoU", "Chamfer"]
    assert right.split()[-2:] == ["1.000", "0.000"]
    assert last.endswith("L1 with the right condition is 100.0 % lower than with another's")
    assert ("interpolated" in found) == ("downsample" in degrade)
    if "downsample" in degrade:
        blocks = torch.stack(targets).reshape(len(targets), 16, 8, 2, 16)
        assert found["interpolated"]["psnr"] == pytest.approx(found["shuffled"]["psnr"], abs=6)
        assert 0.1 < found["interpolated"]["iou"] < found["interpolated_kept"]["iou"] < 0.9
        # What is known as means of blocks is kept, so that a wrong sample errs within blocks only.
        spread = (blocks - blocks.mean(dim=3, keepdim=True)).abs().mean()
        assert found["hidden"]["l1"] == pytest.approx(float(spread), rel=1e-3)


def test_samples_that_are_not_finite_are_an_error_and_not_an_effect(tiny_values, cases):
    with pytest.raises(CheckpointError, match="sample 0, right: the networks gave values that are not finite"):
        effect(tiny_values, TARGET | {"degrade": {"hole": [4, 4, 4]}}, decode=lambda latent: latent[:1] * torch.nan)


def test_only_the_hole_counts_and_a_volume_without_one_has_no_error(tiny_values, cases):
    mask = np.zeros((1, 16, 16, 16), np.float32)
    mask[0, 2:5, 2:5, 2:5], mask[0, 4, 4, 4] = 1, 0

    def measured(num_empty: int):
        for place in range(6):
            written = 0 * mask if place < num_empty else mask
            write_nifti(Path("masks") / f"{place}.nii.gz", written, np.eye(4))
        return effect(tiny_values, TARGET | {"degrade": {"hole": "masks"}})

    found, targets = measured(0)
    hole = torch.from_numpy(mask[0] > 0)
    shares = []
    for target, other in zip(targets, [*targets[1:], targets[0]], strict=True):
        a, b = (volume[0][hole] > 0.5 for volume in (target, KnownVoxels(hole).kept_in(other, target)))
        shares.append((a & b).sum() / (a | b).sum())
    assert found["shuffled"]["iou"] == pytest.approx(float(sum(shares)) / len(shares), abs=1e-6)
    found, fewer = measured(3)
    assert found["num"] == len(fewer) < len(targets)
    assert found["right"]["l1"] < 1e-5
    assert 0.05 < found["shuffled"]["l1"] < 1
    # Before training, as evaluation would refuse them after it.
    with pytest.raises(DataError, match="0 held-out masks with voxels above 0 on the network's grid"):
        measured(6)


def test_an_inverted_condition_is_as_bad_as_that_of_another_volume(tiny_values, cases):
    shutil.copytree("images", "conditions")
    found, _ = effect(tiny_values, {"encoding": "resample", "source": "conditions"}, is_right=False)
    assert found["region"] == "volume"
    assert found["right"]["l1"] > 0.05
    assert "interpolated" not in found
    worse = {"num": 2, "region": "volume", "right": {"l1": 0.3, "psnr": 9.0}, "shuffled": {"l1": 0.2, "psnr": 9.0}}
    assert effect_lines(worse)[-1].endswith("L1 with the right condition is 50.0 % higher than with another's")


def test_numbers_are_coded_as_they_were_in_training_whatever_volumes_there_are_now():
    code = NumberCode(continuous=(("age", 50.0, 10.0),), categorical=(("sex", ("F", "M")),), max_categories=2)
    rows = ({"age": "60", "sex": "M"}, {"age": "45", "sex": "F"})
    kind = Tabular(ConditioningSettings())
    split = DataSplit(tuple(VolumeFile(Path(name), name) for name in "ab"), ())
    run = Preparation(Settings(), split, Process(torch.device("cpu")), cast(Any, None), learned={"tabular": code})
    found = kind.prepare(Partners(rows=rows), run)
    assert [found.read(index, 0, 0).tolist() for index in (0, 1)] == [[1, 1, 0, 1], [-0.5, 1, 1, 0]]
    with pytest.raises(DataError, match=r"b: sex=X is none of F, M, which the run was trained with"):
        kind.prepare(Partners(rows=(rows[0], {"age": "45", "sex": "X"})), run)
