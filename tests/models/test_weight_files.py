"""Weight files: aligned when read, with the permissions of other files, and unreadable is not absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from models.exchange import read_foreign_weights
from models.weight_files import load_weights, read_tensors, save_weights
from settings import CheckpointError
from tests.privileges import without_privileges


def test_tensors_read_from_a_file_are_aligned_as_new_ones_are(tmp_path):
    """Matrix products sum in another order at other addresses, so sampling would differ from training."""
    path = tmp_path / "a.safetensors"
    written = {"a": torch.rand(3), "b": torch.rand(5, 5), "c": torch.rand(7).bfloat16(), "d": torch.rand(4)}
    save_weights(path, written, {"mean": torch.rand(3)})
    tensors, _ = read_tensors(path)
    assert [tensor.data_ptr() % 64 for tensor in tensors.values()] == [0] * 5
    for name, tensor in written.items():
        assert torch.equal(tensors[name], tensor)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_the_permissions_of_weights_follow_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        save_weights(tmp_path / "new" / "a.safetensors", {"a": torch.rand(3)}, {"stage": "ldm"})
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "a.safetensors").stat().st_mode & 0o777 == mode


def test_weights_that_may_not_be_read_are_not_called_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    save_weights(Path("a.safetensors"), {"a": torch.rand(3)}, {})
    Path("a.safetensors").chmod(0)
    for read in (load_weights, read_foreign_weights):
        with without_privileges(), pytest.raises(CheckpointError, match="Permission denied"):
            read(Path("a.safetensors"))
