"""scripts/oom_ladder.py as a user runs it."""

import json
import os
from types import SimpleNamespace

import pytest

from memory.predict.prediction import GIB
from scripts import oom_ladder
from settings import load_settings
from tests.conftest import ROOT
from tests.finished_run import run_here

SMALL = [
    *("data.voxel_size=[32,32,32]", "autoencoder.num_channels=[8,8]", "autoencoder.attention_levels=[false,false]"),
    *("autoencoder.training.batch_size=4", "autoencoder.training.use_gradient_checkpointing=false"),
    *("data.patch_size=null", "autoencoder.num_res_blocks=1", "autoencoder.training.edge_weight=0"),
    *("autoencoder.training.use_perceptual_loss=true", "autoencoder.training.adversarial_weight=0.01"),
]


pytestmark = pytest.mark.usefixtures("shared_workers")


def test_ladder_recommends_writes_and_its_config_is_read_back(tmp_path, capsys):
    """Also if the name of the given config might leave the comment that says it."""
    source = tmp_path / os.fsdecode(b"odd\xff\nseed: 12345.yaml")
    source.write_text((ROOT / "configs/quickstart.yaml").read_text(encoding="utf-8"))
    report, config = tmp_path / "ladder.json", tmp_path / "new ones" / "fits.yaml"
    # The context takes 0.5 GiB and validation 50 MiB; this leaves room for them, but not for the step as configured.
    given = ("--config", source, "--budget-gb", "0.565", "--json", report, "--write-config", config, "name=odd")
    assert run_here("scripts/oom_ladder.py", "--quiet", *given, *SMALL) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f"next: python train_autoencoder.py --config '{config}'"
    head = config.read_text(encoding="utf-8").splitlines()[0]
    assert r"odd\udcff\nseed: 12345.yaml" in head
    assert oom_ladder.FITTED in head
    values = json.loads(report.read_text())
    rungs = {rung["name"]: rung for rung in values["rungs"]}
    recommended = rungs[values["recommended"]]
    assert not rungs["as configured"]["fits"]
    assert recommended["fits"]
    assert recommended["same_mathematics"]
    assert recommended["peak_reserved_bytes"] + GIB // 2 <= 0.565 * GIB
    assert f"Recommended: {values['recommended']}" in said
    written, preset = load_settings(config), load_settings(ROOT / "configs/quickstart.yaml")
    accumulation = preset.autoencoder.training.gradient_accumulation_steps
    assert (written.seed, written.autoencoder.training.samples_per_rank) == (preset.seed, 4 * accumulation)
    assert "same mathematics" in config.read_text()


def test_budget_out_of_reach_ends_with_code_3_and_the_smallest(capsys):
    given = ("--config", ROOT / "configs/quickstart.yaml", "--budget-gb", "0.1", "--order", "guide")
    assert run_here("scripts/oom_ladder.py", "--quiet", *given, *SMALL) == 3
    said = capsys.readouterr()
    assert "Nothing on the ladder fits 0.10 GiB. The smallest is" in said.out
    assert "0.50 GiB of it for the CUDA context" in said.out
    assert "held by" in said.out
    assert "predicting" not in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((("--budget-gb", text), "is not a finite number above 0") for text in ("-1", "nan", "inf", "0", "much")),
        (("--budget-gb", "1e300"), "is more than 1000000 GB"),
        (("--measure",), "--measure: no CUDA device found"),
        (("--json", ""), "error: --json: "),
        (("--json", "README.md/x"), "error: --json: "),
        (("--write-config", "configs"), "error: --write-config: "),
    ],
)
def test_wrong_input_is_refused_before_anything_is_predicted(arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    given = ["--config", "configs/quickstart.yaml", "--budget-gb", "8", *arguments]
    assert run_here("scripts/oom_ladder.py", *given) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: mine\n", "fits.yaml already exists and was not written by oom_ladder.py"),
        (f"# mine.yaml{oom_ladder.FITTED}6 GiB\n", "--measure: no CUDA device found"),
    ],
)
def test_only_a_config_that_it_wrote_is_replaced(text, message, tmp_path, capsys):
    target = tmp_path / "fits.yaml"
    target.write_text(text)
    given = ("--config", ROOT / "configs/quickstart.yaml", "--budget-gb", "8", "--write-config", target, "--measure")
    assert run_here("scripts/oom_ladder.py", *given) == 2
    assert message in capsys.readouterr().err
    assert target.read_text() == text


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("config", "budget_gb", "overrides"),
    [
        ("quality", 6, []),
        ("high_res", 2, []),
        ("high_res", 12, ["data.voxel_size=[512,512,128]"]),
        ("high_res", 18, ["data.voxel_size=[512,512,256]"]),
    ],
)
def test_promised_budgets_are_reached_with_the_same_mathematics(config, budget_gb, overrides, tmp_path):
    report = tmp_path / "ladder.json"
    given = ("--config", ROOT / f"configs/{config}.yaml", "--budget-gb", str(budget_gb), "--json", report)
    assert run_here("scripts/oom_ladder.py", *given, *overrides) == 0
    values = json.loads(report.read_text())
    recommended = next(rung for rung in values["rungs"] if rung["name"] == values["recommended"])
    assert recommended["same_mathematics"]


def test_what_a_rung_reserves_is_measured_and_one_that_fails_has_no_figure(monkeypatch):
    def measured(process, settings, stage, limit, timed):
        assert (process, stage) == ("a process", "ldm")
        if settings == "too large":
            raise RuntimeError("out of memory")
        return {"first_peak_reserved_bytes": 3, "peak_reserved_bytes": 2}

    monkeypatch.setattr("evaluation.gpu_check.step_process", lambda: "a process")
    monkeypatch.setattr("evaluation.gpu_check.step_result", measured)
    rungs = [SimpleNamespace(name=name, settings=name) for name in ("offload", "too large")]
    assert [oom_ladder._measured(rung, "ldm") for rung in rungs] == [{"offload": 3}, {}]
