"""Predictions in docs/prediction.md are within their limits of the published figures, and the code still gives them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.memory.published.figures import (
    CONVOLUTIONS,
    MAISI,
    QWEN_DECODE,
    QWEN_ENCODE,
    Convolution,
    predict_convolution,
    predict_maisi,
    predict_qwen,
)

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8")


def parameters(quick: tuple[tuple[int, ...], ...], sizes: Mapping[Any, Any]) -> list[Any]:
    """Return every size as a parameter, slow unless it is among the quick ones."""
    return [pytest.param(size, marks=() if size in quick else pytest.mark.slow, id=str(size)) for size in sizes]


def compared(published: float, predicted: float) -> str:
    return f"{published:.3f} | {predicted:.3f} | {predicted / published:.3f}"


@pytest.mark.parametrize("size", parameters(((512, 512), (2048, 2048)), QWEN_DECODE))
def test_a_decoded_image_is_predicted_as_the_document_says(size):
    allocated, reserved = map(compared, QWEN_DECODE[size], predict_qwen(size[0], size[1], is_decode=True))
    assert f"| {size[0]}x{size[1]} | {allocated} | {reserved} |" in TEXT


@pytest.mark.parametrize("size", parameters(((512, 512),), QWEN_ENCODE))
def test_an_encoded_image_is_predicted_as_the_document_says(size):
    allocated, reserved = map(compared, QWEN_ENCODE[size], predict_qwen(size[0], size[1], is_decode=False))
    assert f"| {size[0]}x{size[1]} | {allocated} | {reserved} |" in TEXT


@pytest.mark.parametrize("row", CONVOLUTIONS, ids=lambda row: f"{row.issue}-{row.shape[2]}")
def test_a_convolution_is_predicted_as_the_document_says(row: Convolution):
    shape = f"{'x'.join(map(str, row.shape))} {str(row.dtype).removeprefix('torch.')}"
    figures = compared(row.published, predict_convolution(row))
    assert f"| {shape} | {'peak' if row.whole else 'allocation'} | {figures} |" in TEXT


@pytest.mark.parametrize("grid", parameters(((256, 256, 128), (512, 512, 768)), MAISI))
def test_the_volumetric_network_is_predicted_as_the_document_says(grid):
    assert f"| {'x'.join(map(str, grid))} | {compared(MAISI[grid], predict_maisi(grid))} |" in TEXT


def test_predictions_are_within_2_percent_of_tensors_and_8_percent_of_what_is_rounded_or_reserved():
    def ratios(line: str) -> list[float]:
        return [float(ratio) for ratio in re.findall(r"\| \d+\.\d{3} \| \d+\.\d{3} \| (\d\.\d{3}) (?=\|)", line)]

    rows = [found for line in TEXT.splitlines() if (found := ratios(line))]
    images, others = [row for row in rows if len(row) == 2], [row[0] for row in rows if len(row) == 1]
    assert len(images) == len(QWEN_DECODE) + len(QWEN_ENCODE)
    assert len(others) == len(CONVOLUTIONS) + len(MAISI)
    assert all(abs(allocated - 1) < 0.02 for allocated, _ in images)
    assert all(abs(ratio - 1) < 0.08 for ratio in [*others, *(reserved for _, reserved in images)])
