"""Times that others measured on real GPUs, and the work of those steps; docs/prediction.md has the sources.

`times.csv` has the published figures: of NVIDIA's nnU-Net, volumes have up to 4 and images at least 32 in a batch; 16
bits of volumes have channels last and fused norms, and all others are contiguous. Attention is named by batch, heads,
tokens and channels of a head.

`python -m tests.memory.published.times` counts the work again, writes it to `times.json` and prints the table of the
document.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import models  # noqa: F401  # first: it keeps MONAI's import short
from memory.kernels.gpus import WorkPart, check_gpu, predicted_seconds
from memory.kernels.operators import work_parts
from memory.predict.emulation import emulated, tracked
from memory.predict.tracker import MemoryTracker
from tests.memory.published.qwen_image import LATENT_CHANNELS, in_half, qwen_in_half
from tests.memory.published.unets import (
    CUBE,
    NnUnet,
    Size,
    dice_and_entropy,
    maisi_networks,
    nnunet_loss,
    nvidia_unet,
    stable_diffusion_vae,
)

COUNTED = Path(__file__).with_name("times.json")
CONVOLUTION = "Conv3d 64 to 64 channels, fp32"
SIZES = dict.fromkeys((1, 2, 4), "128x128x128") | dict.fromkeys((32, 64, 128), "192x160")
"""What NVIDIA's network is given, by the batch."""
FLAT, HALVED, IN_PLANE = (1, 3, 3), (2, 2, 2), (1, 2, 2)
# Inputs, classes, kernels and strides of the levels, and the patch, as nnU-Net's planner finds them.
NNUNET_TASKS: dict[str, tuple[int, int, list[Size], list[Size], tuple[int, ...]]] = {
    "Heart": (1, 2, [CUBE] * 6, [HALVED] * 4 + [IN_PLANE], (80, 192, 160)),
    "Liver": (1, 3, [CUBE] * 6, [HALVED] * 5, (128, 128, 128)),
    "Prostate": (2, 3, [FLAT] * 2 + [CUBE] * 5, [IN_PLANE] * 2 + [HALVED] * 2 + [IN_PLANE] * 2, (20, 320, 256)),
}


@dataclass(frozen=True)
class TimeRow:
    """One published time of a step on a card."""

    source: str
    step: str
    gpu: str
    seconds: float
    is_fitted: bool

    @property
    def parts(self) -> tuple[tuple[int, str], ...]:
        """Return the pieces of counted work and how often each runs: 250 updates and 50 validated batches an epoch."""
        if not self.step.endswith("epoch"):
            return ((1, self.step),)
        network = self.step.removesuffix("epoch")
        return (250, f"{network}update"), (50, f"{network}forward")

    @property
    def split(self) -> tuple[str, str, str]:
        """Return the step in three parts, of which its batch or else its size is the second."""
        form = r"(.*batch )(\d+)(.*)" if "batch" in self.step else r"(.*? )(\d+(?:x\d+)+)(.*)"
        found = re.match(form, self.step)
        return (found[1], found[2], found[3]) if found else (self.step, "", "")

    def predicted(self, counted: dict[str, list[WorkPart]]) -> float:
        """Return the predicted seconds."""
        return sum(times * predicted_seconds(counted[name], check_gpu(self.gpu)) for times, name in self.parts)


