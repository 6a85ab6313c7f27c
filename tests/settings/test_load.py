"""A config is accepted, or refused at once with everything that is wrong with it, and comes back from its text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from settings import (
    CheckpointError,
    ConfigError,
    Settings,
    dump_short,
    dump_with_origins,
    dump_yaml,
    load_settings,
    read_overrides,
    restored,
    stored,
    validate,
)
from tests.conftest import ROOT


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def answer(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(write(folder, text), overrides)
    return str(caught.value)


FIVE_MISTAKES = """
data:
  voxel_size: [255, 256, 64]
  num_wrokers: 2
autoencoder:
  num_channels: [16, 32, 64]
  norm_num_groups: 5
  training: {batch_size: 0}
device: {amp_dtype: fp8}
"""


def test_all_mistakes_are_reported_at_once_with_the_nearest_names(tmp_path):
    found = answer(tmp_path, FIVE_MISTAKES)
    assert found.count("\n") == 5
    assert "line 3, data.voxel_size: [255, 256, 64] is not divisible by [4, 4, 4]" in found
    assert "the nearest is [256, 256, 64]" in found
    assert "data.num_wrokers: unknown key; did you mean data.num_workers?" in found
    assert "autoencoder.norm_num_groups: 5 does not divide num_channels [16, 32, 64]; allowed: 1, 2, 4, 8, 16" in found
    assert "autoencoder.training.batch_size: found 0; allowed: at least 1; for example 4" in found
    assert "device.amp_dtype: found 'fp8'; allowed: auto, bfloat16 or float16" in found


def test_mistakes_are_reported_by_the_command_before_its_slow_imports_and_with_exit_code_2(tmp_path):
    path = write(tmp_path, FIVE_MISTAKES)
    command = [sys.executable, "-X", "importtime", str(ROOT / "train_autoencoder.py"), "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "5 problems in" in done.stderr
    assert "Traceback" not in done.stderr
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "pydantic" in imported
    assert not imported & {"torch", "monai", "numpy", "scipy"}


def test_scientific_notation_is_a_number_and_no_is_text(tmp_path):
    settings = load_settings(write(tmp_path, "name: no\nautoencoder: {training: {learning_rate: 1e-4}}"))
    assert settings.autoencoder.training.learning_rate == 1e-4
    assert settings.name == "no"


CONDITIONING = "ldm: {{conditioning: {{{}}}}}"
TARGET = "source: target, encoding: resample"
CONTROLLED = "label_map: {source: maps, num_classes: 3, controlnet: [4, 8, 16]}"
CONDITIONS = {
    "type: class": "0 with type class; allowed: 2 or more",
    "label_map: {source: maps}": "num_classes: not set, and source is; allowed: both or",
    "label_map: {num_classes: 3}": "label_map.source: not set, and num_classes is",
    "label_map: {source: maps, num_classes: 1}": "found 1; allowed: 0 or at least 2",
    "volume: {encoding: resample}": "volume.source: not set, and encoding is",
    "volume: {source: ct, encoding: autoencoder, num_channels: 2}": "2, and autoencoder.in_channels is 1",
    "volume: {degrade: {hole: [4, 4, 4]}}": "degrade: downsample [1, 1, 1] and hole [4, 4",
    f"volume: {{{TARGET}}}": "degrade: downsample [1, 1, 1] and hole null with source",
    f"volume: {{{TARGET}, degrade: {{downsample: [1, 3, 1]}}}}": "[1, 3, 1] does not divide data.voxel_size",
    f"volume: {{{TARGET}, degrade: {{hole: [4, 64, 4]}}}}": "[4, 64, 4] is not smaller than data.voxel_size [64",
    f"{CONTROLLED}": "ldm.pretrained: null, and a ControlNet needs a U-Net to control",
    f"{CONTROLLED.replace('3', '300')}": "controlnet: [4, 8, 16] with 300 label values; allowed: 2 to 256",
    f"{CONTROLLED.replace('3', '0')}": "[4, 8, 16] with 0 label values",
    f"{CONTROLLED.replace(', 16', '')}": "[4, 8], and the autoencoder has strides of [[2, 2, 2], [2, 2, 2]]",
    "tabular: {continuous: [age]}": "tabular.table: not set, and continuous is",
    "tabular: {table: t.csv, continuous: [age, AGE]}": "continuous: column age named twice",
    "scan: {modality: 128}": "scan.modality: found 128; allowed: below 128",
    "scan: {regions: [chest, leg]}": "scan.regions: found [chest, leg]",
    "type: class, num_classes: 2, scan: {modality: 8}": "scan.modality: 8 with type class",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # What is no config
        ("- a\n- b\n", "holds a list"),
        ("seed: 1\nname: a\nseed: 2\n", "seed: given twice, on lines 1 and 3; allowed: once; remove one"),
        ("data: 3\n", "3 is not a section"),
        ("a: " + "[" * 5000, "not valid YAML (line 1: nested more than 30 deep)"),
        ("- " * 5000, "nested more than 30 deep"),
        ("data: &a {source: *a}", "an alias; write the value out"),
        *((f"data: {text}", "not valid YAML") for text in ("[1", "!!bool maybe", "!!float ''", "!!timestamp soon")),
        ("data: {source: !!binary aGFsbG8=}", "not valid YAML"),
        ("data:\n\tsource: x\n", r"not valid YAML (line 2: found character '\t'"),
        ("seed: 1\nname: a\0\n", "not valid YAML (line 2: the character U+0000 is not allowed)"),
        ("seed: 1\n---\nseed: 2\n", "found another document"),
        ("x" * (1 << 21), "2,097,152 bytes; the limit is 262,144"),
        ("seed: 1\n" * 25_000, "not valid YAML (line 2500: more than 5000 keys and values)"),
        ("data: {voxel_size: [" + "1, " * 80_000 + "1]}", "not valid YAML (line 1: more than 5000 keys and values)"),
        ("name\uff1amine\n", "; write : instead of the full-width \uff1a"),
        # One key
        ("batch_size: 2\n", "did you mean autoencoder.training.batch_size or ldm.training.batch_size?"),
        ("d\u0430ta: {}", r"unknown key, in ASCII 'd\u0430ta'; did you mean data?"),
        ("autoencoder: {training: {batch_size: true}}", "found true; allowed: a whole number; for"),
        ("autoencoder: {training: {batch_size: '4'}}", "found '4'; allowed: a whole number"),
        ("autoencoder: {training: {learning_rate: .nan}}", "allowed: a finite number"),
        ("device: {mixed_precision: yes}", "found 'yes'; allowed: true or false"),
        ("device: {type: gpu}", "allowed: auto, cuda or cpu;"),
        ("autoencoder: {training: {lr: 1}}", "lr: unknown key; this section has: batch_size, "),
        ("ldm: {<<: {}}", "ldm.<<: unknown key; this section has: autoencoder, "),
        ("data: {Voxel-Size: 3}", "did you mean data.voxel_size?"),
        ("data: {voxel_size: [a]}", "allowed: a list whose entries are each a whole number; for"),
        ("name: ../escape", "allowed: letters, digits, _, - and dots"),
        ("name: " + "猫" * 100, "at most 60 characters"),
        (r'data: {source: "a\0b"}', "text without NUL"),
        ("data: {source: ''}", "at least 1 character"),
        ("seed: -1", "at least 0"),
        *((f"name: {name}", f"name: runs/{name} is a folder that all runs share") for name in ("checks", "Latents")),
        ("autoencoder: {training: {slab_rows: 1}}", "slab_rows: found 1; allowed: 0 or at least 2"),
        # Several keys
        ("autoencoder: {attention_levels: [false, true]}", "2 entries for 3 levels"),
        ("autoencoder: {num_res_blocks: [1, 2]}", "allowed: one for each entry of num_channels"),
        ("autoencoder: {training: {checkpoint_levels: 4}}", "4 of 3 levels; allowed: all, or 1 to 3"),
        ("autoencoder: {implementation: monai, training: {slab_rows: 8}}", "set autoencoder.implementation: lean"),
        ("autoencoder: {implementation: monai, bottleneck: vq}", "set autoencoder.implementation: lean"),
        ("autoencoder: {training: {trainable: decoder}}", "decoder without autoencoder.pretrained"),
        ("autoencoder: {training: {use_gradient_checkpointing: false, use_nested_checkpointing: true}}", "to nest"),
        ("autoencoder: {training: {discriminator: {num_layers_d: 5}}}", "5 layers need at least 96 voxels per axis"),
        ("autoencoder: {training: {warmup_steps: 30000}}", "not below max_steps (20000)"),
        ("data: {patch_size: [512, 64, 64]}", "is larger than voxel_size"),
        ("data: {intensity: {lower: 99, upper: 1}}", "99 is not below upper (1)"),
        ("data: {intensity: {lower: -1000, upper: 1000}}", "set mode: window"),
        ("data: {num_workers: 0, persistent_workers: true}", "set num_workers to 1 or more"),
        ("data: {cache_rate: 1, prepared: none}", "1 with prepared: none; allowed: 0; set 0, or prepared: memory"),
        ("data: {cache_rate: 7}", "cache_rate: found 7"),
        ("ldm: {scheduler: {type: rflow}, sampling: {sampler: ddim}}", "ddim cannot sample from scheduler type rflow"),
        ("ldm: {unet: {num_head_channels: 48}}", "48 does not divide the 128 channels"),
        ("autoencoder: {strides: [[2, 2, 1]]}", "1 entry for 3 levels; allowed: 2, or 2, one for each downsampling"),
        ("autoencoder: {strides: [[2, 2, 1], [1, 1, 1]]}", "[1, 1, 1] shrinks no axis"),
        ("autoencoder: {strides: [[2, 2, 3], [2, 2, 2]]}", "each at most 2"),
        ("autoencoder: {strides: [[2, 2], [2, 2, 2]]}", "at least 3 items"),
        ("autoencoder: {strides: 4}", "allowed: 2 or a list"),
        ("autoencoder: {strides: [[2, 2, 1], [2, 2, 2]], implementation: monai}", "does not support it"),
        # Conditions
        (
            f"autoencoder: {{strides: [[2, 2, 1], [2, 2, 2]]}}\n{CONDITIONING.format(CONTROLLED)}",
            "[4, 8, 16], and the autoencoder has strides of [[2, 2, 1]",
        ),
        *((CONDITIONING.format(keys), said) for keys, said in CONDITIONS.items()),
        *(
            (
                f"ldm: {{sampling: {{guidance_scale: 2}}, conditioning: {{dropout: 0, {kind}}}}}",
                "2 with conditioning dropout 0, so the network never learns to predict without a condition",
            )
            for kind in ("label_map: {source: maps, num_classes: 3}", "scan: {modality: 1}")
        ),
    ],
)
def test_each_mistake_gets_a_readable_error(tmp_path, text, expected):
    assert expected in answer(tmp_path, text)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        *((name, f"{name}: not an override (") for name in ("=3", "data.=3", ".x=3", "data..x=3", "extra", "seed.x=1")),
        ("data.voxelsize=3", "did you mean data.voxel_size?"),
        ("data.voxel_size=" + "[" * 5000, "(line 1: nested more than 30 deep)"),
        ("data.voxel_size=32x48", "at least 3 items"),
        ("data.voxel_size=32xax3", "found '32xax3'; allowed: a list"),
        ("data.source=a\udcff", "the character U+DCFF is not allowed"),
        ("data.num_workers\uff1d2", "; write = instead of the full-width \uff1d"),
        ("data.voxel_size=[1000000000, 64, 64]", "each at most 65536"),
        ("data.voxel_size=[65536, 65536, 65536]", "needs activations of 256 PiB; allowed: at most 1 PiB"),
        ("autoencoder.training.batch_size=2147483647", "with batch_size 2147483647 needs activations of"),
        ("autoencoder.training.batch_size=9223372036854775808", "below 2147483648"),
        ("autoencoder.training.learning_rate=1" + "0" * 400, "allowed: a number"),
        ("autoencoder.training.learning_rate=1" + "0" * 5000, "not an override"),
        ("ldm.unet.num_channels=[" + "64, " * 4000 + "64]", "at most 12 items"),
        ("data.spacing=[1e-300, 1.0, 1.0]", "each at least 0.000001"),
    ],
)
def test_override_is_refused(tmp_path, override, expected):
    assert expected in answer(tmp_path, "seed: 1\n", override)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(os.mkfifo, "not a regular file"), (lambda path: path.symlink_to("nowhere"), "no such file; this folder has: ")],
)
def test_config_that_is_not_a_file_is_refused(tmp_path, make: Callable[[Path], None], expected):
    make(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=expected):
        load_settings(tmp_path / "config.yaml")


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfseed: 3\r\nname: a\r\n", b"seed: 3\rname: a\r"])
def test_byte_order_mark_and_foreign_line_ends_are_read(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    settings = load_settings(tmp_path / "config.yaml")
    assert (settings.seed, settings.name) == (3, "a")


@pytest.mark.parametrize(("rate", "meaning"), [(0, "disk"), (0.5, "memory"), (1, "memory")])
def test_a_cache_rate_above_zero_means_memory(rate, meaning):
    assert validate({"data": {"cache_rate": rate}}).data.prepared == meaning


def test_a_rule_is_silent_when_the_key_it_rests_on_is_wrong_itself(tmp_path):
    found = answer(tmp_path, "autoencoder: {num_channels: [16, x], attention_levels: [false, true]}")
    assert found.startswith("1 problem in ")


def test_overrides_are_parsed_and_checked_like_the_file(tmp_path):
    settings = load_settings(write(tmp_path, "seed: 1"), ["autoencoder.training.learning_rate=3e-4", "data.source=3x4"])
    assert settings.autoencoder.training.learning_rate == 3e-4
    assert settings.data.source == "3x4"
    with pytest.raises(ValueError, match="frozen"):
        settings.seed = 3
    for grid in ("32x48x32", "32,48,32", "32, 48, 32", "32 x 48 x 32", "[32, 48, 32]"):
        assert load_settings(write(tmp_path, ""), [f"data.voxel_size={grid}"]).data.voxel_size == (32, 48, 32)
    assert load_settings(write(tmp_path, ""), ["data.spacing=1x1.5x3.0"]).data.spacing == (1.0, 1.5, 3.0)
    channels = load_settings(write(tmp_path, ""), ["autoencoder.num_channels=16,32,64"]).autoencoder.num_channels
    assert channels == (16, 32, 64)


def test_problems_of_an_override_are_not_blamed_on_a_line_of_the_file(tmp_path):
    text = "data:\n  num_workers: 1\n  val_fraction: 7\n"
    head, first, second = answer(tmp_path, text, "data.num_workers=-1").splitlines()
    assert head.startswith("2 problems in ")
    assert head.endswith(".yaml with the overrides:")
    assert first.startswith("  data.num_workers: found -1; allowed: at least 0 or auto; for example auto")
    assert second.startswith("  line 3, data.val_fraction: found 7; ")


def test_overrides_alone_are_read_and_their_mistakes_are_reported_together():
    read = read_overrides(["data.voxel_size=35x50x36", "seed=3"])
    assert read == {"data.voxel_size": [35, 50, 36], "seed": 3}  # no level divides it, which is left to others
    with pytest.raises(ConfigError) as error:
        read_overrides(["data.voxel_sise=[8,8,8]", "ldm.training.batch_size=two", "seed"])
    text = str(error.value)
    assert "did you mean data.voxel_size?" in text
    assert "ldm.training.batch_size: found 'two'" in text
    assert "not an override" in text


THICK = [[2, 2, 1], [2, 2, 2]]


def settings_of(strides, *grid: int) -> Settings:
    return validate({"data": {"voxel_size": grid}, "autoencoder": {"strides": strides}})


def test_the_latent_grid_follows_from_the_strides():
    settings = settings_of(THICK, 64, 64, 24)
    assert settings.autoencoder.downsampling == (4, 4, 2)
    assert settings.latent_shape == (3, 16, 16, 12)
    assert settings.autoencoder.level_grids((64, 64, 24)) == [(64, 64, 24), (32, 32, 24), (16, 16, 12)]
    assert Settings().autoencoder.downsampling == (4, 4, 4)
    for halving in (2, [[2, 2, 2], [2, 2, 2]]):
        assert settings_of(halving, 64, 64, 24).latent_shape == (3, 16, 16, 6)
    assert settings_of(THICK, 64, 64, 28).unet_grid == (16, 16, 16), "padded axis by axis"
    with pytest.raises(ConfigError, match=r"\[62, 64, 25\] is not divisible by \[4, 4, 2\].*nearest is \[64, 64, 24\]"):
        settings_of(THICK, 62, 64, 25)


def test_odd_values_survive(tmp_path):
    odd = {"source": "a: #b\nc 'd' \"e\" \u00e9 - [x]", "group_by": "sub-\\d+ # {}"}
    settings = Settings.model_validate({"data": odd, "ldm": {"training": {"learning_rate": 1e-7}}})
    for text in (dump_yaml(settings), dump_short(settings)):
        (tmp_path / "run.yaml").write_text(text)
        assert load_settings(tmp_path / "run.yaml") == settings


def test_each_value_says_where_it_comes_from(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("data:\n  voxel_size: [32, 32, 32]\n  cache_rate: 1\nldm: {training: {max_steps: 5}}\n")
    lines = dump_with_origins(path, ["seed=3", "data.intensity={mode: window}"]).splitlines()
    found: dict[str, str] = {}
    for line in lines:
        if "# " in line:
            found.setdefault(line.split(":")[0].strip(), line.split("# ")[1])
    assert found["name"] == "name of the file"
    assert (found["seed"], found["mode"], found["upper"]) == ("command line",) * 3
    assert (found["voxel_size"], found["prepared"]) == ("mine.yaml, line 2", "mine.yaml, line 3")
    assert found["spacing"] == "default"


def test_print_config_prints_a_loadable_config_and_stops(tmp_path):
    config = ROOT / "configs" / "quickstart.yaml"
    command = [sys.executable, str(ROOT / "train_ldm.py"), "--config", str(config), "--print-config", "--hours", "1"]
    command.append("data.num_workers=2")
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    (tmp_path / "printed.yaml").write_text(said)
    changes = {"data.num_workers": 2, "ldm.training.max_hours": 1.0}
    assert load_settings(tmp_path / "printed.yaml") == load_settings(config).with_overrides(changes)
    assert "# command line" in said
    assert not (tmp_path / "runs").exists()


def test_stored_settings_come_back_and_a_missing_or_unknown_key_is_named():
    settings = Settings.model_validate({"name": "a", "autoencoder": {"training": {"kl_weight": 0.5}}})
    values = stored(settings)
    assert restored(values, "run.pt") == settings
    sampler = values["ldm"]["sampling"].pop("sampler")
    with pytest.raises(CheckpointError, match=r"its settings lack ldm\.sampling\.sampler; use the version"):
        restored(values, "run.pt")
    values["ldm"]["sampling"]["sampler"] = sampler
    values["data"]["label_maps"] = True
    with pytest.raises(CheckpointError, match=r"cannot be used; use the version .*\n.*data\.label_maps: unknown key"):
        restored(values, "run.pt")
