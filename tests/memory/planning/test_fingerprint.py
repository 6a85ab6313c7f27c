"""A fingerprint says what the files hold, reads each once, and names what cannot be planned for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.formats import write_nifti
from memory.planning.choices import notes
from memory.planning.fingerprint import CT, LABEL_MAPS, Fingerprint, take_fingerprint
from settings import DataError, DataSettings
from tests.memory.planning.fakes import planned

SIZE = (10, 12, 8)


@pytest.fixture(autouse=True)
def _in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, values: np.ndarray, spacing: tuple[float, ...] = (1.0, 1.0, 1.0)) -> None:
    voxels = values if values.ndim == 4 else values[None]
    write_nifti(Path("volumes") / name, voxels, np.diag([*spacing, 1.0]))


def mr(seed: int, size: tuple[int, ...] = SIZE) -> np.ndarray:
    values = np.random.default_rng(seed).uniform(200, 800, size).astype(np.float32)
    values[: size[0] // 2] = 0
    return values


def taken(**values: object) -> Fingerprint:
    return take_fingerprint(DataSettings.model_validate({"source": "volumes", **values}), 0)


def test_ct_is_recognised_by_its_values_and_mr_too():
    for number in range(3):
        write(f"{number}.nii", (2 * mr(number) - 1024).astype(np.int16), (0.8, 0.8, 5.0))
    found = taken()
    assert found.kind == CT
    assert found.spacing == pytest.approx((0.8, 0.8, 5.0))
    assert found.background == pytest.approx(0.5, abs=0.02)
    for number in range(3):
        write(f"{number}.nii", mr(number))
    assert taken().kind != CT


def test_sizes_follow_the_orientation():
    turned = np.array([[0, 0, 3.0, 0], [1.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 0, 1]])
    for number in range(2):
        write_nifti(Path(f"volumes/{number}.nii"), mr(number)[None], turned)
    found = taken()
    assert found.sizes[0] == (8, 10, 12)
    assert found.spacing == pytest.approx((3.0, 1.0, 2.0))


def test_label_maps_beside_images_are_pairs_and_not_volumes():
    for number in range(3):
        write(f"images/{number}.nii.gz", mr(number))
        write(f"labels/{number}.nii.gz", (mr(number) > 300).astype(np.uint8))
    found = taken()
    assert (found.number, found.num_left_out) == (3, 3)


def test_only_label_maps_are_what_is_to_be_learned():
    for number in range(2):
        write(f"{number}.nii", np.kron(mr(number, (5, 6, 4)) // 200, np.ones((4, 4, 4))).astype(np.uint8))
    assert taken().kind == LABEL_MAPS


def test_channels_classes_and_patients_are_counted():
    for number in range(6):
        write(f"{'ill' if number % 2 else 'well'}/sub-{number // 2}_{number}.nii", np.stack([mr(number), mr(9)]))
    found = taken()
    assert found.num_channels == 2
    assert found.classes == {"ill": 3, "well": 3}
    assert found.group_by == r"sub-[A-Za-z0-9]+"
    (first, _), (second, _) = found.ranges
    assert first == pytest.approx(second, abs=300)


def test_volumes_that_are_nearly_all_background_are_counted():
    sparse = np.zeros(SIZE, np.float32)
    sparse[5, 5, 5] = 1.5
    for number in range(3):
        write(f"{number}.nii", sparse + (mr(number) if number else 0))
    assert taken().num_flat == 1


def test_the_background_is_the_median_over_the_volumes():
    for number, share in enumerate((0.1, 0.2, 0.9)):
        values = np.random.default_rng(number).uniform(500, 800, (10, 10, 10)).astype(np.float32)
        values[: round(10 * share)] = 0
        write(f"{number}.nii", values)
    assert taken().background == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("number", [1, 2])
def test_too_few_volumes_are_refused_in_one_sentence(number):
    for one in range(number):
        write(f"{one}.nii", mr(one))
    with pytest.raises(DataError, match=rf"has {number} volumes?, 1 to train on .*; at least 1 and 2 are needed"):
        planned(taken())


def test_a_plan_does_without_the_few_files_that_cannot_be_used_and_names_them():
    for number in range(5):
        write(f"{number}.nii", mr(number))
    write("two.nii", np.stack([mr(0), mr(1)]))
    Path("volumes/broken.nii").write_bytes(b"no volume")
    found = taken()
    assert (found.number, found.num_channels, len(found.problems)) == (5, 1, 2)
    note = notes(found)[0]
    for word in ("2 problems", "broken.nii", "two.nii", "training refuses the folder until"):
        assert word in note


def test_channels_that_the_user_gave_are_those_of_every_file():
    for number in range(5):
        write(f"{number}.nii", mr(number))
    with pytest.raises(DataError, match=r"5 problems:\n.*0\.nii, .* and 3 more: 1 channel .*in_channels is 3; change"):
        take_fingerprint(DataSettings(source="volumes"), 0, in_channels=3)