def time_rows() -> Iterator[TimeRow]:
    """Yield the rows of `times.csv`, whose figures stand there as they were published."""
    with Path(__file__).with_name("times.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            seconds = seconds_of(float(row["figure"]), row["unit"], row["step"])
            yield TimeRow(row["source"], row["step"], row["gpu"], seconds, row["use"] == "fitted")


def seconds_of(figure: float, unit: str, step: str) -> float:
    """Return a published figure of a step as seconds."""
    if unit == "volumes/s":
        return int(step.partition("batch ")[2].partition(",")[0]) / figure
    if unit == "TFLOPS":
        batch, heads, tokens, channels = attention_shape(step)
        return (14 if step.endswith(BOTH) else 4) * batch * heads * tokens**2 * channels / (1e12 * figure)
    return figure * {"s": 1, "ms": 1e-3, "us": 1e-6, "s of 30 steps": 1 / 30}[unit]


def attention_shape(step: str) -> tuple[int, ...]:
    """Return batch, heads, tokens and channels of a head of a row of attention."""
    return tuple(map(int, step.removeprefix("attention ").partition(",")[0].split("x")))


BOTH = "forward and backward"
TIME_ROWS = tuple(time_rows())


def count_nnunet(task: str, batch: int, is_update: bool) -> Callable[[], Any]:
    """Return what builds nnU-Net and returns one step of it."""
    inputs, classes, kernels, strides, patch = NNUNET_TASKS[task]

    def build() -> Callable[[], None]:
        network = NnUnet(inputs, classes, kernels, strides)
        optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.99, nesterov=True, foreach=False)

        def step() -> None:
            with torch.set_grad_enabled(is_update), torch.autocast("cpu", torch.float16):
                loss = nnunet_loss(network(torch.zeros(batch, inputs, *patch)))
            if is_update:
                loss.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 12, foreach=False)
                optimizer.step()

        return step

    return build


def count_nvidia(batch: int, is_half: bool, is_update: bool) -> Callable[[], Any]:
    """Return what builds NVIDIA's network and returns one step of it."""

    def build() -> Callable[[], None]:
        size = [int(axis) for axis in SIZES[batch].split("x")]
        is_fused = is_half and len(size) == 3
        network = nvidia_unet(len(size), is_fused)
        optimizer = torch.optim.Adam(network.parameters(), fused=True)
        layout = torch.channels_last_3d if is_fused else torch.contiguous_format

        def step() -> None:
            x = torch.zeros(batch, 4, *size).contiguous(memory_format=layout)
            with torch.set_grad_enabled(is_update), torch.autocast("cpu", torch.float16, enabled=is_half):
                y = network(x)
                if is_update:
                    loss = dice_and_entropy(y, torch.zeros(batch, 1, *size, dtype=torch.int64))
            if is_update:
                loss.backward()
                optimizer.step()

        return step

    return build


