"""What users take from a run: averaged weights, and samples with the position and the intensities of the data."""

from __future__ import annotations

import copy
import functools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from diffusion.noise_process import NoiseProcess
from diffusion.normalisation import Normalisation
from diffusion.sampling import sample_latents
from evaluation.trained_run import SampleFrame, TrainedRun
from models import build_autoencoder, build_unet
from models.weight_files import load_weights
from runtime.files import RunFolder
from runtime.processes import Process
from runtime.randomness import SampleNoise
from settings import CheckpointError, Settings, load_settings, stored
from tests.finished_run import finished_run, run_here
from training.autoencoder_step import AutoencoderStep
from training.checkpoints import BestWeights, Checkpoints, export
from training.ldm_step import LatentDiffusionStep

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path, tmp_path_factory) -> Path:
    """A finished run that the test may change."""
    return shutil.copytree(finished_run(tmp_path_factory), tmp_path / "run")


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_the_exported_weights_are_the_averaged_ones_where_there_are_any(tiny_values, tmp_path, ema_decay):
    values = copy.deepcopy(tiny_values)
    values["autoencoder"]["training"].update(ema_decay=ema_decay, adversarial_weight=0.0)
    settings = Settings.model_validate(values)
    step = AutoencoderStep(settings, Process(CPU))
    expected = {name: tensor.clone() for name, tensor in step.autoencoder.state_dict().items()}
    if step.average is not None:
        for average in step.average.averages:
            average.mul_(0.5)
        expected = {name: 0.5 * tensor for name, tensor in expected.items()}
    assert (step.average is not None) == (ema_decay > 0)
    export(step, RunFolder(tmp_path))
    found = load_file(tmp_path / "autoencoder.safetensors")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_samples_are_centred_with_the_spacing_of_the_data_and_have_the_intensities_of_each_channel():
    ends: dict[str, Any] = {"lower": (-1000.0, 5.0), "upper": (3000.0, 25.0)}
    normalisation = Normalisation.uniform(3)
    frame = SampleFrame(normalisation=normalisation, spacing_mm=(1.0, 2.0, 4.0), class_names=(), **ends)
    affine = frame.affine(Settings.model_validate({"data": {"voxel_size": [32, 24, 32]}}))
    np.testing.assert_allclose(affine @ [15.5, 11.5, 15.5, 1], [0, 0, 0, 1], atol=1e-9)
    np.testing.assert_allclose(affine[:3, :3], np.diag([1.0, 2.0, 4.0]))
    volume = np.stack([np.full((2, 2, 2), 0.25), np.full((2, 2, 2), 0.5)]).astype(np.float32)
    np.testing.assert_allclose(frame.intensities(volume)[:, 0, 0, 0], [0.0, 15.0])


def test_a_written_sample_is_the_decoded_unscaled_latent_in_the_datas_intensities(tmp_path_factory, tmp_path):
    """From the files of the run alone, without the code that the command draws with."""
    run = finished_run(tmp_path_factory)
    assert run_here("scripts/sample.py", "--run", run, "--num", "2", "--seed", "3", "--out", tmp_path) == 0
    settings = load_settings(run / "config.yaml", [])
    with safe_open(run / "ldm.safetensors", framework="pt") as file:
        metadata = {name: json.loads(text) for name, text in file.metadata().items()}
    unet = build_unet(settings.ldm, settings.autoencoder.latent_channels, settings.mean_map_shape).eval()
    weights = load_file(run / "ldm.safetensors")
    scale, mean = (weights.pop(f"metadata.latent_{name}") for name in ("scale", "mean"))
    unet.load_state_dict(weights)
    autoencoder = build_autoencoder(settings.autoencoder).eval()
    autoencoder.load_state_dict(load_file(run / "autoencoder.safetensors"))
    assert (scale - 1).abs().max() > 0.1
    for position in range(2):
        labels = torch.tensor([position])  # the classes in turn
        latent = sample_latents(
            functools.partial(unet, class_labels=labels),
            NoiseProcess(settings.ldm.scheduler, CPU),
            SampleNoise(3, CPU),
            [position],
            settings.latent_shape,
            settings.ldm.sampling.num_inference_steps,
        )
        with torch.no_grad():
            volume = autoencoder.decode(latent / scale + mean)[0, 0]
        share = ((volume + 1) / 2).clamp(0, 1).numpy()
        lower, upper = metadata["lower"][0], metadata["upper"][0]
        found = nib.load(tmp_path / f"sample_seed3_{position:04d}.nii.gz").get_fdata()
        np.testing.assert_allclose(found, lower + share * (upper - lower), atol=1e-3 * (upper - lower))


