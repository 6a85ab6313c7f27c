"""The notebook runs from top to bottom, in a clone and as Colab would start it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = json.loads((ROOT / "docs" / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def execute(cells: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run cells one after another in one process, as a kernel would; pictures are counted instead of shown."""
    count = "import matplotlib.pyplot as plt\nplt.show = lambda: print('pictures:', len(plt.gcf().axes))\n"
    script = folder / "cells.py"
    script.write_text(count + "\n\n".join(cells), encoding="utf-8")
    variables = {**os.environ, "MPLBACKEND": "agg", **environment}
    return subprocess.run([sys.executable, str(script)], cwd=folder, env=variables, capture_output=True, text=True)


def clone_of_links(folder: Path) -> Path:
    """A folder that looks like a clone and has its own runs/."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git"):
            (folder / path.name).symlink_to(path)
    return folder


def test_the_notebook_has_no_outputs_and_its_first_cell_finds_the_clone_or_says_what_to_do(tmp_path):
    assert all(not cell["outputs"] for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code")
    done = execute(CELLS[:1], tmp_path, LEAN3D_REPOSITORY="")
    assert done.returncode == 1
    assert "set REPOSITORY to the address of this project" in done.stderr
    inside = clone_of_links(tmp_path) / "somewhere" / "inside"
    inside.mkdir(parents=True)
    done = execute([CELLS[0], "print(os.getcwd(), *dir(lean3d))"], inside)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path} UserError Volume open_run ")


@pytest.mark.slow
def test_the_notebook_trains_shows_pictures_and_what_a_knob_saves(tmp_path):
    done = execute(CELLS, clone_of_links(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert re.findall("pictures: (.*)", done.stdout) == ["10", "10", "1"]
    peaks = [float(number) for number in re.findall(r"([\d.]+) GiB of tensors", done.stdout)]
    assert len(peaks) == 3
    assert peaks[0] > 2 * peaks[1] > 2 * peaks[2]
    assert (tmp_path / "runs" / "notebook" / "report.html").exists()
