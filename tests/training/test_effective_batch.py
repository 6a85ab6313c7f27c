"""A run that resumes on another number of ranks keeps its volumes per update, or says which number of ranks does."""

from types import SimpleNamespace

import pytest
import torch

from runtime.files import RUNS
from runtime.processes import Process
from settings import CheckpointError, Settings, stored
from tests.support.tiny_config import TINY
from training.checkpoints import for_ranks


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Settings of batches of 2 accumulated 6 times, and a checkpoint of a run with them on some ranks."""
    monkeypatch.chdir(tmp_path)
    training = {"batch_size": 2, "gradient_accumulation_steps": 6}
    settings = Settings.model_validate(TINY).with_overrides(
        {f"autoencoder.training.{name}": value for name, value in training.items()}
    )

    def saved_on(ranks, **more):
        folder = RUNS / settings.name / "checkpoints"
        folder.mkdir(parents=True)
        state = {"settings": stored(settings), "samples_per_update": 12 * ranks, "networks": torch.ones(3)} | more
        torch.save(state, folder / "autoencoder_step_00000002_0123456789abcdef.pt")
        return settings

    return SimpleNamespace(saved_on=saved_on, settings=settings)


class Agreeing(Process):
    """A process among several, of which the others always agree with it."""

    def any(self, flag):
        return flag

    def broadcast(self, value):
        return value

    def raise_first(self, error, urgency=()):
        if error is not None:
            raise error


def ranks(number):
    return Agreeing(torch.device("cpu"), world_size=number)


@pytest.mark.parametrize(("before", "now", "steps"), [(1, 2, 3), (1, 6, 1), (2, 1, 12), (4, 3, 8), (2, 2, 6)])
def test_accumulation_follows_the_ranks(run, before, now, steps):
    settings = for_ranks(run.saved_on(before), "autoencoder", ranks(now))
    assert settings.autoencoder.training.gradient_accumulation_steps == steps
    assert settings.autoencoder.training.batch_size == 2
    assert settings.ldm == run.settings.ldm


@pytest.mark.parametrize(("now", "nearest"), [(4, 3), (5, 6), (12, 6)])
def test_ranks_that_cannot_share_an_update_are_told_the_nearest_number_that_can(run, now, nearest):
    settings = run.saved_on(1)
    said = rf"have 12 volumes, which {now} ranks with batch_size 2 cannot share equally; .* can is {nearest};"
    with pytest.raises(CheckpointError, match=said):
        for_ranks(settings, "autoencoder", ranks(now))


@pytest.mark.parametrize("changed", [{"batch_size": 1}, {"gradient_accumulation_steps": 5}])
def test_what_the_user_changed_is_left_to_the_check_on_resuming(run, changed):
    settings = run.saved_on(1).with_overrides({f"autoencoder.training.{key}": v for key, v in changed.items()})
    assert for_ranks(settings, "autoencoder", ranks(2)) is settings


def test_without_a_readable_checkpoint_of_the_stage_nothing_changes(run):
    settings = run.settings
    assert for_ranks(settings, "autoencoder", ranks(2)) is settings
    assert for_ranks(run.saved_on(1), "ldm", ranks(2)) is settings
    (path,) = (RUNS / settings.name / "checkpoints").iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    assert for_ranks(settings, "autoencoder", ranks(2)) is settings
