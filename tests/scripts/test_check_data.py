"""check_data reports every volume and every problem, for every source."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.formats import write_nifti
from settings import load_settings
from tests.conftest import ROOT
from tests.data.test_dicom import write_series
from tests.finished_run import run_here

ARGUMENTS = [str(ROOT / "scripts/check_data.py"), "--config", str(ROOT / "configs/quickstart.yaml")]


def write_arrays(folder: Path, shapes: list[tuple[int, ...]]) -> None:
    folder.mkdir()
    for number, shape in enumerate(shapes):
        np.save(folder / f"v{number}.npy", np.random.default_rng(number).integers(0, 255, shape, np.uint8))


@pytest.fixture
def check_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run the command in this process, which has imported torch already, and return its exit code."""
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: run_here(*ARGUMENTS, *overrides)


def write_volumes(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("ill/a", "ill/b", "well/c"):
        write_nifti(folder / f"{name}.nii.gz", rng.normal(100, 20, (1, 10, 12, 14)).astype(np.float32), np.eye(4))


def test_good_volumes_are_listed_with_a_summary_and_a_next_command_that_a_shell_reads(check_here, tmp_path, capsys):
    write_volumes(tmp_path / "my volumes")
    overrides = ["data.source=my volumes", "data.group_by=(.*)[.]nii"]
    assert check_here(*overrides) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0].split()[:3] == ["volume", "class", "shape"]
    assert lines[1].split()[:4] == ["ill/a.nii.gz", "ill", "10x12x14", "1x1x1"]
    assert "3 volumes, no problem" in output.out
    assert "classes: ill (2), well (1)" in output.out
    assert "preparing 3 volumes once" in output.err
    following = lines[-1].removeprefix("next: ")
    assert shlex.split(following) == ["python", "train_autoencoder.py", *ARGUMENTS[1:], *overrides]


def test_every_problem_is_listed_and_the_exit_code_is_2(check_here, tmp_path, capsys):
    write_volumes(tmp_path / "volumes")
    (tmp_path / "volumes/ill/a.nii.gz").write_text("text")
    np.save(tmp_path / "volumes/well/flat.npy", np.ones((4, 4, 4)))
    (tmp_path / "volumes/dataset.json").write_text(
        json.dumps({"training": ["ill/a.nii.gz", "well/c.nii.gz", "well/flat.npy", "well/gone.nii"]})
    )
    assert check_here("data.source=volumes/dataset.json") == 2
    said = capsys.readouterr()
    assert "1 of 4 volumes can be read and scaled" in said.out
    assert "\n3 problems:\n" in said.out
    assert "ill/a.nii.gz: cannot be read as .nii.gz" in said.out
    assert "well/flat.npy: channel 0 is 1 at both" in said.out
    assert "well/gone.nii: no such file" in said.out
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("shape", "channels", "text"),
    [
        ((32, 32, 32), 3, r"1 channel \(32 x 32 x 32\); autoencoder.in_channels is 3; change one of the two"),
        ((32, 32, 32, 3), 3, r"its last of four axes is short .*; save np\.moveaxis\(array, -1, 0\), or a NIfTI file"),
        ((32, 32, 32, 1), 1, r"its last of four axes is short .*; save np\.moveaxis\(array, -1, 0\), or a NIfTI file"),
    ],
)
def test_wrong_channels_of_all_files_are_one_message(check_here, tmp_path, capsys, shape, channels, text):
    write_arrays(tmp_path / "all", [shape] * 5)
    assert check_here("data.source=all", f"autoencoder.in_channels={channels}") == 2
    said = capsys.readouterr().out
    assert re.search(rf"\n5 problems:\n  all/v0\.npy, all/v1\.npy and 3 more: {text}.*\n$", said)


def test_links_to_nothing_are_named(check_here, tmp_path, capsys):
    write_arrays(tmp_path / "all", [(32, 32, 32)] * 5)
    (tmp_path / "all/patients").symlink_to(tmp_path / "nowhere")
    assert check_here("data.source=all") == 0
    assert "patients: left out, a link to nothing" in capsys.readouterr().out
    for name in ("gone.nii.gz", "gone.dcm"):
        (tmp_path / "all" / name).symlink_to(tmp_path / "nowhere")
    assert check_here("data.source=all") == 2
    said = capsys.readouterr().out
    assert said.count(": no such file; restore it or take it out of the data") == 2
    (tmp_path / "all/dataset.json").symlink_to(tmp_path / "nowhere")
    assert check_here("data.source=all") == 2
    assert "all/dataset.json does not exist" in capsys.readouterr().err


def test_findings_are_written_as_json(check_here, tmp_path):
    write_volumes(tmp_path / "volumes")
    nothing = np.full((1, 10, 12, 14), np.nan, np.float32)
    write_nifti(tmp_path / "volumes/well/d.nii.gz", nothing, np.eye(4))
    (tmp_path / "volumes/ill/b.nii.gz").write_text("text")
    assert check_here("data.source=volumes", "--json", "new/checks.json") == 2

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    values = json.loads((tmp_path / "new/checks.json").read_text(), parse_constant=refuse)
    first, second, _, last = values["volumes"]
    assert (first["volume"], first["class"], first["shape"]) == ("ill/a.nii.gz", "ill", [10, 12, 14])
    assert first["problems"] == []
    assert "cannot be read as .nii.gz" in second["problems"][0]
    assert last["minimum"] is None
    assert "size along z: 14" in values["ranges"]
    assert len(values["problems"]) == 2


