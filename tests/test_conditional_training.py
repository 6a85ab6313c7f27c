"""Stage 2 with conditions as a user runs it: checked, trained, resumed, sampled in the condition's space."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from data import prepare_volumes
from data.batches import BatchPlan
from data.formats import write_nifti
from diffusion.conditioning import check_conditions
from diffusion.latents import LatentBatch, VolumeBatch, prepare_latents
from diffusion.normalisation import Normalisation
from models.volume_codec import VolumeCodec, frozen_codec
from runtime.processes import Process
from settings import DataError, load_settings
from tests.conditional_run import AFFINE, LABEL_MAPS, conditional_config
from tests.finished_run import run_here, train_ldm

VOLUME = "ldm.conditioning.volume"
HOLE = [f"{VOLUME}.source=target", f"{VOLUME}.degrade.hole=[6,6,6]"]


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return conditional_config(tmp_path, LABEL_MAPS)


def test_a_run_with_label_maps_trains_resumes_and_samples_in_their_space(config, capsys):
    assert train_ldm(config) == 0
    expected = load_file("runs/tiny/ldm.safetensors")
    lines = [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert any("val_diffusion" in line for line in lines)
    assert Path("runs/tiny/previews/ldm_00000004.png").is_file()

    # Stopped after two steps and resumed, without the kept conditions.
    for path in [*Path("runs/tiny/checkpoints").glob("ldm_step_00000004*"), *Path("runs/latents").rglob("*.*")]:
        path.unlink()
    Path("runs/tiny/ldm.safetensors").unlink()
    assert train_ldm(config) == 0
    resumed = load_file("runs/tiny/ldm.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.items())

    arguments = ("--run", "runs/tiny", "--steps", "2")
    assert run_here("scripts/sample.py", *arguments, "--labels", "maps/case_3.nii.gz", "--num", "2", "--out", "a") == 0
    files = sorted(Path("a").glob("*.nii.gz"))
    assert [path.name for path in files] == [f"case_3_seed0_steps2_{number:04d}.nii.gz" for number in range(2)]
    first, second = (nib.load(path) for path in files)
    assert first.shape == (20, 16, 14)
    np.testing.assert_allclose(first.affine, AFFINE)
    assert np.abs(first.get_fdata() - second.get_fdata()).max() > 1e-3
    Path("two").mkdir()
    for place in (2, 3):
        shutil.copy(f"maps/case_{place}.nii.gz", "two")
    assert run_here("scripts/sample.py", *arguments, "--labels", "two", "--batch-size", "2", "--out", "b") == 0
    assert len(list(Path("b").glob("case_*.nii.gz"))) == 2
    assert Path("b/montage_two_seed0_steps2.png").is_file()
    # The samples of the same map are replaced, those of another map of that name are not.
    assert run_here("scripts/sample.py", *arguments, "--labels", "maps/case_3.nii.gz", "--out", "b") == 0
    shutil.copy("maps/case_5.nii.gz", "two/case_3.nii.gz")
    write_nifti(Path("more.nii.gz"), np.full((1, 20, 16, 14), 3.0, np.float32), AFFINE)
    for wrong, text in (
        (["two", "--out", "b"], "--out: b/case_3_seed0_steps2_0000.nii.gz is the sample of another condition of that"),
        (["maps", "--labels", "two"], "--labels: given more than once"),
        (["more.nii.gz"], "more.nii.gz: label values from 3 to 3; 0 to 2 is allowed by"),
        (["nowhere"], "--labels: nowhere does not exist"),
    ):
        assert run_here("scripts/sample.py", *arguments, "--labels", *wrong) == 2
        assert text in capsys.readouterr().err
    # After four steps the condition has little effect, so it is followed a hundredfold.
    found = []
    for options in ([], ["--guidance-scale", "100"]):
        command = ("--run", "runs/tiny", "--num", "2", "--steps", "2", "--json", "e.json", *options)
        assert run_here("scripts/evaluate.py", *command) == 0
        found.append(json.loads(Path("e.json").read_text())["conditions"])
    plain, errors = found
    assert errors["num"] == 2
    assert errors["hidden"]["l1"] == pytest.approx(plain["hidden"]["l1"], abs=1e-5)
    assert abs(errors["right"]["l1"] - plain["right"]["l1"]) > 1e-5
    assert {"right", "shuffled", "hidden"} < errors.keys()
    assert "L1 with the right condition is" in capsys.readouterr().out
    page = Path("runs/tiny/report.html").read_text()
    assert "2 samples against their held-out volumes" in page
    assert all(f'"{role}"' in page for role in ("labelmap_0", "sample_0", "target_0"))


@pytest.mark.parametrize(("encoding", "num_channels"), [("resample", 1), ("autoencoder", 3)])
def test_batches_are_the_same_wherever_latents_are_kept_and_volumes_normalised(config, encoding, num_channels):
    found = []
    for cache in ("disk", "memory", "none"):
        settings = load_settings(config, [f"ldm.latents.cache={cache}", f"{VOLUME}.encoding={encoding}", *HOLE])
        process = Process(torch.device("cpu"))
        volumes = prepare_volumes(settings.data, settings.seed, 1)
        codec = frozen_codec(settings, process)
        latents = prepare_latents(codec, volumes, settings, process, check_conditions(settings, volumes))
        batches = [batch for step in latents.training_batches(BatchPlan(1, 2, 1), 0, 5) for batch in step]
        conditions = [batch.condition for batch in batches if isinstance(batch, LatentBatch | VolumeBatch)]
        found.append(([one.unet_inputs["channels"] for one in conditions], latents.conditions.metadata))
        assert len(found[-1][0]) == 5
    parts = latents.conditions.batch(range(len(volumes.train))).parts
    labels, values, known = parts["label map"], parts["volume"][:, :-1].double(), parts["volume"][:, -1:]
    torch.testing.assert_close(labels.sum(dim=1), torch.ones_like(labels[:, 0]))
    torch.testing.assert_close(values.mean(dim=(0, 2, 3, 4)), torch.zeros(num_channels).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(values.square().mean(dim=(0, 2, 3, 4)), torch.ones(num_channels).double())
    assert (known.min(), known.max()) == (0, 1)
    for others, scale in found[1:]:
        torch.testing.assert_close(scale, found[0][1], rtol=0, atol=0)
        assert all(torch.equal(one, other) for one, other in zip(others, found[0][0], strict=True))
    # Three label values, the volume and what is known; the hole moves from pass to pass.
    assert found[0][0][0].shape == (2, 4 + num_channels, 8, 8, 8)
    assert len({tuple(part[-1].flatten().tolist()) for whole in found[0][0] for part in whole}) > len(volumes.train)


def test_a_missing_partner_stops_training_and_the_check_of_the_data(config, capsys):
    Path("maps/case_5.nii.gz").unlink()
    with pytest.raises(DataError, match=r"case_5\.nii\.gz: no partner in ldm\.conditioning\.label_map\.source: maps"):
        train_ldm(config)
    assert run_here("scripts/check_data.py", "--config", config, "--json", "check.json") == 2
    said = capsys.readouterr().out
    assert "8 of 8 volumes can be read and scaled" in said
    assert "\n1 problem:\n" in said
    assert "case_5.nii.gz: no partner" in said
    assert len(json.loads(Path("check.json").read_text())["partner_problems"]) == 1


def test_a_hole_is_filled_and_every_other_voxel_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    hole = {"encoding": "autoencoder", "source": "target", "degrade": {"hole": [5, 5, 5]}}
    config = conditional_config(tmp_path, {"volume": hole})
    assert train_ldm(config) == 0
    previews = Path("runs/tiny/previews/volumes")
    sample, condition, target = (
        np.asarray(Image.open(previews / f"ldm_00000004_{role}_0.png")).astype(int)
        for role in ("sample", "volume", "target")
    )
    is_known = condition == target
    assert np.abs(sample - target)[is_known].max() <= 1
    assert (~is_known).sum() <= 5**3
    assert np.abs(sample - target)[~is_known].max() > 5
    mask = np.zeros((1, 20, 16, 14), np.float32)
    mask[0, 3:12, 4:11, 4:9] = 1
    write_nifti(Path("mask.nii.gz"), mask, AFFINE)
    arguments = ("--run", "runs/tiny", "--steps", "2", "--condition", "images/case_3.nii.gz")
    assert run_here("scripts/sample.py", *arguments, "--mask", "mask.nii.gz", "--num", "2", "--out", "filled") == 0
    source = nib.load("images/case_3.nii.gz").get_fdata()
    drawn = [nib.load(path) for path in sorted(Path("filled").glob("*.nii.gz"))]
    inside = mask[0] > 0
    for image in drawn:
        np.testing.assert_allclose(image.affine, AFFINE)
        assert np.array_equal(image.get_fdata()[~inside], source[~inside])
        assert np.abs(image.get_fdata()[inside] - source[inside]).mean() > 1
    assert np.abs(drawn[0].get_fdata() - drawn[1].get_fdata()).max() > 1e-3
    assert Path("filled/montage_case_3_seed0_steps2.png").is_file()
    capsys.readouterr()
    assert run_here("scripts/sample.py", *arguments) == 2
    assert "--mask: not given; the run takes --condition and --mask together" in capsys.readouterr().err
    assert run_here("scripts/sample.py", "--run", "runs/tiny", "--labels", "maps") == 2
    assert "--labels: the run was trained without label maps; leave it out" in capsys.readouterr().err


class Averaging(VolumeCodec):
    """Encodes a volume as the means of blocks, in each channel."""

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool3d(image[None], 2)[0].expand(3, -1, -1, -1).clone()


@pytest.mark.parametrize("cache", ["disk", "memory"])
def test_augmented_copies_have_their_label_maps_and_condition_volumes_in_their_pose(config, cache):
    """The volumes are 1 where their label maps are: then averaged latents say what both conditions must say."""
    for path in Path("maps").iterdir():
        labels = nib.load(path).get_fdata()
        write_nifti(Path("images") / path.name, (labels == 1).astype(np.float32)[None], AFFINE)
    changes = ["data.use_augmentation=true"]
    lowered = [f"{VOLUME}.source=target", f"{VOLUME}.encoding=resample", f"{VOLUME}.degrade.downsample=[2,2,2]"]
    settings = load_settings(config, [*changes, *lowered, f"ldm.latents.cache={cache}"])
    process, volumes = Process(torch.device("cpu")), prepare_volumes(settings.data, settings.seed, 1)
    frozen = frozen_codec(settings, process)
    codec = Averaging(frozen.autoencoder, settings.autoencoder, frozen.precision)
    latents = prepare_latents(codec, volumes, settings, process, check_conditions(settings, volumes))
    seen = set()
    normalisation = Normalisation.stored(latents.conditions.metadata, 1, "condition")
    for step in latents.training_batches(BatchPlan(3, 4, 1), 0, 40):
        for batch in step:
            assert isinstance(batch, LatentBatch)
            parts = batch.condition.parts
            for place, mean, labels, channels in zip(
                batch.positions, batch.mean, parts["label map"], parts["volume"], strict=True
            ):
                share, volume = mean[0] / 2 + 0.5, normalisation.undo(channels[:-1])[0] / 2 + 0.5
                # Linear interpolation of maps and cubic of volumes differ where the side of a box crosses a voxel.
                assert (labels[1] - share).abs().max() < 0.25, place
                assert (volume - share).square().mean() < 0.1 * share.var(), place
                seen.add(float(mean.sum()))
    assert len(seen) > 5 * len(volumes.train), "hardly any copies"


NUMBERS = {"table": "people.csv", "continuous": ["age"], "categorical": ["sex"]}


def test_numbers_of_a_table_are_learned_with_other_conditions_and_asked_for_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f"case_{place}.nii.gz,{40 + place},{'FM'[place % 2]}" for place in range(8)]
    Path("people.csv").write_text("\n".join(["file,age,sex", *rows]))
    config = conditional_config(tmp_path, {"tabular": NUMBERS, **LABEL_MAPS})
    assert train_ldm(config) == 0
    trained = load_file("runs/tiny/ldm.safetensors")
    assert trained["number_embedding.0.weight"].shape[1] == 2 + 16
    capsys.readouterr()
    arguments = ("--run", "runs/tiny", "--steps", "2", "--num", "1", "--out", "drawn")
    for number in ("age=41", "age=80"):
        assert run_here("scripts/sample.py", *arguments, "--number", number, "--number", "sex=F") == 0
    drawn = [nib.load(path).get_fdata() for path in sorted(Path("drawn").glob("*.nii.gz"))]
    assert len(drawn) == 2
    assert np.abs(drawn[0] - drawn[1]).max() > 0
    capsys.readouterr()
    for wrong, text in (
        ("age", "--number: age, not a number of the run; allowed: age, sex, each once; write age=VALUE"),
        ("sex=X", "--number: sex=X is none of F, M; correct it"),
        ("age=old", "--number: age=old is not a number; correct it"),
    ):
        assert run_here("scripts/sample.py", *arguments, "--number", wrong) == 2
        assert text in capsys.readouterr().err
    # The code of the numbers is that of training, also when the training volumes' rows have changed since.
    logged = [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]
    [loss] = [line["val_diffusion"] for line in logged if "val_diffusion" in line]
    held_out = {row["volume"] for row in _evaluated()["reconstruction"]["volumes"]}
    changed = [row if row.split(",")[0] in held_out else f"{row.split(',')[0]},900,F" for row in rows]
    Path("people.csv").write_text("\n".join(["file,age,sex", *changed]))
    assert _evaluated()["skill"]["val_diffusion"] == pytest.approx(loss, rel=1e-8)
    weights = ("--weights", "runs/tiny/ldm.safetensors", "--out", "exported.pt")
    assert run_here("scripts/export_checkpoint.py", *weights) == 2
    assert "MONAI's DiffusionModelUNet takes no numbers" in capsys.readouterr().err
    Path("people.csv").write_text("\n".join(["file,age,sex", *rows[1:]]))
    with pytest.raises(DataError, match=r"case_0\.nii\.gz: no row in ldm\.conditioning\.tabular\.table"):
        train_ldm(config)


def _evaluated() -> dict[str, Any]:
    assert run_here("scripts/evaluate.py", "--run", "runs/tiny", "--num", "2", "--steps", "1", "--json", "e.json") == 0
    return json.loads(Path("e.json").read_text())
