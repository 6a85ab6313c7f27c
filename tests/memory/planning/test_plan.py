"""Plans validate, fit, say why, and take what is given."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from memory.kernels.gpus import check_gpu, time_range
from memory.planning.fingerprint import CT
from memory.planning.planner import NothingFitsError, as_yaml, describe_plan, of_run
from scripts.plan import PLANNED
from settings import ConfigError, Settings, load_settings, look_up, validate
from settings.load import read_document
from tests.conftest import ROOT
from tests.memory.planning.fakes import SETS, FakePredictor, fake_set, planned


def of(plan, key):
    return next(choice for choice in plan.choices if choice.key == key)


@pytest.mark.parametrize("name", SETS)
def test_plans_fit_ask_little_have_the_recipe_of_quickstart_and_get_no_less_from_more_memory(name):
    recipe = load_settings(ROOT / "configs" / "quickstart.yaml").autoencoder
    plans = []
    for budget in (6, 12, 24, 48):
        predictor = FakePredictor()
        plans.append(plan := planned(SETS[name], budget, predictor=predictor))
        assert validate(plan.settings.model_dump()) == plan.settings
        assert max(prediction.required_with_margin for prediction in plan.predictions.values()) <= budget * 2**30
        assert len(predictor.asked) <= 30
        found = plan.settings.autoencoder
        assert found.initialisation == recipe.initialisation == "haar"
        assert found.training.reconstruction_loss == recipe.training.reconstruction_loss == "l2"
        assert found.training.edge_weight == recipe.training.edge_weight == 1
    voxels = [row.settings.data.voxel_size for row in plans]
    assert voxels == sorted(voxels)
    # The U-Net may be narrower for a while, because a wider autoencoder needs more for decoding its samples.
    widths = [row.settings.autoencoder.num_channels[0] for row in plans]
    assert widths == sorted(widths)


def test_grid_gets_coarser_when_no_network_fits_the_latents():
    huge = fake_set(60, (900, 900, 900), (0.5, 0.5, 0.5))
    plan = planned(huge, 1.5)
    grid = plan.settings.data.voxel_size
    assert max(grid) < 900
    assert "times fewer voxels" in of(plan, "data.voxel_size").reason


def test_nothing_fits_is_said():
    with pytest.raises(NothingFitsError, match=r"nothing fits 0\.4 GiB; the smallest plan, .* needs .* give a larger"):
        planned(SETS["small crops"], 0.4)


def test_small_set_is_augmented_narrow_and_warned_of():
    few, many = planned(fake_set(20, (128, 128, 96))), planned(fake_set(400, (128, 128, 96)))
    assert of(few, "data.use_augmentation").value
    assert not of(many, "data.use_augmentation").value
    narrow, wide = (plan.settings for plan in (few, many))
    assert narrow.autoencoder.num_channels[0] < wide.autoencoder.num_channels[0]
    assert narrow.ldm.unet.num_channels[0] < wide.ldm.unet.num_channels[0]
    assert "memorise" in " ".join(few.notes)
    assert "memorise" not in " ".join(many.notes)


def test_classes_condition_and_single_members_are_said():
    plan = planned(fake_set(61, (64, 64, 64), classes={"ill": 30, "well": 30, "odd": 1}))
    assert of(plan, "ldm.conditioning.type").value == "class"
    assert of(plan, "ldm.conditioning.num_classes").value == 3
    assert of(plan, "ldm.conditioning.type").reason.endswith("a single volume in: odd")


def test_patients_stay_together():
    """Folders of few volumes are patients and not classes, but labels of files in one folder say nothing of folders."""
    found = fake_set(60, (64, 64, 64), classes={f"patient {n}": 2 for n in range(30)})
    choice = of(planned(found), "ldm.conditioning.type")
    assert (choice.value, choice.is_weak) == ("none", True)
    assert of(planned(found), "data.group_by").value == "folder"
    flat = tuple(dataclasses.replace(item, name=item.path.name) for item in found.volumes)
    assert of(planned(dataclasses.replace(found, volumes=flat)), "data.group_by").value is None
    assert planned(dataclasses.replace(SETS["MR"], group_by=r"\d")).settings.data.group_by == r"\d"


def test_hours_are_those_of_a_candidates_own_steps_and_of_the_volumes_it_holds_out():
    """Candidates share a prediction, so its own numbers of steps and validations may be another candidate's."""
    values = {"data": {"val_fraction": 0.1}, "autoencoder": {"training": {"max_steps": 1000, "validate_every": 300}}}
    settings, gpu = Settings.model_validate(values), check_gpu("RTX 4090")
    other = settings.with_overrides({"autoencoder.training.max_steps": 7})
    prediction = of_run(FakePredictor().submit(other, "autoencoder").result(), settings, "autoencoder", (45, 5))
    update = prediction.seconds_per_step(gpu)
    assert prediction.hours(gpu) * 3600 == pytest.approx(1000 * update + 4 * 5 * update)