def test_names_that_no_encoding_has_are_escaped_where_output_is_strict(tmp_path):
    write_volumes(tmp_path / "volumes")
    strange = os.fsencode(tmp_path) + b"/volumes/ill/\xff\xe4.nii.gz"
    os.rename(tmp_path / "volumes/ill/a.nii.gz", strange)
    os.rename(tmp_path / "volumes/well", os.fsencode(tmp_path) + b"/volumes/well\xf6")
    (tmp_path / "labels.csv").write_bytes(b"file,label\nc.nii.gz,caf\xc3\xa9\nb.nii.gz,1\n")
    given = ["data.source=volumes", "--json", "checks.json", "data.class_labels=labels.csv"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, *ARGUMENTS, *given]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert result.returncode == 2, result.stderr
    assert b"Traceback" not in result.stderr
    assert rb"ill/\udcff\udce4.nii.gz" in result.stdout
    assert rb"caf\xe9" in result.stdout
    names = [volume["volume"] for volume in json.loads((tmp_path / "checks.json").read_text())["volumes"]]
    assert os.fsdecode(b"ill/\xff\xe4.nii.gz") in names


def test_a_grid_that_fits_is_called_so_and_only_some_unusual_volumes_are_shown(check_here, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for i in range(40):
        scale = 10**6 if i < 12 else 1000
        write_nifti(tmp_path / f"all/{i:02d}.nii", (rng.random((1, 32, 33, 31)) * scale).astype(np.float32), np.eye(4))
    assert check_here("data.source=all", "data.prepared=none", "--json", "found.json") == 0
    said = capsys.readouterr().out
    assert "data.voxel_size 32 x 32 x 32 suits these volumes and both stages" in said
    assert "a grid that suits" not in said
    assert "unusual, worth a look (12):" in said
    assert "  and 2 more, which --json FILE lists" in said
    assert len(json.loads((tmp_path / "found.json").read_text())["unusual"]) == 12


def test_a_folder_as_people_have_them_is_understood(check_here, tmp_path, capsys):
    """Five patients with two scans each and their labels, and one each: large, bright, 4D, DICOM, localizer."""
    rng = np.random.default_rng(0)
    for patient in range(5):
        for scan in range(2):
            name = f"sub-{patient}_scan{scan}.nii.gz"
            voxels = rng.integers(0, 1900, (1, 32, 40, 36)).astype(np.int16)
            write_nifti(tmp_path / f"all/images/{name}", voxels, np.eye(4))
            write_nifti(tmp_path / f"all/labels/{name}", (voxels > 900).astype(np.uint8), np.eye(4))
    large, bright = rng.integers(0, 1900, (1, 128, 40, 36)), rng.integers(0, 10**6, (1, 32, 40, 36))
    write_nifti(tmp_path / "all/images/large.nii.gz", large.astype(np.int16), np.eye(4))
    write_nifti(tmp_path / "all/images/bright.nii.gz", bright.astype(np.int32), np.eye(4))
    one_mm = {"PixelSpacing": [1, 1], "ImagePositionPatient": lambda k: [0, 0, k]}
    write_series(tmp_path / "all/images/series", rng.integers(0, 1900, (32, 40, 36)).astype(np.int16), **one_mm)
    write_series(
        tmp_path / "all/images/scout", large[0, :32, :, :1].astype(np.int16), ImageType=["ORIGINAL", "X", "LOCALIZER"]
    )
    four = rng.integers(0, 1900, (4, 32, 40, 36)).astype(np.int16)
    write_nifti(tmp_path / "all/images/four.nii.gz", four, np.eye(4))
    assert check_here("data.source=all") == 2
    problem = capsys.readouterr().out
    assert "13 of 14 volumes can be read and scaled" in problem
    assert "some patients seem to have several scans" in problem
    assert "\n1 problem:\n" in problem
    assert "four.nii.gz: 4 channels (32 x 40 x 36 x 4); autoencoder.in_channels is 1; change" in problem

    assert check_here("data.source=all", "data.frame=0", "--json", "found.json") == 0
    said = capsys.readouterr().out
    lines = [line.strip() for line in said.splitlines()]
    by_folder = "and 8 more: left out, a label map by the name of its folder; rename it, or list it"
    assert sum(by_folder in line for line in lines) == 1
    assert sum("left out, a localizer (1 image), not a volume" in line for line in lines) == 1
    assert "14 volumes, no problem" in said
    unusual = [line.split(":")[0] for line in lines if ", median " in line]
    assert unusual == ["images/bright.nii.gz", "images/large.nii.gz"]
    assert any(line.startswith("images/series ") and " 32x40x36 " in line for line in lines)
    assert sum("some patients seem to have several scans" in line for line in lines) == 1
    assert lines[-1].startswith("next: python train_autoencoder.py --config ")
    grid = json.loads((tmp_path / "found.json").read_text())["suggested_grid"]
    for stage in ("autoencoder", "ldm"):
        load_settings(ROOT / "configs/quickstart.yaml", [f"data.voxel_size={grid}"], stage)
    pattern = next(line.split("'")[1] for line in lines if "patients seem to have" in line)
    assert check_here("data.source=all", "data.frame=0", f"data.group_by='{pattern}'") == 0
    assert "\n".join(lines).count(f"data.voxel_size={','.join(map(str, grid))}") == 1
