"""Volumes that cannot be read any more, workers that die and numbers that are not finite, as a user meets them."""

from __future__ import annotations

import psutil

from tests.faults.runs import checkpoints, num_lines, wait_for

LONG = "autoencoder.training.max_steps=2000"


def test_file_that_turns_unreadable_stops_the_run_with_its_name_and_keeps_the_checkpoint(start, undisturbed, tmp_path):
    source = tmp_path / "volumes"
    source.mkdir()
    for number, path in enumerate(sorted((undisturbed / "runs" / "phantoms").rglob("*.nii.gz"))):
        (source / f"case\x1b[31m{number}.nii.gz").write_bytes(path.read_bytes())
    command = start("autoencoder", f"data.source={source}", "data.prepared=none", LONG)
    wait_for(lambda: len(checkpoints(tmp_path, "autoencoder")) == 2, command)
    for path in source.iterdir():
        part = source.with_name("part")
        part.write_bytes(path.read_bytes()[:200])
        part.replace(path)  # at once: no reader meets a file that is still being cut
    assert command.wait() == 2, command.output
    *_, message = command.output.splitlines()
    assert message.startswith("error: ")
    assert r"case\x1b[31m" in message, "the name is there, and cannot colour the terminal"
    assert "\x1b[31m" not in message
    # A reader that had read the header before the cut meets it in the voxels.
    assert any(words in message for words in ("cannot be read as .nii.gz", "truncated")), message
    assert "Traceback" not in command.output
    assert len(checkpoints(tmp_path, "autoencoder")) == 2


def test_killed_worker_is_reported_as_such(start, tmp_path):
    command = start("autoencoder", "data.num_workers=1", "data.prepared=none", LONG)
    wait_for(lambda: num_lines(tmp_path) >= 3, command)
    workers = psutil.Process(command.pid).children()
    worker = min(workers, key=lambda process: process.create_time())
    worker.kill()
    assert command.wait() == 2, command.output
    assert "a DataLoader worker died (" in command.output
    assert "Traceback" not in command.output
    assert checkpoints(tmp_path, "autoencoder")


def test_loss_that_is_not_finite_is_reported_with_step_term_and_file(start, tmp_path):
    command = start("autoencoder", "autoencoder.training.learning_rate=1e30", "autoencoder.training.max_grad_norm=0")
    assert command.wait() == 2, command.output
    *_, message = command.output.splitlines()
    assert message.startswith("error: step 2: ")
    assert "is not finite for" in message
    assert ".nii.gz" in message
    assert "the weights were not updated and there is no checkpoint yet" in message
    assert checkpoints(tmp_path, "autoencoder") == []