def test_an_unfinished_run_is_used_with_the_averaged_weights_of_its_newest_checkpoint(run, caplog):
    stages = ("autoencoder", "ldm")
    expected = {stage: load_weights(run / f"{stage}.safetensors")[0] for stage in stages}
    finished = TrainedRun(run).unet()[1]
    content = {"networks": {"autoencoder": expected["autoencoder"]}, "average": {}, "metadata": {}}
    content["settings"] = stored(load_settings(run / "config.yaml"))
    Checkpoints(run / "checkpoints", "autoencoder", 2).save(3, content)
    for stage in stages:
        (run / f"{stage}.safetensors").unlink()
    opened = TrainedRun(run)
    network, frame = opened.unet()
    torch.testing.assert_close(dict(network.state_dict()), expected["ldm"], rtol=0, atol=0)
    torch.testing.assert_close(dict(opened.codec().autoencoder.state_dict()), expected["autoencoder"], rtol=0, atol=0)
    assert torch.equal(frame.normalisation.scale, finished.normalisation.scale)
    assert torch.equal(frame.normalisation.mean, finished.normalisation.mean)
    assert frame.model_dump(exclude={"normalisation"}) == finished.model_dump(exclude={"normalisation"})
    assert "stage ldm is not finished; using its averaged weights after step 4" in caplog.text
    assert "stage autoencoder is not finished; using its newest weights after step 3" in caplog.text
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match=r"ldm\.safetensors: not found"):
        TrainedRun(run).unet()


def test_a_run_that_goes_on_after_its_end_is_used_with_its_newest_checkpoint(run, caplog):
    checkpoints = Checkpoints(run / "checkpoints", "ldm", 2)
    path = checkpoints.newest()
    assert path is not None
    state = checkpoints.read(path)
    first = next(iter(state["average"]))
    state["average"][first] = torch.full_like(state["average"][first], 7.0)
    finished = load_file(run / "ldm.safetensors")[first]

    def used(best: str | None = None) -> torch.Tensor:
        return TrainedRun(run, best=best).unet()[0].state_dict()[first]

    assert torch.equal(used(), finished)
    assert "not finished" not in caplog.text
    checkpoints.save(6, state)
    Checkpoints(run / "checkpoints", "autoencoder", 2).save(3, {})
    assert used().unique().tolist() == [7.0]
    assert "stage ldm is not finished; using its averaged weights after step 6" in caplog.text
    assert "stage 1 is still training (step 3); using its finished weights of step 0" in caplog.text
    assert torch.equal(used(best="ldm"), finished)
    # Started again from the first step, the finished weights are those of an earlier run.
    shutil.rmtree(run / "checkpoints")
    assert torch.equal(used(), finished)
    checkpoints.save(2, state)
    assert used().unique().tolist() == [7.0]


def test_the_best_weights_are_those_of_the_best_validation(run):
    # The only validation is that of the last step.
    with safe_open(run / "ldm_best.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["step"]) == 4
    last = load_weights(run / "ldm.safetensors")[0]
    torch.testing.assert_close(dict(TrainedRun(run, best="ldm").unet()[0].state_dict()), last, rtol=0, atol=0)
    # They are enough without the last weights, for example on another machine.
    (run / "ldm.safetensors").unlink()
    shutil.rmtree(run / "checkpoints")
    torch.testing.assert_close(dict(TrainedRun(run, best="ldm").unet()[0].state_dict()), last, rtol=0, atol=0)
    (run / "ldm_best.safetensors").rename(run / "ldm.safetensors")
    with pytest.raises(CheckpointError, match="no validation is finished yet; leave out --best"):
        TrainedRun(run, best="ldm").unet()
    config = (run / "config.yaml").read_text()
    named = config.replace("\nldm:\n  autoencoder: null", f"\nldm:\n  autoencoder: {run}/autoencoder.safetensors")
    (run / "config.yaml").write_text(named)
    TrainedRun(run).codec()
    with pytest.raises(CheckpointError, match=r"--best: .* so there is no choice; leave out --best"):
        TrainedRun(run, best="autoencoder").codec()


@pytest.mark.parametrize(("stage", "metric", "kept"), [("autoencoder", "val_psnr", 2), ("ldm", "val_diffusion", 3)])
def test_weights_are_kept_when_a_validation_is_better_than_all_before_it_even_of_an_earlier_session(
    tiny_values, tmp_path, caplog, stage, metric, kept
):
    settings = Settings.model_validate(tiny_values)
    make = AutoencoderStep if stage == "autoencoder" else LatentDiffusionStep
    step, folder = make(settings, Process(CPU), load_weights=False), RunFolder(tmp_path)
    first = next(step.network.parameters())
    name = next(iter(dict(step.network.named_parameters())))

    def validated(first_step: int, values: dict[int, float]) -> list[float]:
        """Return the weight that is kept after these validations of one session; it is the number of its step."""
        keep = BestWeights(step, folder, first_step)
        for done, value in values.items():
            with torch.no_grad():
                first.fill_(done)
                if step.average is not None:
                    step.average.averages[0].fill_(done)
            keep(done, {metric: value})
        return load_file(keep.path)[name].unique().tolist()

    assert validated(0, {1: 0.5, 2: 0.7, 3: 0.3}) == [kept]
    assert validated(3, {4: 0.4}) == [kept]
    # Values that are not finite do not count, and a damaged file does not keep the run from going on.
    path = folder.best_weights(stage)
    path.write_bytes(b"damaged")
    infinite = math.inf if metric == "val_psnr" else -math.inf
    assert validated(4, {5: math.nan, 6: 0.5, 7: math.nan, 8: infinite}) == [6]
    assert f"{path}: damaged; only validations from here on count" in caplog.text
    # A run that starts again under the same name has no best step yet.
    BestWeights(step, folder, first_step=0)(0, {})
    assert not path.exists()
