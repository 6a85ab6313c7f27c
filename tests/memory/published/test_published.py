"""Figures that others read from real GPUs, in GiB, are predicted as docs/prediction.md says, which has the sources."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models  # noqa: F401  # first: it keeps MONAI's import short
from memory.predict.allocator import AllocatorLimits, replay
from memory.predict.emulation import emulated, tracked
from memory.predict.prediction import GIB
from tests.memory.published.qwen_image import LATENT_CHANNELS, qwen_in_half
from tests.memory.published.unets import maisi_autoencoder, maisi_networks, notebook_loss, notebook_unet

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8")
QWEN_DECODE = {
    (512, 512): (1.274, 1.311),
    (768, 768): (2.563, 2.992),
    (832, 1248): (4.331, 5.211),
    (1024, 1024): (4.369, 5.254),
    (1088, 1920): (8.468, 10.408),
    (1280, 1280): (6.693, 8.188),
    (1536, 1024): (6.434, 7.857),
    (1536, 1536): (9.532, 11.736),
    (1792, 1792): (12.884, 15.949),
    (2048, 2048): (16.754, 20.799),
}
QWEN_ENCODE = {
    (512, 512): (0.900, 0.711),
    (768, 768): (1.724, 1.594),
    (832, 1248): (2.854, 2.824),
    (1024, 1024): (2.879, 2.848),
    (1088, 1920): (5.498, 5.672),
    (1280, 1280): (4.364, 4.459),
    (1536, 1024): (4.199, 4.281),
    (1536, 1536): (6.179, 6.396),
}


# "GB" there are those that nvidia-smi shows, so GiB.
MAISI = {
    (256, 256, 128): 5,
    (256, 256, 256): 8,
    (512, 512, 128): 12,
    (512, 512, 256): 21,
    (512, 512, 512): 39,
    (512, 512, 768): 58,
}

# Windows of the latent that is decoded, pieces of a convolution, and GiB: two ways to decode one grid.
MAISI_DECODE = {
    ("256x256x256", "64x64x64", "48x48x64"): ((4, 22.7), (4, 15.4)),
    ("512x512x128", "80x80x32", "64x64x32"): ((2, 21.0), (2, 15.7)),
    ("512x512x512", "80x80x48", "64x64x48"): ((4, 28.4), (2, 22.8)),
    ("512x512x512", "80x80x80", "64x64x48"): ((2, 45.3), (2, 22.8)),
}
NOTEBOOK = {"fp32": 2892, "fp16": 1829}
"""MiB."""


def predict_qwen(height: int, width: int, is_decode: bool) -> tuple[float, float]:
    """Return what one image allocates, with the weights, and what it reserves beyond them."""
    with emulated() as mode:
        network = qwen_in_half()
        with tracked(mode) as tracker, torch.no_grad():
            tracker.adopt(network.parameters(), "parameters")
            loaded = len(tracker.trace)
            if is_decode:
                network.decode(torch.zeros(1, LATENT_CHANNELS, 1, height // 8, width // 8, dtype=torch.float16))
            else:
                network.encode(torch.zeros(1, 3, 1, height, width, dtype=torch.float16))
    sizes, limits = [record.nbytes for record in tracker.allocations], AllocatorLimits()
    before, whole = replay(tracker.trace[:loaded], sizes, limits), replay(tracker.trace, sizes, limits)
    return whole.peak_allocated / GIB, (whole.peak_reserved - before.reserved) / GIB


def predict_maisi(grid: tuple[int, ...]) -> float:
    """Return what one step of MAISI's diffusion network allocates: batch 1, fp16 autocast, Adam."""
    with emulated() as mode:
        unet, _ = maisi_networks(is_rflow=True)
        with tracked(mode) as tracker:
            tracker.adopt(unet.parameters(), "parameters")
            num_parameters = sum(p.numel() for p in unet.parameters())
            x = torch.zeros(1, 4, *(axis // 4 for axis in grid))
            with torch.autocast("cpu", torch.float16):
                labels, spacing = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 3)
                y = unet(x, torch.zeros(1), class_labels=labels, spacing_tensor=spacing)
            nn.functional.mse_loss(y.float(), x).backward()
    # Adam's two states and the gradients; the parameters are in the peak.
    return (tracker.peak["device"] + 12 * num_parameters) / GIB


def predict_decoding(window: str, splits: int) -> float:
    """Return what MAISI's decoder allocates for one window of a latent."""
    with emulated() as mode:
        network: Any = maisi_autoencoder(splits).eval()
        with tracked(mode) as tracker, torch.no_grad(), torch.autocast("cpu", torch.float16):
            tracker.adopt(network.parameters(), "parameters")
            network.decode_stage_2_outputs(torch.zeros(1, 4, *map(int, window.split("x"))))
    return tracker.peak["device"] / GIB


def predict_notebook(is_half: bool) -> float:
    """Return what one update of MONAI's notebook allocates: batch 8, Adam, gradients that are zeroed and kept."""
    with emulated() as mode:
        unet = notebook_unet()
        with tracked(mode) as tracker:
            tracker.adopt([*unet.parameters(), *unet.buffers()], "parameters")
            x, labels = torch.zeros(8, 1, 128, 128, 96), torch.zeros(8, 1, 128, 128, 96)
            with torch.autocast("cpu", torch.float16, enabled=is_half):
                y = unet(x)
                loss = notebook_loss(y, labels)
            loss.backward()
    # As above: gradients and Adam's states.
    return (tracker.peak["device"] + 12 * sum(p.numel() for p in unet.parameters())) / GIB


def parameters(quick: tuple[Any, ...], sizes: Mapping[Any, Any]) -> list[Any]:
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


@pytest.mark.parametrize("grid", parameters(((256, 256, 128), (512, 512, 768)), MAISI))
def test_the_volumetric_network_is_predicted_as_the_document_says(grid):
    assert f"| {'x'.join(map(str, grid))} | {compared(MAISI[grid], predict_maisi(grid))} |" in TEXT


@pytest.mark.parametrize("rows", parameters((next(iter(MAISI_DECODE)),), MAISI_DECODE))
def test_another_window_of_a_decoder_makes_the_difference_that_the_document_says(rows):
    grid, *windows = rows
    (splits, published), (others, less) = MAISI_DECODE[rows]
    predicted = predict_decoding(windows[0], splits) - predict_decoding(windows[1], others)
    assert f"| {grid} | {' - '.join(windows)} | {compared(published - less, predicted)} |" in TEXT


def test_what_fp32_takes_beyond_16_bits_is_predicted_as_the_document_says():
    """Both rows of the notebook contain what its validation leaves behind, in fp32."""
    fp32, fp16 = predict_notebook(is_half=False), predict_notebook(is_half=True)
    published = {name: mib / 1024 for name, mib in NOTEBOOK.items()}
    assert f"| fp32 - fp16 | {compared(published['fp32'] - published['fp16'], fp32 - fp16)} |" in TEXT
    left = published["fp16"] - fp16, published["fp32"] - fp32
    assert left[0] == pytest.approx(left[1], abs=2 / 1024)
    assert (fp32 + left[0]) / published["fp32"] == pytest.approx(1, abs=0.001)


def test_predictions_are_within_2_percent_of_tensors_and_8_percent_of_what_is_rounded_or_reserved():
    def ratios(line: str) -> list[float]:
        return [float(ratio) for ratio in re.findall(r"\| \d+\.\d{3} \| \d+\.\d{3} \| (\d\.\d{3}) (?=\|)", line)]

    rows = [found for line in TEXT.splitlines() if (found := ratios(line))]
    images, others = [row for row in rows if len(row) == 2], [row[0] for row in rows if len(row) == 1]
    assert len(images) == len(QWEN_DECODE) + len(QWEN_ENCODE)
    assert len(others) == len(MAISI) + len(MAISI_DECODE) + 1
    assert all(abs(allocated - 1) < 0.02 for allocated, _ in images)
    assert all(abs(ratio - 1) < 0.08 for ratio in [*others, *(reserved for _, reserved in images)])
