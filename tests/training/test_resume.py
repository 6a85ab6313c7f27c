"""A resumed run equals an uninterrupted one, also on other ranks, or it is refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from data import DataSplit, VolumeFile, prepare_volumes
from data.batches import BatchPlan, training_batches
from diffusion.latents import LatentBatch
from diffusion.normalisation import Normalisation
from runtime.files import RUNS, RunFolder
from runtime.processes import Process
from settings import CheckpointError, Settings, stored
from tests.diffusion.made_latents import latents_of
from training.autoencoder_step import AutoencoderStep
from training.checkpoints import ResumableRun, for_ranks
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


def test_other_volumes_another_mathematics_and_other_updates_are_refused(settings, tmp_path, monkeypatch):
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
    # As after a change from one GPU to two without a change of the accumulation.
    with monkeypatch.context() as patch:
        patch.setattr(AutoencoderStep, "samples_per_update", 4)
        with pytest.raises(CheckpointError, match=r"volumes per update .*: 2 -> 4\n"):
            run.resume()
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


@pytest.fixture
def sixths(tiny_values) -> Settings:
    """Settings of batches of 2 accumulated 6 times."""
    tiny_values["autoencoder"]["training"] |= {"batch_size": 2, "gradient_accumulation_steps": 6}
    return Settings.model_validate(tiny_values)


def saved_on(num_ranks: int, settings: Settings) -> Path:
    """Write a checkpoint of a run on some ranks."""
    folder = RUNS / settings.name / "checkpoints"
    folder.mkdir(parents=True)
    state = {"settings": stored(settings), "samples_per_update": 12 * num_ranks, "networks": torch.ones(3)}
    path = folder / "autoencoder_step_00000002_0123456789abcdef.pt"
    torch.save(state, path)
    return path


class Agreeing(Process):
    """A process among several, of which the others always agree with it."""

    def any(self, flag):
        return flag

    def broadcast(self, value):
        return value

    def raise_first(self, error, urgency=()):
        if error is not None:
            raise error


def on_ranks(number: int, settings: Settings, stage: str = "autoencoder") -> Settings:
    return for_ranks(settings, stage, Agreeing(torch.device("cpu"), world_size=number))


@pytest.mark.parametrize(("before", "now", "steps"), [(1, 2, 3), (1, 6, 1), (2, 1, 12), (4, 3, 8), (2, 2, 6)])
def test_accumulation_follows_the_ranks(sixths, before, now, steps):
    saved_on(before, sixths)
    settings = on_ranks(now, sixths)
    assert settings.autoencoder.training.gradient_accumulation_steps == steps
    assert settings.autoencoder.training.batch_size == 2
    assert settings.ldm == sixths.ldm


def test_ranks_that_cannot_share_an_update_are_told_the_nearest_number_that_can(sixths):
    saved_on(1, sixths)
    for now, nearest in ((4, 3), (5, 6), (12, 6)):
        said = rf"have 12 volumes, which {now} ranks with batch_size 2 cannot share equally; .* can is {nearest};"
        with pytest.raises(CheckpointError, match=said):
            on_ranks(now, sixths)


def test_accumulation_stays_if_the_user_changed_it_and_without_a_readable_checkpoint_of_the_stage(sixths):
    assert on_ranks(2, sixths) is sixths
    path = saved_on(1, sixths)
    for key, value in (("batch_size", 1), ("gradient_accumulation_steps", 5)):
        changed = sixths.with_overrides({f"autoencoder.training.{key}": value})
        assert on_ranks(2, changed) is changed
    assert on_ranks(2, sixths, "ldm") is sixths
    path.write_bytes(path.read_bytes()[:-100])
    assert on_ranks(2, sixths) is sixths