def count_maisi(latent: tuple[int, ...], is_rflow: bool) -> Callable[[], Any]:
    """Return what builds MAISI's two networks and returns one denoising step: the ControlNet, then the U-Net."""

    def build() -> Callable[[], None]:
        unet, control = maisi_networks(is_rflow)

        @torch.no_grad()
        def step() -> None:
            labels = {"class_labels": torch.zeros(1, dtype=torch.int64)} if is_rflow else {}
            with torch.autocast("cpu", torch.float16):
                x, condition = half_zeros(1, 4, *latent), half_zeros(1, 8, *(4 * axis for axis in latent))
                down, middle = control(x, torch.zeros(1), condition, **labels)
                if not is_rflow:
                    labels = {f"{end}_region_index_tensor": half_zeros(1, 4) for end in ("top", "bottom")}
                residuals = {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
                unet(x, torch.zeros(1), spacing_tensor=half_zeros(1, 3), **residuals, **labels)

        return step

    return build


def count_attention(shape: tuple[int, ...], is_half: bool, is_update: bool) -> Callable[[], Any]:
    """Return what makes queries, keys and values and returns attention on them."""

    def build() -> Callable[[], None]:
        dtype = torch.float16 if is_half else torch.float32
        parts = [torch.zeros(shape, dtype=dtype, requires_grad=is_update) for _ in range(3)]
        grad = torch.zeros(shape, dtype=dtype)

        def step() -> None:
            query, key, value = parts
            y = nn.functional.scaled_dot_product_attention(query, key, value)
            if is_update:
                torch.autograd.grad(y, parts, grad)

        return step

    return build


def half_zeros(*shape: int) -> torch.Tensor:
    """Return 16-bit zeros."""
    return torch.zeros(*shape, dtype=torch.float16)


def count_vae(name: str) -> Callable[[], Any]:
    """Return what builds a VAE and returns the encoding or decoding of one image, or of a video's frames."""
    network, _, step = name.partition(" VAE ")
    size, _, direction = step.partition(", ")
    *frames, height, width = map(int, size.split("x"))
    is_encode, latent = direction == "encode", (height // 8, width // 8)

    def build() -> Callable[[], Any]:
        if network == "Stable Diffusion":
            half = in_half(lambda: stable_diffusion_vae(is_encode))
            return torch.no_grad()(lambda: half(half_zeros(1, *((3, height, width) if is_encode else (4, *latent)))))
        vae = qwen_in_half()
        if not frames:
            return torch.no_grad()(lambda: vae.decode(half_zeros(1, LATENT_CHANNELS, 1, *latent)))
        if is_encode:
            return torch.no_grad()(lambda: vae.encode_video(half_zeros(1, 3, frames[0], height, width)))
        return torch.no_grad()(lambda: vae.decode_video(half_zeros(1, LATENT_CHANNELS, frames[0] // 4 + 1, *latent)))

    return build


def count_convolution() -> Callable[[], Any]:
    """Return a single convolution of eight volumes."""
    convolution = nn.Conv3d(64, 64, 3)
    return torch.no_grad()(lambda: convolution(torch.zeros(8, 64, 64, 64, 64)))


def builders() -> dict[str, Callable[[], Callable[[], Any]]]:
    """Return what builds each piece of work, by the name that rows use."""
    kinds = {"update": True, "forward": False}
    found: dict[str, Callable[[], Callable[[], Any]]] = {}
    for kind, is_update in kinds.items():
        for task in NNUNET_TASKS:
            found |= {f"nnU-Net {task}, batch {b}, {kind}": count_nnunet(task, b, is_update) for b in (2, 6)}
        for precision, is_half in (("16 bits", True), ("fp32", False)):
            for batch, size in SIZES.items():
                name = f"DynUNet {size}, batch {batch}, {precision}, {kind}"
                found[name] = count_nvidia(batch, is_half, is_update)
    for latent in ((64, 64, 32), (64, 64, 64), (128, 128, 32), (128, 128, 128), (128, 128, 192)):
        for network in ("ddpm", "rflow"):
            found[f"MAISI {network} {'x'.join(map(str, latent))}, step"] = count_maisi(latent, network == "rflow")
    used = [name for row in TIME_ROWS for _, name in row.parts]
    for name in used:
        if name.startswith("attention"):
            found[name] = count_attention(attention_shape(name), "16 bits" in name, name.endswith(BOTH))
        elif " VAE " in name:
            found[name] = count_vae(name)
    found[CONVOLUTION] = count_convolution
    return {name: build for name, build in found.items() if name in used}


def count_work(build: Callable[[], Callable[[], Any]]) -> list[WorkPart]:
    """Return the work of a step as this project's predictions count it."""
    with emulated() as mode:
        step = build()
        with tracked(mode) as tracker:
            assert isinstance(tracker, MemoryTracker)
            step()
    parts = [WorkPart(**part) for part in work_parts(tracker.work)]
    return sorted(parts, key=lambda part: (part.kind, part.is_half))


def stored_work() -> dict[str, list[WorkPart]]:
    """Return the work that was counted before."""
    stored = json.loads(COUNTED.read_text(encoding="utf-8"))
    return {name: [WorkPart(kind, None, *rest) for kind, *rest in parts] for name, parts in stored.items()}


def table_lines(counted: dict[str, list[WorkPart]]) -> list[str]:
    """Return the lines of the document's table, one for all batches or else sizes of a step on a card."""
    lines: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in TIME_ROWS:
        before, size, after = row.split
        took, predicted = row.seconds, row.predicted(counted)
        figures = size, f"{took:.4g}", f"{predicted:.4g}", f"{predicted / took:.2f}"
        lines.setdefault((row.source, before, after, row.gpu, "fitted" * row.is_fitted), []).append(figures)
    texts = []
    for (source, before, after, gpu, use), rows in lines.items():
        sizes, *columns = (" / ".join(column) for column in zip(*rows, strict=True))
        texts.append(f"| {source} | {before}{sizes}{after} | {gpu} | {' | '.join(columns)} | {use} |")
    return texts


def main() -> None:
    """Count all work, store it, and print the table."""
    counted = {name: count_work(build) for name, build in builders().items()}
    parts = {name: [[p.kind, p.is_half, p.nbytes, p.flops, p.kernels] for p in work] for name, work in counted.items()}
    text = ",\n".join(f" {json.dumps(name)}: {json.dumps(work)}" for name, work in parts.items())
    COUNTED.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    print("\n".join(table_lines(counted)))


if __name__ == "__main__":
    main()