@pytest.mark.parametrize("hours", [0.15, 0.5, 5])
def test_hours_are_kept_to_and_used(hours):
    plan = planned(SETS["CT"], 24, hours)
    gpu = check_gpu("RTX 4090")
    longest = sum(time_range(prediction.hours(gpu), False)[1] for prediction in plan.predictions.values())
    assert 0.9 * hours <= longest <= hours
    assert f"To keep to {hours:g} hours" in " ".join(plan.notes)


def test_hours_that_nothing_keeps_to_are_refused():
    with pytest.raises(ConfigError, match=r"--hours: found 0\.001; allowed: at least 0\.\d+, what 100 updates"):
        planned(SETS["CT"], 24, 0.001)


def test_hours_that_are_given_for_a_stage_are_its_hours():
    assert "Time on RTX 4090: 3 h + " in describe_plan(planned(SETS["MR"], autoencoder__training__max_hours=3.0))
    with pytest.raises(ConfigError, match="--hours: found 3; allowed: at least 3"):
        planned(SETS["MR"], 24, 3, autoencoder__training__max_hours=3.0)


def test_deep_networks_get_patches_that_they_divide():
    row = planned(SETS["CT"], 6, autoencoder__num_channels=[16, 32, 64, 64, 64, 64])
    assert row.settings.data.patch_size is not None
    assert not any(n % 32 for n in row.settings.data.patch_size[:2])


def test_given_values_that_do_not_fit_together_are_refused():
    with pytest.raises(ConfigError, match=r"data\.voxel_size"):
        planned(SETS["MR"], data__voxel_size=[97, 128, 128], autoencoder__num_channels=[16, 32])


def test_yaml_reads_back_as_the_plan_and_says_why(tmp_path):
    plan, out = planned(SETS["CT"]), tmp_path / "planned.yaml"
    out.write_text(as_yaml(plan, "python scripts/plan.py", out))
    assert load_settings(out, stage="ldm") == plan.settings
    text = out.read_text()
    head = text.partition("\nname:")[0]
    joined = " ".join(head.replace("\n#", " ").split())
    assert PLANNED in head
    assert max(map(len, head.splitlines())) <= 120
    for choice in plan.choices:
        mark = " (?)" if choice.is_weak else ""
        assert re.search(rf"{re.escape(choice.key)}: [^:]+{re.escape(mark)}: {re.escape(choice.reason)}", joined)
    for number, prediction in enumerate(plan.predictions.values(), start=1):
        needed = prediction.required_bytes / 2**30
        assert f"stage {number} {needed:.1f} GiB ({needed / 24:.0%} of the budget)" in joined
    weak, written_keys = [choice for choice in plan.choices if choice.is_weak], read_document(out).lines
    assert text.count("# (?)") == len([choice for choice in weak if choice.key in written_keys]) > 0


WINDOW, PERCENTILE, WHOLE = ("window", -1000.0, 1000.0), ("percentile", 0.5, 99.5), ("percentile", 0.0, 100.0)
RANGES = ((-1000.0, 600.0), (0.0, 12.0), (0.0, 0.0))
THREE = dataclasses.replace(fake_set(60, (128, 128, 96), kind=CT, num_channels=3), ranges=RANGES)
ALIKE = dataclasses.replace(THREE, ranges=((0.0, 5.0),) * 3)
# Of a volume that is 99 % empty, the 99.5th percentile is the median of what is not.
EMPTY = dataclasses.replace(SETS["MR"], background=0.99)
FOUR = dataclasses.replace(EMPTY, num_channels=4, ranges=((0.0, 19.0), (0.0, 0.0), (0.0, 9.0), (-1024.0, 400.0)))


