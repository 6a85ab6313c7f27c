"""Whatever a config, a dataset.json or a checkpoint contains: success or a readable error, never a traceback."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.discovery import find
from settings import UserError, dump_yaml, known_keys, load_settings
from training.checkpoints import Checkpoints

KEYS = sorted(name for name, _ in known_keys())
NUM_INPUTS = {"values": 400, "documents": 100, "listings": 100, "checkpoints": 150}

# fmt: off
TRAPS = (
    "!!python/object/apply:os.system [touch executed]", "&a [*a]", "{? [1]: 2}", "*unknown", "2001-01-01", "0x10",
    "1_000", "1" * 5000, "1e400", ".nan", "-.inf", "[1, 2", "'", "\t", "null", "~", "[" * 500, "{a: " * 100,
    "\udcff", '"\\0"', "x" * 300, "a/" * 3000, "[1000000000, 1000000000, 1000000000]", "65536",
    "[65536, 65536, 65536]", "1000000000", "[" + "64, " * 5000 + "64]", "true", "-1", "0", "1", "2", "3", "16",
    "0.5", "[8, 16]", "[16, 16, 16]", "auto", "all", "&a [&b [1,1,1,1,1,1,1,1,1], *b, *b, *b, *b, *b, *b, *b]",
    "!!bool x", "!!timestamp x", "!!set {a}", "<<", "{<<: 1}", "&a {b: *a}", "\ud800",
)
# fmt: on
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner))
LIKELY = st.sampled_from([0, 1, 2, 3, 16, 64, 0.5, -1, "auto", "all", "none", "cuda", [8, 16], [1, 2, 3], [64] * 3])


def fuzz(name: str) -> Any:
    """Return a decorator that runs a test on that many inputs, the same in each run."""
    shared = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=NUM_INPUTS[name], deadline=None, derandomize=True, suppress_health_check=shared)


def attempt(action: Callable[[], Any]) -> tuple[Any, str]:
    """Return what an action returns, or the text of its error for the user."""
    try:
        return action(), ""
    except UserError as error:
        return None, str(error) or "an error without words"


def load(path: Path, *overrides: str) -> None:
    """Load a config; a valid one must come back equal from what it is written as."""
    loaded, error = attempt(lambda: load_settings(path, overrides))
    if error:
        assert ":" in error, error
        return
    path.with_name("again.yaml").write_text(dump_yaml(loaded))
    assert load_settings(path.with_name("again.yaml")) == loaded


@fuzz("values")
@given(
    key=st.sampled_from(KEYS),
    text=st.sampled_from(TRAPS) | (LIKELY | TREES).map(lambda value: yaml.safe_dump(value)) | st.text(max_size=12),
)
def test_any_value_of_any_key(tmp_path, monkeypatch, key, text):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text("seed: 1\n")
    load(path, f"{key}={text}")
    assert not (tmp_path / "executed").exists()


@fuzz("documents")
@given(document=TREES.map(lambda tree: yaml.safe_dump(tree).encode()) | st.binary(max_size=60))
def test_any_document(tmp_path, document):
    path = tmp_path / "config.yaml"
    path.write_bytes(document)
    load(path)


@fuzz("listings")
@given(
    listing=st.fixed_dictionaries(
        {"training": st.lists(TREES | st.fixed_dictionaries({"image": SCALARS, "label": SCALARS}), max_size=3)},
        optional={"validation": TREES},
    )
    | TREES
)
def test_any_dataset_json(tmp_path, listing):
    (tmp_path / "dataset.json").write_text(json.dumps(listing))
    found, error = attempt(lambda: find(str(tmp_path))[0])
    assert error or all(item.path.resolve().is_relative_to(tmp_path.resolve()) for item in found)


CHANGES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6)


def checkpoint() -> bytes:
    stream = io.BytesIO()
    torch.save({"step": 1, "networks": {"a": {"weight": torch.arange(24.0).reshape(2, 3, 4)}}, "scale": 0.5}, stream)
    return stream.getvalue()


CHECKPOINT = checkpoint()


@fuzz("checkpoints")
@given(changes=CHANGES, length=st.just(1.0) | st.floats(0, 1), is_hash_right=st.booleans())
def test_any_checkpoint(tmp_path, changes, length, is_hash_right):
    damaged = bytearray(CHECKPOINT)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    content = bytes(damaged[: int(length * len(damaged))])
    for path in tmp_path.iterdir():
        path.unlink()
    digest = hashlib.sha256(content if is_hash_right else CHECKPOINT).hexdigest()[:16]
    path = tmp_path / f"autoencoder_step_00000001_{digest}.pt"
    path.write_bytes(content)
    found = Checkpoints(tmp_path, "autoencoder", 2)
    newest, error = attempt(found.newest)
    assert newest == path or path.name in error
    state, error = attempt(lambda: found.read(path))
    assert isinstance(state, dict) or path.name in error
    assert path.exists(), "nothing is removed"
