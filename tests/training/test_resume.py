"""A resumed run equals an uninterrupted one: weights, optimizers, averages, scale, data and step count."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from data import DataSplit, VolumeFile, prepare_volumes
from data.batches import BatchPlan, training_batches
from diffusion.latents import LatentBatch
from diffusion.normalisation import Normalisation
from runtime.files import RunFolder
from runtime.processes import Process
from settings import CheckpointError, Settings
from tests.diffusion.made_latents import latents_of
from training.autoencoder_step import AutoencoderStep
from training.checkpoints import ResumableRun
from training.ldm_step import LatentDiffusionStep
from training.step import TrainingStep

CPU = Process(torch.device("cpu"))
NUM_STEPS, STOPPED_AFTER = 5, 3


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def settings(tiny_values) -> Settings:
    changes = {"max_steps": 8, "ema_decay": 0.9, "warmup_steps": 2, "learning_rate_decay": "cosine"}
    for section in ("autoencoder", "ldm"):
        tiny_values[section]["training"].update(changes)
    tiny_values["autoencoder"]["training"]["optimizer"] = "muon"
    tiny_values["ldm"]["training"]["gradient_accumulation_steps"] = 2
    return Settings.model_validate(tiny_values)


def build(settings: Settings, stage: str) -> TrainingStep:
    if stage == "autoencoder":
        return AutoencoderStep(settings, CPU)
    step = LatentDiffusionStep(settings, CPU, load_weights=False)
    step.normalisation = Normalisation.uniform(3, 0.25)
    return step


def read(index: int, position: int = 0) -> torch.Tensor:
    return torch.randn((3, 8, 8, 8), generator=torch.Generator().manual_seed(index))


def train(step: Any, settings: Settings, volumes: DataSplit, first: int, last: int) -> None:
    training = settings.autoencoder.training if step.stage == "autoencoder" else settings.ldm.training
    plan = BatchPlan.of(training, settings.seed, 0, 1)
    batches: Any = (
        training_batches(volumes.train, settings.data, plan, first, last)
        if step.stage == "autoencoder"
        else latents_of(read, len(volumes.train)).training_batches(plan, first, last)
    )
    for number, micro_batches in enumerate(batches, first):
        assert len(micro_batches) == 2
        step(micro_batches, number)


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    # A digest, which torch does not compare.
    digests = [state.pop("autoencoder", None) for state in (found, expected)]
    assert digests[0] == digests[1]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("stage", ["autoencoder", "ldm"])
def test_a_resumed_run_equals_an_uninterrupted_one_in_everything_it_holds(settings, tmp_path, stage):
    volumes = prepare_volumes(settings.data, settings.seed, 1)
    whole = build(settings, stage)
    train(whole, settings, volumes, 0, NUM_STEPS)

    stopped = build(settings, stage)
    train(stopped, settings, volumes, 0, STOPPED_AFTER)
    ResumableRun(stopped, RunFolder(tmp_path), volumes).save(STOPPED_AFTER)
    held = copy.deepcopy(stopped.state_dict())

    resumed = build(settings, stage)
    if isinstance(resumed, LatentDiffusionStep):
        resumed.normalisation = Normalisation.uniform(3, 1.0)
    first = ResumableRun(resumed, RunFolder(tmp_path), volumes).resume()
    assert first == STOPPED_AFTER
    assert_same_state(resumed.state_dict(), held)
    assert resumed.average is not None
    # The averages are neither the weights nor what the averages of a new run begin with.
    for before in (resumed.network.parameters(), build(settings, stage).network.parameters()):
        pairs = zip(resumed.average.averages, before, strict=True)
        assert any(not torch.equal(average, parameter) for average, parameter in pairs)
    train(resumed, settings, volumes, first, NUM_STEPS)
    assert_same_state(resumed.state_dict(), whole.state_dict())


def test_other_volumes_or_another_mathematics_are_refused(settings, tmp_path):
    volumes = prepare_volumes(settings.data, settings.seed, 1)
    run = ResumableRun(build(settings, "autoencoder"), RunFolder(tmp_path), volumes)
    run.save(1)

    def renamed(files: Sequence[VolumeFile]) -> tuple[VolumeFile, ...]:
        return (VolumeFile(files[0].path, "another.nii.gz", files[0].label), *files[1:])

    other = DataSplit(renamed(volumes.train), volumes.val, volumes.class_names)
    with pytest.raises(CheckpointError, match="made with other volumes"):
        ResumableRun(run.step, run.folder, other).resume()
    changed = build(settings.with_overrides({"autoencoder.training.kl_weight": 0.5}), "autoencoder")
    with pytest.raises(CheckpointError, match=r"autoencoder\.training\.kl_weight: 1e-06 -> 0\.5"):
        ResumableRun(changed, run.folder, volumes).resume()
    assert run.resume() == 1


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4)])
def test_another_number_of_volumes_per_update_is_refused(settings, tmp_path, monkeypatch, before, now):
    """As after a change from two GPUs to one, or from one to two, without a change of the accumulation."""
    volumes = prepare_volumes(settings.data, settings.seed, 1)
    run = ResumableRun(build(settings, "autoencoder"), RunFolder(tmp_path), volumes)
    monkeypatch.setattr(AutoencoderStep, "samples_per_update", before)
    run.save(1)
    assert run.resume() == 1
    monkeypatch.setattr(AutoencoderStep, "samples_per_update", now)
    with pytest.raises(CheckpointError, match=rf"volumes per update \(.* x processes\): {before} -> {now}\n"):
        run.resume()


def test_a_checkpoint_of_another_version_is_refused(settings, tmp_path):
    volumes = prepare_volumes(settings.data, settings.seed, 1)
    run = ResumableRun(build(settings, "autoencoder"), RunFolder(tmp_path), volumes)
    run.checkpoints.save(2, {"settings": {}, "networks": {}})
    with pytest.raises(CheckpointError, match=r"not a checkpoint of this version .*samples_per_update is missing"):
        run.resume()


def test_latents_come_in_the_order_in_which_their_volumes_would(settings):
    """Stage 2 with and without a cache trains on the same volumes at each step."""
    volumes = prepare_volumes(settings.data, settings.seed, 1)
    plan = BatchPlan(settings.seed, 2, 2)
    images = training_batches(volumes.train, settings.data, plan, 0, 4)
    latents = latents_of(read, len(volumes.train)).training_batches(plan, 0, 4)
    for of_images, of_latents in zip(images, latents, strict=True):
        for one, other in zip(of_images, of_latents, strict=True):
            assert one.positions == other.positions
            indices = [[file.name for file in volumes.train].index(name) for name in one.files]
            assert isinstance(other, LatentBatch)
            torch.testing.assert_close(other.mean, torch.stack([read(index) for index in indices]))
