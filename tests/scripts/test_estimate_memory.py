"""scripts/estimate_memory.py as a user runs it, and what READMEs and presets say about the presets."""

import json
import re

import pytest

from memory.predict.step import predict_step
from settings import load_settings
from tests.conftest import ROOT
from tests.finished_run import run_here

SMALL = [
    *("data.voxel_size=[16,16,16]", "data.patch_size=null"),
    *("autoencoder.num_channels=[8,8,8]", "autoencoder.attention_levels=[false,false,true]"),
]

pytestmark = pytest.mark.usefixtures("shared_workers")


def test_estimate_prints_a_table_and_writes_json(tmp_path, capsys):
    path = tmp_path / "estimate.json"
    given = ["--config", ROOT / "configs/quickstart.yaml", "--json", path, *SMALL]
    assert run_here("scripts/estimate_memory.py", *given) == 0
    said = capsys.readouterr().out
    for part in ("allocated by tensors", "reserved, expandable segments", "autoencoder.decoder", "Not predicted"):
        assert part in said
    values = json.loads(path.read_text())
    keys = ("peak_allocated_bytes", "peak_reserved_bytes", "host_bytes", "phase", "breakdown", "flops", "seconds")
    more = ("required_bytes", "workspace_bytes", "traffic_bytes", "kernels", "seconds_per_step", "hours", "phase_peaks")
    assert all(key in values for key in (*keys, *more))
    assert {"forward", "backward", "recompute"} <= set(values["flops"])
    assert {"parameters", "gradients", "optimizer", "activations", "other"} <= set(values["breakdown"])
    assert values["phase"] in said


def test_every_command_needs_the_same_memory_of_a_cpu(tmp_path, monkeypatch, capsys):
    """In 16 bits, which the process that trains forbids to oneDNN."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    changes = ["data.voxel_size=[128,128,32]", "device.type=cpu", "device.amp_dtype=bfloat16"]
    given = ["--config", str(ROOT / "configs" / "ultra_light.yaml"), *changes]
    texts = {}
    for command, *more in (
        ("scripts/estimate_memory.py", "--json", "estimate.json"),
        ("scripts/oom_ladder.py", "--budget-gb", "100", "--json", "ladder.json"),
        ("train_autoencoder.py", "--dry-run"),
    ):
        assert run_here(command, *given, *more) == 0
        texts[command] = "".join(capsys.readouterr())
    estimate, ladder = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("estimate", "ladder"))
    assert estimate["required_bytes"] == ladder["rungs"][0]["required_bytes"]
    # The process that will train knows its own size, which the others leave out and say so.
    said = re.search(r"predicted peak ([\d.]+) GiB of .*, ([\d.]+) GiB of it Python", texts["train_autoencoder.py"])
    assert said is not None
    assert float(said[1]) - float(said[2]) == pytest.approx(estimate["required_bytes"] / 2**30, abs=0.02)
    assert "needed besides Python itself" in texts["scripts/estimate_memory.py"]
    # Nor does any of them know how long a step takes there.
    assert estimate["hours"] is estimate["gpu"] is ladder["rungs"][0]["hours"] is None
    for text in texts.values():
        assert "Time on a CPU: not known before" in text
        assert "A100" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["autoencoder.training.slab_row=8"], "did you mean autoencoder.training.slab_rows?"),
        (["data.voxel_size=[1000000000,1000000000,1000000000]"], "a list whose entries are each at most 65536"),
        (["--json", ""], "error: --json: "),
        (["--json", "configs"], "error: --json: "),
        (["--gpus", "0"], "--gpus: found 0; allowed: 1 to 4096"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_predicted(arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert run_here("scripts/estimate_memory.py", "--config", "configs/quickstart.yaml", *arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def table_in_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.partition("<!-- table: presets -->\n")[2].partition("\n\n")[0].splitlines()
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): dict(zip(head, row, strict=True)) for row in rows}


def test_readme_shows_every_preset_with_its_predicted_peak():
    presets = {path.stem: load_settings(path) for path in (ROOT / "configs").glob("*.yaml")}
    table = table_in_readme()
    assert set(table) == set(presets)
    for name, settings in presets.items():
        predicted = predict_step(settings, "autoencoder").required_bytes / (1 << 30)
        assert table[name]["stage 1 needs"] == f"{predicted:.1f} GiB", f"{name}: run python -m scripts.dev.documents"
