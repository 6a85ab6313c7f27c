"""No code from files is executed, and file names cannot control the terminal."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle

import pytest
import torch

from runtime.cli import _set_up_logging
from settings import CheckpointError
from training.checkpoints import Checkpoints


def test_control_characters_are_escaped_in_logs(capsys):
    name = "a\x1b[2J\r\x07\u202eb\x9bc"
    _set_up_logging(quiet=False, log_file=None)
    logging.getLogger("test").warning("%s: odd", name)
    assert capsys.readouterr().err == "a\\x1b[2J\\r\\x07\\u202eb\\x9bc: odd\n"


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_pickled_code_in_a_checkpoint_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    temporary = tmp_path / "payload.pt"
    torch.save({"step": 1, "payload": Payload()}, temporary)
    digest = hashlib.sha256(temporary.read_bytes()).hexdigest()[:16]
    path = temporary.rename(tmp_path / f"autoencoder_step_00000001_{digest}.pt")
    found = Checkpoints(tmp_path, "autoencoder", 2)
    assert found.newest() == path
    with pytest.raises(CheckpointError, match="cannot be read"):
        found.read(path)
    path.write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError, match="cannot be read"):
        found.read(path)
    assert not (tmp_path / "executed").exists()
