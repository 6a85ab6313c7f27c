"""Predictions in docs/prediction.md are within their limits of the published figures, and the code still gives them."""

import re
from pathlib import Path

import pytest

from scripts.dev.published.figures import (
    CONVOLUTIONS,
    MAISI,
    QWEN_DECODE,
    predict_convolution,
    predict_maisi,
    predict_qwen,
)

ROOT = Path(__file__).resolve().parents[4]


def rows(title: str) -> dict[str, list[float]]:
    """Return the figures of each row of the table under a heading, by its first cell."""
    text = (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8")
    section = text.split(f"## {title}")[1].split("\n## ")[0]
    found = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        numbers = [float(cell) for cell in cells if re.fullmatch(r"\d+\.\d+", cell)]
        if line.startswith("|") and numbers:
            found[" ".join(cells[: len(cells) - len(numbers)])] = numbers
    return found


def test_ten_decoded_images_are_within_1_percent_allocated_and_6_percent_reserved():
    decoded = rows("An image VAE in fp16")
    for (height, width), (allocated, reserved) in QWEN_DECODE.items():
        figures = decoded[f"{height}x{width}"]
        # The rows of encoding have the same names and come later; those of decoding are checked afresh below.
        assert len(figures) == 6
        assert figures[2] == pytest.approx(1, abs=0.015)
        assert figures[5] == pytest.approx(1, abs=0.06)
        assert allocated > 0
        assert reserved > 0


@pytest.mark.parametrize("size", [(512, 512), (768, 768), (2048, 2048)], ids=str)
def test_decoded_images_are_predicted_as_the_document_says(size):
    allocated, reserved = predict_qwen(size[0], size[1], is_decode=True)
    assert allocated == pytest.approx(QWEN_DECODE[size][0], rel=0.01)
    assert reserved == pytest.approx(QWEN_DECODE[size][1], rel=0.06)


@pytest.mark.parametrize("row", CONVOLUTIONS, ids=lambda row: f"{row.issue}-{row.shape[2]}")
def test_convolutions_that_were_published_are_within_3_percent(row):
    assert predict_convolution(row) == pytest.approx(row.published, rel=0.03)


def test_all_rows_of_the_volumetric_network_are_within_8_percent():
    found = rows("Training a volumetric diffusion network")
    assert len(found) == len(MAISI)
    assert all(numbers[-1] == pytest.approx(1, abs=0.08) for numbers in found.values())


@pytest.mark.parametrize("grid", [(256, 256, 128), (512, 512, 768)], ids=str)
def test_the_volumetric_network_is_predicted_as_the_document_says(grid):
    assert predict_maisi(grid) == pytest.approx(MAISI[grid], rel=0.08)
