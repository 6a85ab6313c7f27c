"""Published times are predicted as the document says, within its limits, by constants that fit the rows it names."""

import math
from pathlib import Path

import pytest

from memory.kernels import gpus
from memory.kernels.gpus import time_range
from tests.memory.published.times import TIME_ROWS, builders, count_work, stored_work, table_lines

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "prediction.md").read_text(encoding="utf-8")
COUNTED = stored_work()
QUICK = (
    "nnU-Net Liver, batch 2, update",
    "MAISI ddpm 64x64x32, step",
    "Stable Diffusion VAE 256x256, encode",
    "Conv3d 64 to 64 channels, fp32",
)


def test_the_document_has_every_row():
    assert len(TIME_ROWS) >= 40
    for line in table_lines(COUNTED):
        assert line in TEXT, f"python -m tests.memory.published.times prints the table; {line!r} is not in it"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in builders()]
)
def test_the_stored_work_is_what_the_tracker_counts(name):
    assert count_work(builders()[name]) == COUNTED[name]


def test_rows_that_were_not_fitted_are_as_near_as_the_document_says_and_within_the_printed_range():
    ratios = [row.predicted(COUNTED) / row.seconds for row in TIME_ROWS if not row.is_fitted]
    factors = [max(ratio, 1 / ratio) for ratio in ratios]
    assert max(factors) < 1.7
    near, most = sum(factor < 1.35 for factor in factors), math.ceil(100 * max(factors)) / 100
    assert near >= 0.8 * len(factors)
    cards, fitted = {row.gpu for row in TIME_ROWS}, {row.gpu for row in TIME_ROWS if row.is_fitted}
    said = f"Of the {len(ratios)} others, {near} are within a factor of 1.35 and all within {most}; their ratios are "
    said += (
        f"{min(ratios):.2f} to {max(ratios):.2f}. No row of {len(cards - fitted)} of the {len(cards)} cards was fitted."
    )
    assert said in " ".join(TEXT.split())
    ranges = [(row.seconds, *time_range(row.predicted(COUNTED))) for row in TIME_ROWS]
    assert sum(low > took for took, low, _ in ranges) <= 0.05 * len(ranges)
    assert sum(took > high for took, _, high in ranges) <= 0.05 * len(ranges)


@pytest.mark.parametrize(
    "constant",
    [
        "HALF_CONVOLUTION",
        "TF32_CONVOLUTION",
        "FLOAT_CONVOLUTION",
        "FLOAT_CONVOLUTION_BACKWARD",
        "LAYOUT_MOVED",
        "PRODUCT",
        "NARROW_PRODUCT",
    ],
)
def test_the_constants_fit_the_rows_they_were_fitted_to(constant, monkeypatch):
    def error() -> float:
        return sum(math.log(row.predicted(COUNTED) / row.seconds) ** 2 for row in TIME_ROWS if row.is_fitted)

    before, value = error(), getattr(gpus, constant)
    for factor in (0.85, 1.18):
        monkeypatch.setattr(gpus, constant, factor * value)
        assert error() > before, f"{constant} fits better at {factor} times its value"
