"""A config is accepted, or refused with everything that is wrong with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from settings import ConfigError, Settings, load_settings, read_overrides, validate

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str, *overrides: str, stage: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(write(folder, text), overrides, stage=stage)
    return [str(problem) for problem in caught.value.problems]


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
    found = "\n".join(problems(tmp_path, FIVE_MISTAKES))
    assert found.count("\n") == 4
    assert "line 3, data.voxel_size: [255, 256, 64] is not divisible by 4" in found
    assert "the nearest is [256, 256, 64]" in found
    assert "data.num_wrokers: unknown key; did you mean data.num_workers?" in found
    assert "autoencoder.norm_num_groups: 5 does not divide 16, 32, 64 of num_channels" in found
    assert "autoencoder.training.batch_size: found 0; allowed: at least 1" in found
    assert "device.amp_dtype: found 'fp8'; allowed: auto, bfloat16 or float16" in found


def test_mistakes_are_reported_by_the_command_within_a_second_and_exit_code_2(tmp_path):
    path = write(tmp_path, FIVE_MISTAKES)
    # Processor time, and a few times what it takes, because the machine may be busy. Importing torch alone takes more.
    seconds = []
    for _ in range(3):
        start = _child_seconds()
        done = subprocess.run(
            [sys.executable, str(ROOT / "train_autoencoder.py"), "--config", str(path)], capture_output=True, text=True
        )
        seconds.append(_child_seconds() - start)
    assert done.returncode == 2
    assert "5 problems in" in done.stderr
    assert "Traceback" not in done.stderr
    assert min(seconds) < 1.5


def _child_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def test_settings_never_import_torch_or_monai():
    imports = "import sys, settings, scripts.dev.documents"
    code = f"{imports}; print(*(name in sys.modules for name in ('torch', 'monai')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_scientific_notation_is_a_number_and_no_is_text(tmp_path):
    settings = load_settings(write(tmp_path, "name: no\nautoencoder: {training: {learning_rate: 1e-4}}"))
    assert settings.autoencoder.training.learning_rate == 1e-4
    assert settings.name == "no"


def test_for_a_key_in_the_wrong_section_the_right_ones_are_suggested(tmp_path):
    (problem,) = problems(tmp_path, "batch_size: 2\n")
    assert "did you mean autoencoder.training.batch_size or ldm.training.batch_size?" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n- b\n", "holds a list"),
        ("seed: 1\nname: a\nseed: 2\n", "seed: given twice, on lines 1 and 3; allowed: once; remove one"),
        ("data: 3\n", "3 is not a section"),
        ("a: [1, 2\n", "not valid YAML"),
        ("autoencoder: {training: {batch_size: true}}", "found true; allowed: a whole number"),
        ("autoencoder: {training: {batch_size: '4'}}", "found '4'; allowed: a whole number"),
        ("autoencoder: {training: {learning_rate: .nan}}", "allowed: a finite number"),
        ("autoencoder: {attention_levels: [false, true]}", "2 entries for 3 levels"),
        ("autoencoder: {num_res_blocks: [1, 2]}", "give 3 entries or one number"),
        ("autoencoder: {training: {checkpoint_levels: 4}}", "4 of 3 levels; allowed: all, or 1 to 3"),
        ("autoencoder: {training: {slab_rows: 1}}", "a slab of 1 row is too thin for its halo"),
        ("autoencoder: {implementation: monai, training: {slab_rows: 8}}", "set autoencoder.implementation: lean"),
        ("autoencoder: {training: {use_gradient_checkpointing: false, use_nested_checkpointing: true}}", "to nest"),
        ("autoencoder: {training: {discriminator: {num_layers_d: 5}}}", "allowed: at most 4; set 4"),
        ("autoencoder: {training: {warmup_steps: 30000}}", "not below max_steps (20000)"),
        ("data: {patch_size: [512, 64, 64]}", "is larger than voxel_size"),
        ("data: {intensity: {lower: 99, upper: 1}}", "99 is not below upper (1)"),
        ("data: {intensity: {lower: -1000, upper: 1000}}", "set mode: window"),
        ("data: {num_workers: 0, persistent_workers: true}", "set num_workers to 1 or more"),
        (
            "ldm: {scheduler: {type: rflow}, sampling: {sampler: ddim}}",
            "ddim cannot sample from scheduler type rflow; allowed: rflow",
        ),
        ("ldm: {conditioning: {type: class}}", "allowed: 2 or more"),
        ("ldm: {unet: {num_head_channels: 48}}", "48 does not divide the 128 channels"),
        ("name: ../escape", "allowed: letters, digits, _, - and dots, the first of them"),
        ("seed: -1", "at least 0"),
    ],
)
def test_each_mistake_gets_a_readable_error(tmp_path, text, expected):
    assert expected in "\n".join(problems(tmp_path, text))


def test_for_a_missing_file_the_existing_ones_are_listed(tmp_path):
    write(tmp_path, "seed: 1")
    with pytest.raises(ConfigError, match=r"no such file; this folder has: .*config\.yaml"):
        load_settings(tmp_path / "confg.yaml")


def test_a_rule_is_silent_when_the_key_it_rests_on_is_wrong_itself(tmp_path):
    found = problems(tmp_path, "autoencoder: {num_channels: [16, x], attention_levels: [false, true]}")
    assert len(found) == 1


def test_overrides_are_parsed_and_checked_like_the_file(tmp_path):
    path = write(tmp_path, "seed: 1")
    settings = load_settings(path, ["data.voxel_size=[64, 64, 64]", "autoencoder.training.learning_rate=3e-4"])
    assert settings.data.voxel_size == (64, 64, 64)
    assert settings.autoencoder.training.learning_rate == 3e-4
    found = problems(tmp_path, "seed: 1", "data.voxelsize=3", "nonsense", "seed.deeper=1")
    assert any("did you mean data.voxel_size?" in problem for problem in found)
    assert any("allowed: section.key=value" in problem for problem in found)
    assert any("not a section" in problem for problem in found)


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Settings().seed = 3


def answer(tmp_path, text, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_settings(write(tmp_path, text), overrides)
    return str(caught.value)


def test_problems_of_an_override_are_not_blamed_on_a_line_of_the_file(tmp_path):
    text = "data:\n  num_workers: 1\n  val_fraction: 0.1\n"
    found = answer(tmp_path, text, "data.num_workers=-1")
    assert found.splitlines() == [
        "1 problem in the overrides:",
        "  data.num_workers: found -1; allowed: at least 0 or auto; for example auto",
    ]
    both = answer(tmp_path, text.replace("0.1", "7"), "data.num_workers=-1").splitlines()
    assert both[0].startswith("2 problems in ")
    assert both[1].startswith("  override data.num_workers: found -1; ")
    assert both[2].startswith("  line 3, data.val_fraction: found 7; ")
    section = answer(tmp_path, text, "data={num_workers: -1}")
    assert "  data.num_workers: found -1" in section


@pytest.mark.parametrize("grid", ["32x48x32", "32,48,32", "32, 48, 32", "32 x 48 x 32", "[32, 48, 32]"])
def test_a_grid_may_be_written_as_people_write_it(tmp_path, grid):
    assert load_settings(write(tmp_path, ""), [f"data.voxel_size={grid}"]).data.voxel_size == (32, 48, 32)
    text = f"data: {{voxel_size: {grid}}}" if "," not in grid else f"data:\n  voxel_size: {grid}\n"
    assert load_settings(write(tmp_path, text)).data.voxel_size == (32, 48, 32)


def test_spacings_may_be_written_so_too_and_other_text_stays_text(tmp_path):
    assert load_settings(write(tmp_path, ""), ["data.spacing=1x1.5x3.0"]).data.spacing == (1.0, 1.5, 3.0)
    assert load_settings(write(tmp_path, ""), ["data.source=32x48x32"]).data.source == "32x48x32"
    assert "found '32x48'" not in answer(tmp_path, "", "data.voxel_size=32x48")
    assert "found '32xax3'; allowed: a list" in answer(tmp_path, "", "data.voxel_size=32xax3")


@pytest.mark.parametrize("name", ["checks", "latents", "phantoms", "prepared", "Latents"])
def test_a_run_cannot_take_the_name_of_a_folder_that_all_runs_share(tmp_path, name):
    assert f"name: runs/{name} is a folder that all runs share; allowed: any name but" in answer(
        tmp_path, f"name: {name}"
    )


def test_a_line_that_only_an_override_makes_wrong_is_not_called_a_problem_of_the_file(tmp_path):
    text = "data: {voxel_size: 32x48x32, patch_size: [24, 32, 24]}"
    head, line = answer(tmp_path, text, "data.voxel_size=32,24,32").splitlines()
    assert head.endswith(".yaml with the overrides:")
    assert line.startswith("  line 1, data.patch_size: [24, 32, 24] is larger than voxel_size [32, 24, 32]; ")


@pytest.mark.parametrize("override", ["=3", ".=3", "data.=3", ".x=3", "data..x=3"])
def test_an_override_without_a_key_is_refused(tmp_path, override):
    expected = f"  {override}: not an override; allowed: section.key=value; write a key before the ="
    assert expected in answer(tmp_path, "", override)
    assert "extra: not an override; allowed: section.key=value; add = and a value" in answer(tmp_path, "", "extra")


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


def settings_of(strides, **more):
    values = {"data": {"voxel_size": [64, 64, 24]}, "autoencoder": {"strides": strides}, **more}
    return validate(values)


def test_the_latent_grid_follows_from_the_strides():
    settings = settings_of(THICK)
    assert settings.autoencoder.downsampling == (4, 4, 2)
    assert settings.latent_shape == (3, 16, 16, 12)
    assert settings.autoencoder.level_grids((64, 64, 24)) == [(64, 64, 24), (32, 32, 24), (16, 16, 12)]
    assert Settings().autoencoder.downsampling == (4, 4, 4)
    assert settings_of([[2, 2, 2], [2, 2, 2]]).latent_shape == settings_of(2).latent_shape == (3, 16, 16, 6)


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        ([[2, 2, 1]], "1 entry for 3 levels; allowed: 2, or 2, one for each downsampling"),
        ([[2, 2, 1]] * 3, "3 entries for 3 levels"),
        ([[2, 2, 1], [1, 1, 1]], "[1, 1, 1] shrinks no axis; allowed: a 2 along at least one axis"),
        ([[2, 2, 3], [2, 2, 2]], "each at most 2"),
        ([[2, 2, 0], [2, 2, 2]], "each at least 1"),
        ([[2, 2], [2, 2, 2]], "at least 3 entries"),
        ([2, 2, 1], "each a list"),
        (4, "allowed: 2 or a list"),
        ("auto", "allowed: 2 or a list"),
    ],
    ids=str,
)
def test_other_strides_are_refused_in_words(strides, expected):
    with pytest.raises(ConfigError) as caught:
        settings_of(strides)
    (problem,) = caught.value.problems
    assert str(problem).startswith("autoencoder.strides: ")
    assert expected in str(problem)


def test_stock_blocks_are_refused_in_one_sentence():
    with pytest.raises(ConfigError) as caught:
        validate({"autoencoder": {"strides": THICK, "implementation": "monai"}})
    assert [str(problem) for problem in caught.value.problems] == [
        "autoencoder.strides: [2, 2, 1], [2, 2, 2] with implementation: monai, whose strides are all 2; "
        "set 2, or implementation: lean"
    ]
    same = {"strides": [[2, 2, 2], [2, 2, 2]], "implementation": "monai"}
    assert validate({"autoencoder": same}).autoencoder.downsampling == (4, 4, 4)


def test_grids_are_checked_axis_by_axis():
    with pytest.raises(ConfigError) as caught:
        settings_of(THICK, data={"voxel_size": [62, 64, 25]})
    (problem,) = caught.value.problems
    assert "[62, 64, 25] is not divisible by [4, 4, 2]" in str(problem)
    assert "the nearest is [64, 64, 24]" in str(problem) or "the nearest is [60, 64, 24]" in str(problem)


def test_latents_are_padded_axis_by_axis():
    settings = settings_of(THICK, data={"voxel_size": [64, 64, 28]})
    assert (settings.latent_shape[1:], settings.unet_grid) == ((16, 16, 14), (16, 16, 16))
