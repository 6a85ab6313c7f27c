"""No code from files is executed, and file names cannot control the terminal."""

from __future__ import annotations

import ast
import hashlib
import logging
import os
import pickle
from pathlib import Path

import pytest
import torch

from runtime.cli import _set_up_logging
from runtime.files import printable
from settings import CheckpointError
from training.checkpoints import Checkpoints

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for path in (*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py"))
    if path.relative_to(ROOT).parts[0] not in ("runs", "tests")
)
FORBIDDEN = {"eval", "exec", "pickle.load", "pickle.loads", "yaml.unsafe_load", "yaml.full_load", "os.system"}
NEEDED = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}


def test_no_code_is_read_from_files():
    calls = [
        (node, f"{path.relative_to(ROOT)}, line {node.lineno}")
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    assert len(calls) > 5000
    for node, where in calls:
        name = ast.unparse(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        assert name not in FORBIDDEN, where
        assert "shell" not in keywords, where
        if name in NEEDED:
            keyword, value = NEEDED[name]
            assert ast.unparse(keywords[keyword]) == str(value), where
        if name == "yaml.load":
            assert ast.unparse(keywords["Loader"]) == "_Loader", where


def test_control_characters_are_escaped_in_messages_and_logs(capsys):
    name = "a\x1b[2J\r\x07\u202eb\x9bc"
    assert printable(f"first\n\t{name}", keep="\n\t") == "first\n\ta\\x1b[2J\\r\\x07\\u202eb\\x9bc"
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        _set_up_logging(quiet=False, log_file=None)
        logging.getLogger("test").warning("%s: odd", name)
        assert "\x1b" not in capsys.readouterr().err
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


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
