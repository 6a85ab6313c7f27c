"""Plans validate, fit, use the budget or say why not, and take what is given."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import yaml

from memory.planning.fingerprint import CT
from memory.planning.plan import LEAST_SHARE
from memory.planning.planner import NothingFitsError
from memory.planning.text import as_yaml, describe_plan
from scripts.plan import PLANNED
from settings import ConfigError, load_settings, look_up, validate
from settings.yaml_reader import read_document
from tests.memory.planning.pretended import SETS, PretendedPredictor, planned, pretended

PARAMETERS = dict.fromkeys(("faster", "recommended", "larger"), (1_000_000, 2_000_000))


def of(plan, key):
    return next(choice for choice in plan.choices if choice.key == key)


@pytest.mark.parametrize("budget", [6, 12, 24, 48])
@pytest.mark.parametrize("name", SETS)
def test_plan_fits_with_its_margin_and_uses_the_budget_or_says_why_not(name, budget):
    predictor = PretendedPredictor()
    plan = planned(SETS[name], budget, predictor=predictor)
    row = plan.recommended
    assert validate(row.settings.model_dump()) == row.settings
    assert row.fits
    for number, verdict in ((1, row.first), (2, row.second)):
        assert verdict.needed_bytes <= budget * 2**30
        explained = any(line.startswith(f"stage {number} uses") for line in plan.unused)
        assert (LEAST_SHARE <= verdict.share <= 0.95) is not explained
    assert [other.name for other in plan.rows] == ["faster", "recommended", "larger"]
    assert plan.rows[0].first.hours < row.first.hours
    assert plan.rows[2].first.prediction.required_bytes > row.first.prediction.required_bytes
    assert len(predictor.asked) <= 20


@pytest.mark.parametrize("name", SETS)
def test_more_memory_never_gives_less(name):
    plans = [planned(SETS[name], budget).recommended for budget in (6, 12, 24, 48)]
    voxels = [row.settings.data.voxel_size for row in plans]
    assert voxels == sorted(voxels)
    # The U-Net may be narrower for a while, because a wider autoencoder needs more for decoding its samples.
    widths = [row.settings.autoencoder.num_channels[0] for row in plans]
    assert widths == sorted(widths)


def test_large_volumes_in_little_memory_train_on_patches():
    row = planned(SETS["CT"], 6).recommended
    assert row.settings.data.patch_size is not None
    assert not any(row.settings.autoencoder.attention_levels)


def test_grid_gets_coarser_when_no_network_fits_the_latents():
    huge = pretended(60, (900, 900, 900), (0.5, 0.5, 0.5))
    plan = planned(huge, 1.5)
    grid = plan.recommended.settings.data.voxel_size
    assert max(grid) < 900
    assert "times fewer voxels" in of(plan, "data.voxel_size").reason
    assert plan.rows[2].why.startswith("finer voxels")


def test_a_grid_that_is_only_rounded_is_not_put_down_to_the_budget():
    plan = planned(pretended(31, (36, 51, 35), background=0.03))
    assert plan.recommended.settings.data.voxel_size == (32, 48, 32)
    assert of(plan, "data.voxel_size").reason.startswith("about the 36x51x35 voxels of the files, rounded to what")


def test_nothing_fits_is_said():
    with pytest.raises(NothingFitsError, match=r"nothing fits 0\.4 GiB; the smallest plan, .* needs .* give a larger"):
        planned(SETS["small crops"], 0.4)


def test_small_set_is_augmented_narrow_and_warned_of():
    few, many = planned(pretended(20, (128, 128, 96))), planned(pretended(400, (128, 128, 96)))
    assert of(few, "data.use_augmentation").value
    assert not of(many, "data.use_augmentation").value
    narrow, wide = (plan.recommended.settings for plan in (few, many))
    assert narrow.autoencoder.num_channels[0] < wide.autoencoder.num_channels[0]
    assert narrow.ldm.unet.num_channels[0] < wide.ldm.unet.num_channels[0]
    assert "memorise" in " ".join(few.notes)
    assert "memorise" not in " ".join(many.notes)


def test_classes_condition_and_single_members_are_said():
    plan = planned(pretended(61, (64, 64, 64), classes={"ill": 30, "well": 30, "odd": 1}))
    assert of(plan, "ldm.conditioning.type").value == "class"
    assert of(plan, "ldm.conditioning.num_classes").value == 3
    assert "single volume (odd)" in " ".join(plan.notes)


def test_folders_of_few_volumes_are_patients():
    plan = planned(pretended(60, (64, 64, 64), classes={f"patient {n}": 2 for n in range(30)}))
    choice = of(plan, "ldm.conditioning.type")
    assert (choice.value, choice.is_weak) == ("none", True)
    assert of(plan, "data.group_by").value == "folder"


@pytest.mark.parametrize("hours", [0.15, 0.5, 5])
def test_hours_are_kept_to_and_used(hours):
    row = planned(SETS["CT"], 24, hours).recommended
    assert 0.9 * hours <= 2 * (row.first.hours + row.second.hours) <= hours
    assert f"To keep to {hours:g} hours" in " ".join(planned(SETS["CT"], 24, hours).notes)


def test_plenty_of_hours_change_nothing():
    assert planned(SETS["CT"], 24, 1e5).recommended.settings == planned(SETS["CT"], 24).recommended.settings


def test_hours_that_nothing_keeps_to_are_refused():
    with pytest.raises(ConfigError, match=r"--hours: found 0\.001; allowed: at least 0\.\d+, what 100 updates"):
        planned(SETS["CT"], 24, 0.001)


def test_hours_that_are_given_for_a_stage_are_its_hours():
    row = planned(SETS["MR"], autoencoder__training__max_hours=3.0).recommended
    assert (row.first.hours, row.first.expected_hours) == (3.0, 3.0)


def test_held_out_volumes_are_counted_as_training_splits_them():
    found = SETS["two channels"]
    plan = planned(found, data__val_fraction=0.3)
    assert plan.recommended.first.num_volumes == (42, 18)
    assert of(planned(found), "data.val_fraction").reason == "6 of 60 to validate with"


def test_values_that_depend_on_the_steps_follow_those_that_are_given():
    plan = planned(SETS["MR"], autoencoder__training__max_steps=300)
    training = plan.recommended.settings.autoencoder.training
    assert training.adversarial_start_step == 150
    assert training.validate_every == 100
    assert of(plan, "autoencoder.training.validate_every").reason == "3 times in the run"


def test_values_that_depend_on_the_width_follow_the_one_that_is_given():
    training = planned(SETS["MR"], autoencoder__num_channels=[16, 32, 64]).recommended.settings.autoencoder.training
    assert (training.learning_rate, training.discriminator.num_channels) == (1e-3, 16)


@pytest.mark.parametrize(("name", "mode"), [("CT", "percentile"), ("MR", "window")])
def test_the_range_of_intensities_follows_the_mode_that_is_given(name, mode):
    scale = planned(SETS[name], data__intensity__mode=mode).recommended.settings.data.intensity
    assert (scale.lower, scale.upper) == {"percentile": (0.5, 99.5), "window": (0.0, 900.0)}[mode]


def test_rows_say_what_they_change():
    free = planned(SETS["two channels"])
    assert [row.why.partition(":")[0] for row in (free.rows[0], free.rows[2])] == [
        "fewer channels in stage 1",  # the U-Net has the least width already
        "more channels in both stages",
    ]
    given: dict[str, Any] = {"autoencoder__num_channels": [16, 32, 64], "ldm__unet__num_channels": [32, 64]}
    plan = planned(SETS["two channels"], **given)
    assert plan.rows[0].why.startswith("half the steps")
    assert plan.rows[0].first.hours < 0.6 * plan.recommended.first.hours
    assert plan.rows[2].why == "the same, because the channels were given"
    steps: dict[str, Any] = {"autoencoder__training__max_steps": 500, "ldm__training__max_steps": 500}
    assert planned(SETS["two channels"], **given, **steps).rows[0].why.startswith("the same")


def test_deep_networks_get_patches_that_they_divide():
    row = planned(SETS["CT"], 6, autoencoder__num_channels=[16, 32, 64, 64, 64, 64]).recommended
    assert row.settings.data.patch_size is not None
    assert not any(n % 32 for n in row.settings.data.patch_size[:2])


@pytest.mark.parametrize("section", ["autoencoder", "ldm__unet"])
def test_lists_that_are_given_set_the_number_of_levels(section):
    given: dict[str, Any] = {f"{section}__attention_levels": [False, False]}
    plan = planned(SETS["MR"], **given)
    network = plan.recommended.settings.autoencoder if section == "autoencoder" else plan.recommended.settings.ldm.unet
    assert len(network.num_channels) == 2


def test_what_is_given_is_not_refused_for_values_that_the_plan_chose():
    assert (
        planned(SETS["thick slices"], autoencoder__implementation="monai").recommended.settings.autoencoder.strides == 2
    )
    assert (
        planned(SETS["MR"], ldm__unet__num_channels=[24, 48, 96]).recommended.settings.ldm.unet.num_head_channels == 8
    )


def test_labels_of_files_in_one_folder_are_no_reason_to_group_by_folder():
    found = pretended(60, (64, 64, 64), classes={f"patient {n}": 2 for n in range(30)})
    flat = tuple(dataclasses.replace(item, name=item.path.name) for item in found.found)
    assert of(planned(dataclasses.replace(found, found=flat)), "data.group_by").value is None


def test_what_is_given_is_taken():
    plan = planned(
        SETS["MR"],
        data__voxel_size=[96, 128, 128],
        autoencoder__num_channels=[16, 32, 64, 64],
        autoencoder__training__batch_size=2,
        ldm__unet__num_channels=[32, 64],
        ldm__training__max_steps=77,
        data__intensity__upper=98.0,
        data__patch_size=[48, 64, 64],
    )
    s = plan.recommended.settings
    assert s.data.voxel_size == (96, 128, 128)
    assert s.autoencoder.num_channels == (16, 32, 64, 64)
    assert s.autoencoder.training.samples_per_rank == 4
    assert s.ldm.unet.num_channels == (32, 64)
    assert s.ldm.training.max_steps == 77
    assert s.data.intensity.upper == 98.0
    assert s.data.patch_size == (48, 64, 64)
    assert of(plan, "data.voxel_size").reason == "given on the command line"


def test_conditions_that_are_given_are_part_of_the_plan_and_of_its_memory():
    plan = planned(
        SETS["MR"], ldm__conditioning__label_map__source="/data/maps", ldm__conditioning__label_map__num_classes=3
    )
    found = plan.recommended.settings.ldm.conditioning
    assert (found.label_map.source, found.label_map.num_classes) == ("/data/maps", 3)


def test_given_spacing_sets_the_grid():
    plan = planned(SETS["MR"], data__spacing=[2.0, 2.0, 2.0], data__resize="crop_or_pad")
    assert plan.recommended.settings.data.voxel_size == (96, 128, 128)


def test_given_values_that_do_not_fit_together_are_refused():
    with pytest.raises(ConfigError, match=r"data\.voxel_size"):
        planned(SETS["MR"], data__voxel_size=[97, 128, 128], autoencoder__num_channels=[16, 32])


@pytest.mark.parametrize("name", SETS)
def test_yaml_reads_back_as_the_plan_and_says_why(name, tmp_path):
    plan = planned(SETS[name])
    out = tmp_path / "folder" / "planned.yaml"
    out.parent.mkdir()
    out.write_text(as_yaml(plan, PARAMETERS, "python scripts/plan.py", out))
    assert load_settings(out, stage="ldm") == plan.recommended.settings
    text = out.read_text()
    assert PLANNED in text
    head = text.partition("\nname:")[0]
    joined = " ".join(head.replace("\n#", " ").split())
    values = plan.recommended.settings.model_dump(mode="json")
    written_keys = read_document(out).lines
    for choice in plan.choices:
        written = yaml.safe_dump(look_up(values, choice.key), default_flow_style=True, width=9999).split("\n")[0]
        mark = " (?)" if choice.is_weak else ""
        assert f"{choice.key}: {written}{mark}: {choice.reason}" in joined
    first, second = (verdict.prediction.required_bytes / 2**30 for verdict in (plan.rows[1].first, plan.rows[1].second))
    assert f"stage 1 needs {first:.1f} GiB ({first / 24:.0%} of the budget), stage 2 {second:.1f} GiB" in joined
    assert "1,000,000 + 2,000,000 parameters" in joined
    weak = [choice for choice in plan.choices if choice.is_weak]
    assert weak
    assert text.count("# (?)") == len([choice for choice in weak if choice.key in written_keys]) > 0
    assert max(map(len, head.splitlines())) <= 120


def test_text_has_three_rows_and_the_reasons():
    text = describe_plan(planned(SETS["small crops"], 48), PARAMETERS)
    for name in ("faster", "recommended", "larger"):
        assert f"\n{name} " in text
    assert "1.0 M + 2.0 M" in text
    assert "the volumes are small (" in text
    assert "Inferred from little" in text


def test_thick_slices_get_strides_by_axis():
    assert of(planned(SETS["thick slices"]), "autoencoder.strides").value == [[2, 2, 1], [2, 2, 1]]
    assert of(planned(SETS["MR"]), "autoencoder.strides").value == 2
    given = planned(SETS["MR"], autoencoder__strides=[[2, 2, 2], [2, 1, 2]])
    assert given.recommended.settings.latent_shape[2] == given.recommended.settings.data.voxel_size[1] // 2


def test_ct_gets_a_window_and_mr_percentiles():
    values = {name: of(planned(SETS[name]), "data.intensity.mode").value for name in SETS}
    assert values.pop("CT") == "window"
    assert set(values.values()) == {"percentile"}
    sparse = dataclasses.replace(SETS["MR"], num_flat=3)
    assert of(planned(sparse), "data.intensity.upper").value == 100.0


def test_channels_of_different_kinds_get_rules_of_their_own():
    ranges = ((-1000.0, 600.0), (0.0, 12.0), (0.0, 0.0))
    three = dataclasses.replace(pretended(60, (128, 128, 96), kind=CT, num_channels=3), ranges=ranges)
    rules = (("window", -1000.0, 1000.0), ("percentile", 0.5, 99.5), ("percentile", 0.0, 100.0))
    plan = planned(three)
    intensity = plan.recommended.settings.data.intensity
    assert tuple(intensity.of_channel(number) for number in range(3)) == rules
    assert "1: 0 to 12" in of(plan, "data.intensity.mode").reason
    alike = dataclasses.replace(three, ranges=((0.0, 5.0),) * 3)
    assert planned(alike).recommended.settings.data.intensity.num_rules == 1
    assert planned(three, data__intensity__mode="percentile").recommended.settings.data.intensity.num_rules == 1


def test_occupied_voxels_of_mostly_empty_volumes_count_more():
    for background, weight in ((0.98, 20.0), (0.8, 1.0)):
        plan = planned(dataclasses.replace(SETS["MR"], background=background))
        assert plan.recommended.settings.autoencoder.training.occupied_weight == weight


def test_the_echoes_of_mostly_empty_volumes_keep_their_whole_range():
    """Of a volume that is 99 % empty, the 99.5th percentile is the median of what is not."""
    sparse = dataclasses.replace(SETS["MR"], background=0.99)
    assert of(planned(sparse), "data.intensity.upper").value == 100.0
    four = dataclasses.replace(sparse, num_channels=4, ranges=((0.0, 19.0), (0.0, 0.0), (0.0, 9.0), (-1024.0, 400.0)))
    whole = ("percentile", 0.0, 100.0)
    rules = (whole, whole, whole, ("window", -1000.0, 1000.0))
    intensity = planned(four).recommended.settings.data.intensity
    assert tuple(intensity.of_channel(number) for number in range(4)) == rules


def test_few_latent_voxels_are_counted_in_ones():
    plan = planned(pretended(60, (32, 32, 24)))
    assert re.search(r"the latents of the set have \d+,\d{3} voxels", of(plan, "ldm.unet.num_channels").reason)


def test_json_holds_every_value_with_its_reason():
    import json

    values = json.loads(json.dumps(planned(SETS["CT"]).to_json()))
    assert values["fingerprint"]["number"] == 120
    assert values["choices"]["data.voxel_size"]["reason"]
    assert [row["name"] for row in values["rows"]] == ["faster", "recommended", "larger"]


def test_passes_are_counted_over_the_training_volumes():
    plan = planned(SETS["CT"], 24)
    settings = plan.recommended.settings
    num_training, num_held_out = plan.fingerprint.split(settings.data, settings.seed)
    assert num_held_out > 1
    for stage, kind in (("autoencoder", "volume"), ("ldm", "latent")):
        training = look_up(settings, f"{stage}.training")
        per_update = training.batch_size * training.gradient_accumulation_steps
        parts = 1.0
        if stage == "autoencoder" and settings.data.patch_size is not None:
            parts = math.prod(settings.data.voxel_size) / math.prod(settings.data.patch_size)
        passes = training.max_steps * per_update / num_training / parts
        reason = of(plan, f"{stage}.training.max_steps").reason
        assert reason.startswith(f"about {passes:,.0f} passes over {num_training} training {kind}s")
