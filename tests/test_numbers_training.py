"""Stage 2 with numbers of a table as a user runs it: trained with other conditions, and asked for by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from safetensors.torch import load_file

from settings import DataError
from tests.conditional_run import LABEL_MAPS, conditional_config
from tests.finished_run import run_here, train_ldm

NUMBERS = {"table": "people.csv", "continuous": ["age"], "categorical": ["sex"]}


def test_numbers_of_a_table_are_learned_with_other_conditions_and_asked_for_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f"case_{place}.nii.gz,{40 + place},{'FM'[place % 2]}" for place in range(8)]
    Path("people.csv").write_text("\n".join(["file,age,sex", *rows]))
    config = conditional_config(tmp_path, {"tabular": NUMBERS, **LABEL_MAPS})
    assert train_ldm(config) == 0
    trained = load_file("runs/tiny/ldm.safetensors")
    assert trained["number_embedding.0.weight"].shape[1] == 2 + 16
    capsys.readouterr()
    arguments = ("--run", "runs/tiny", "--steps", "2", "--num", "1", "--out", "drawn")
    for number in ("age=41", "age=80"):
        assert run_here("scripts/sample.py", *arguments, "--number", number, "--number", "sex=F") == 0
    drawn = [nib.load(path).get_fdata() for path in sorted(Path("drawn").glob("*.nii.gz"))]
    assert len(drawn) == 2
    assert np.abs(drawn[0] - drawn[1]).max() > 0
    capsys.readouterr()
    for wrong, text in (
        ("age", "--number: age, not a number of the run; allowed: age, sex, each once; write age=VALUE"),
        ("sex=X", "--number: sex=X is none of F, M; correct it"),
        ("age=old", "--number: age=old is not a number; correct it"),
    ):
        assert run_here("scripts/sample.py", *arguments, "--number", wrong) == 2
        assert text in capsys.readouterr().err
    # The code of the numbers is that of training, also when the training volumes' rows have changed since.
    logged = [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]
    [loss] = [line["val_diffusion"] for line in logged if "val_diffusion" in line]
    held_out = {row["volume"] for row in _evaluated()["reconstruction"]["volumes"]}
    changed = [row if row.split(",")[0] in held_out else f"{row.split(',')[0]},900,F" for row in rows]
    Path("people.csv").write_text("\n".join(["file,age,sex", *changed]))
    assert _evaluated()["skill"]["val_diffusion"] == pytest.approx(loss, rel=1e-8)
    weights = ("--weights", "runs/tiny/ldm.safetensors", "--out", "exported.pt")
    assert run_here("scripts/export_checkpoint.py", *weights) == 2
    assert "MONAI's DiffusionModelUNet takes no numbers" in capsys.readouterr().err
    Path("people.csv").write_text("\n".join(["file,age,sex", *rows[1:]]))
    with pytest.raises(DataError, match=r"case_0\.nii\.gz: no row in ldm\.conditioning\.tabular\.table"):
        train_ldm(config)


def _evaluated() -> dict[str, Any]:
    assert run_here("scripts/evaluate.py", "--run", "runs/tiny", "--num", "2", "--steps", "1", "--json", "e.json") == 0
    return json.loads(Path("e.json").read_text())
