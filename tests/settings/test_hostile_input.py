"""Configs that nobody meant to write: each gets a readable error at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from settings import ConfigError, load_settings

pytestmark = pytest.mark.timeout(120)


def answer(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: " + "[" * 5000, "not valid YAML (nested more than 30 deep)"),
        ("- " * 5000, "nested more than 30 deep"),
        ("data: !!bool maybe", "not valid YAML ('maybe' is neither true nor false)"),
        ("data: !!float ''", "not valid YAML"),
        ("data: !!timestamp soon", "not valid YAML"),
        ("data: {source: !!binary aGFsbG8=}", "not valid YAML"),
        ("data:\n\tsource: x\n", r"config.yaml:2: not valid YAML (found character '\t'"),
        ("seed: 1\nname: a\0\n", "config.yaml:2: not valid YAML (the character U+0000 is not allowed)"),
        ("seed: 1\n---\nseed: 2\n", "found another document"),
        ("x" * (1 << 21), "2,097,152 bytes; the limit is 1,048,576"),
        ("d\u0430ta: {}", r"unknown key, in ASCII 'd\u0430ta'; did you mean data?"),
        ("name: " + "猫" * 100, "at most 60 characters"),
        (r'data: {source: "a\0b"}', "text without NUL characters"),
        ("data: {source: ''}", "non-empty text"),
    ],
)
def test_file_is_refused(tmp_path, content, expected):
    path = tmp_path / "config.yaml"
    path.write_text(content)
    assert expected in answer(path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.voxel_size=" + "[" * 5000, "... is not a YAML value (nested more than 30 deep)"),
        ("data.source=a\udcff", "the character U+DCFF is not allowed"),
        ("data.voxel_size=[1000000000, 64, 64]", "each at most 65536"),
        ("data.voxel_size=[65536, 65536, 65536]", "needs activations of 256 PiB; allowed: at most 1 PiB"),
        ("autoencoder.training.batch_size=2147483647", "with batch_size 2147483647 needs activations of"),
        ("autoencoder.training.batch_size=9223372036854775808", "below 2147483648"),
        ("autoencoder.training.learning_rate=1" + "0" * 400, "allowed: a number"),
        ("autoencoder.training.learning_rate=1" + "0" * 5000, "not a YAML value"),
        ("autoencoder.training.discriminator.num_layers_d=1000000000", "at most 10"),
        ("ldm.unet.num_channels=[1000000000001, 1000000000002, 1000000000003]", "each at most 65536"),
        ("ldm.unet.num_channels=[" + "64, " * 5000 + "64]", "at most 12 entries"),
        ("ldm.scheduler.num_train_timesteps=1000000000", "at most 100000"),
        ("data.num_workers=1000000", "at most 256"),
        ("data.spacing=[1e-300, 1.0, 1.0]", "each at least 1e-06"),
    ],
)
def test_override_is_refused(tmp_path, override, expected):
    path = tmp_path / "config.yaml"
    path.write_text("seed: 1\n")
    assert expected in answer(path, override)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("nowhere"), "no such file"),
    ],
)
def test_config_that_is_not_a_file_is_refused(tmp_path, make: Callable[[Path], None], expected):
    make(tmp_path / "config.yaml")
    assert expected in answer(tmp_path / "config.yaml")


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfseed: 3\r\nname: a\r\n", b"seed: 3\rname: a\r"])
def test_byte_order_mark_and_foreign_line_ends_are_read(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    settings = load_settings(tmp_path / "config.yaml")
    assert (settings.seed, settings.name) == (3, "a")


def test_anchors_are_allowed(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("autoencoder: {num_channels: &c [32, 64, 64]}\nldm: {unet: {num_channels: *c}}")
    settings = load_settings(path)
    assert settings.ldm.unet.num_channels == settings.autoencoder.num_channels == (32, 64, 64)


@pytest.mark.parametrize(
    ("content", "override", "mark"),
    [
        ("name\uff1amine\ndata\uff1a\n", "seed=1", "\uff1a"),
        ("data: {voxel_size: [64\uff0c64\uff0c32]}", "seed=1", "\uff0c"),
        ("data:\n  source\uff1a/data/ct", "seed=1", "\uff1a"),
        ("seed: 1", "data.num_workers\uff1d2", "\uff1d"),
    ],
)
def test_full_width_punctuation_is_named(tmp_path, content, override, mark):
    (tmp_path / "config.yaml").write_text(content)
    plain = dict(zip("\uff1a\uff0c\uff1d", ":,=", strict=True))[mark]
    assert answer(tmp_path / "config.yaml", override).endswith(f"; write {plain} instead of the full-width {mark}")


def test_the_length_of_a_list_is_no_alternative_to_its_entries(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {voxel_size: [a]}")
    expected = "allowed: a list whose entries are each a whole number, at least 3 entries;"
    assert expected in answer(tmp_path / "config.yaml")