@pytest.mark.parametrize(
    ("fingerprint", "given", "rules"),
    [
        *((found, {}, [WINDOW if name == "CT" else PERCENTILE]) for name, found in SETS.items()),
        (dataclasses.replace(SETS["MR"], num_flat=3), {}, [WHOLE]),
        (dataclasses.replace(SETS["MR"], background=0.8), {}, [PERCENTILE]),
        (EMPTY, {}, [WHOLE]),
        (THREE, {}, [WINDOW, PERCENTILE, WHOLE]),
        (THREE, {"data__intensity__mode": "percentile"}, [PERCENTILE]),
        (ALIKE, {}, [WINDOW]),
        (FOUR, {}, [WHOLE, WHOLE, WHOLE, WINDOW]),
    ],
)
def test_intensities_are_scaled_as_their_values_mean_and_each_channel_of_its_kind(fingerprint, given, rules):
    plan = planned(fingerprint, **given)
    intensity = plan.settings.data.intensity
    assert [intensity.of_channel(number) for number in range(intensity.num_rules)] == rules
    assert len(rules) == 1 or "; 1: " in of(plan, "data.intensity.mode").reason
    assert plan.settings.autoencoder.training.occupied_weight == (20.0 if fingerprint.background > 0.9 else 1.0)


GIVEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("MR", {"data.spacing": [2.0, 2.0, 2.0], "data.resize": "crop_or_pad"}, {"data.voxel_size": (96, 128, 128)}),
    ("MR", {"ldm.conditioning.label_map": {"source": "/maps", "num_classes": 3}}, {}),
    ("MR", {"data.voxel_size": [96, 128, 128], "data.patch_size": [48, 64, 64], "data.intensity.upper": 98.0}, {}),
    ("MR", {"autoencoder.num_channels": [16, 32, 64, 64], "ldm.unet.num_channels": [32, 64]}, {}),
    ("MR", {"autoencoder.training.batch_size": 2}, {"autoencoder.training.gradient_accumulation_steps": 2}),
    (
        "MR",
        {"autoencoder.num_channels": [16, 32, 64]},
        {"autoencoder.training.learning_rate": 1e-3, "autoencoder.training.discriminator.num_channels": 16},
    ),
    (
        "MR",
        {"autoencoder.training.max_steps": 300},
        {"autoencoder.training.adversarial_start_step": 150, "autoencoder.training.validate_every": 100},
    ),
    ("MR", {"autoencoder.attention_levels": [False, False]}, {"autoencoder.num_res_blocks": 2}),
    ("MR", {"ldm.unet.num_channels": [24, 48, 96]}, {"ldm.unet.num_head_channels": 8}),
    ("MR", {"data.intensity.mode": "window"}, {"data.intensity.lower": 0.0, "data.intensity.upper": 900.0}),
    ("CT", {"data.intensity.mode": "percentile"}, {"data.intensity.lower": 0.5, "data.intensity.upper": 99.5}),
    ("thick slices", {"autoencoder.implementation": "monai"}, {"autoencoder.strides": 2}),
]


@pytest.mark.parametrize(("name", "given", "follows"), GIVEN, ids=lambda part: str(part)[:40])
def test_what_is_given_is_taken_and_other_values_follow_it(name, given, follows):
    plan = planned(SETS[name], **{key.replace(".", "__"): value for key, value in given.items()})
    values = plan.settings.model_dump(mode="json")
    for key, value in {**given, **follows}.items():
        found = look_up(values, key)
        wanted = list(value) if isinstance(value, tuple) else value
        assert {**found, **wanted} == found if isinstance(wanted, dict) else found == wanted, key
    assert all(of(plan, key).reason == "given on the command line" for key in given)
