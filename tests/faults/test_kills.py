"""Runs that are killed lose nothing: the campaign of tests/support/fault_campaign.py in short."""

from __future__ import annotations

import random
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.runs import checkpoints
from tests.support.fault_campaign import RUNNING, SAVING, START, DisturbedRun, Reference, Tally, document


@pytest.fixture(scope="module")
def campaign_reference(warm, tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("campaign") / "undisturbed", warm)


def adopt(reference: Reference, run: DisturbedRun) -> None:
    """Give a run everything that the undisturbed one has."""
    shutil.copytree(reference.folder / "runs", run.folder / "runs")


@pytest.mark.parametrize("stage", [pytest.param("autoencoder", marks=pytest.mark.slow), "ldm"])
def test_run_killed_at_three_moments_ends_bit_identical(warm, tmp_path, campaign_reference, stage):
    tally = Tally()
    run = DisturbedRun(tmp_path / "disturbed", campaign_reference, warm, tally, random.Random(5))
    if stage == "ldm":
        adopt(campaign_reference, run)
        for path in [*run.checkpoints.glob("ldm_*"), run.checkpoints.parent / "ldm.safetensors"]:
            path.unlink()
    # With a worker: it must not hold the run's lock when its parent was killed.
    run.stage(stage, (START, SAVING, RUNNING), num_workers=1, on_kill=lambda: None)
    assert tally.failures == []
    assert tally.identical[stage] == 1
    # A run may end before it is caught saving, and is then not killed there; the next test does not depend on that.
    assert tally.kills[stage, START] == 1
    assert "failures: 0" in document(tally, "command")


def test_run_killed_while_it_saves_resumes_from_the_previous_checkpoint(start, undisturbed, tmp_path):
    killed = start("autoencoder", signalled="SIGKILL", moment="save")
    assert killed.wait() == -signal.SIGKILL, killed.output
    assert [path.name[:26] for path in checkpoints(tmp_path, "autoencoder")] == ["autoencoder_step_00000002_"]
    assert list((tmp_path / "runs" / "tiny" / "checkpoints").glob(".autoencoder_*.tmp"))
    again = start("autoencoder")
    assert again.wait() == 0, again.output
    assert "resuming autoencoder after step 2" in again.output
    mine, expected = (load_file(place / "runs/tiny/autoencoder.safetensors") for place in (tmp_path, undisturbed))
    assert mine.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in mine.items())


def test_campaign_notices_a_lost_checkpoint_and_other_weights(tmp_path, campaign_reference, warm):
    tally = Tally()
    run = DisturbedRun(tmp_path / "disturbed", campaign_reference, warm, tally, random.Random(5))
    adopt(campaign_reference, run)
    run._check_checkpoints("autoencoder", [21, 24])
    run._check_result("autoencoder")
    assert tally.failures == []
    newest = max(run.checkpoints.glob("autoencoder_*.pt"))
    newest.write_bytes(newest.read_bytes()[:-1])
    run._check_checkpoints("autoencoder", [21, 24])
    weights = tmp_path / "disturbed" / "runs" / "campaign" / "autoencoder.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x42")
    run._check_result("autoencoder")
    text = " ".join(tally.failures)
    assert "1 damaged checkpoints under a final name" in text
    assert "checkpoints [21, 24] before the kill, [21] after it" in text
    assert "the final weights differ" in text
