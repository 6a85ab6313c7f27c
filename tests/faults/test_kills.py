"""Runs that are killed lose nothing: the campaign of dev/fault_campaign.py in short."""

from __future__ import annotations

import random
import shutil

import pytest

from dev.fault_campaign import RUNNING, SAVING, START, DisturbedRun, Reference, Tally, document


@pytest.fixture(scope="module")
def campaign_reference(warm, tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("campaign") / "undisturbed", warm)


def adopt(reference: Reference, run: DisturbedRun) -> None:
    """Give a run everything that the undisturbed one has."""
    shutil.copytree(reference.folder / "runs", run.folder / "runs")


@pytest.mark.parametrize("stage", ["autoencoder", "ldm"])
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
    assert tally.kills[stage, SAVING] == tally.kills[stage, START] == 1
    assert "failures: 0" in document(tally, "command")


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
