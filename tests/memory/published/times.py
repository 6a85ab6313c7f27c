"""Times that others measured on real GPUs, and the work of those steps; docs/prediction.md has the sources.

`python -m tests.memory.published.times` counts the work again, writes it to `times.json` and prints the table of the
document.
"""

from __future__ import annotations

import json
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
from tests.memory.published.qwen_image import LATENT_CHANNELS, qwen_in_half
from tests.memory.published.unets import (
    CUBE,
    NnUnet,
    Size,
    dice_and_entropy,
    maisi_networks,
    nnunet_loss,
    nvidia_unet,
)

COUNTED = Path(__file__).with_name("times.json")
A100, V100 = "A100 80GB SXM", "V100 SXM"
QWEN, WAN = "Qwen-Image VAE 1024x1024, decode", "Wan 2.1 VAE 17x640x384, decode"
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
    """One published time: of a step on a card, or of so many runs of each piece of `work`."""

    source: str
    step: str
    gpu: str
    seconds: float
    is_fitted: bool = False
    work: tuple[tuple[int, str], ...] = ()

    @property
    def parts(self) -> tuple[tuple[int, str], ...]:
        """Return the pieces of counted work and how often each runs."""
        return self.work or ((1, self.step),)

    def predicted(self, counted: dict[str, list[WorkPart]]) -> float:
        """Return the predicted seconds."""
        return sum(times * predicted_seconds(counted[name], check_gpu(self.gpu)) for times, name in self.parts)


def nnunet_rows() -> Iterator[TimeRow]:
    """Yield epochs of nnU-Net version 1: 250 updates and 50 validated batches, in 16 bits, contiguous."""
    cards = ("A100 40GB", V100, "V100 PCIe", "Quadro RTX 6000", "Titan RTX", "RTX 2080 Ti", "Titan Xp")
    epochs = {
        ("Heart", 2): (48.53, 79, 89.66, 105.16, 105.56, 138.4, 501.64),
        ("Heart", 6): (118.5, 220.45, 251.25, 322.28, 300.96),
        ("Liver", 2): (41.1, 70.96, 80.1, 79.43, 79.43, 101.54, 289.03),
        ("Liver", 6): (115.33, 213.27, 250.09, 261.54, 266.66),
        ("Prostate", 2): (43.87, 70.58, 81.32, 97.48, 98.99, 124.73, 410.12),
        ("Prostate", 6): (117.31, 209.12, 234.28, 277.14, 284.35),
    }
    for (task, batch), seconds in epochs.items():
        name = f"nnU-Net {task}, batch {batch}"
        for gpu, took in zip(cards, seconds, strict=False):
            is_fitted = (task, batch) == ("Liver", 2) and gpu in ("A100 40GB", "RTX 2080 Ti")
            work = ((250, f"{name}, update"), (50, f"{name}, forward"))
            yield TimeRow("nnU-Net", f"{name}, epoch", gpu, took, is_fitted, work)


def nvidia_rows() -> Iterator[TimeRow]:
    """Yield NVIDIA's nnU-Net for volumes and, in batches of 32 and more, for images.

    16 bits of volumes have channels last and fused norms; all others are contiguous, fp32 on an A100 with TF32.
    """
    volumes_per_second = {
        (A100, "16 bits"): {1: 24.61, 2: 27.48, 4: 29.96, 32: 1040.58, 64: 1238.68, 128: 1345.29},
        (A100, "fp32"): {1: 9.66, 2: 11.27, 4: 12.22, 32: 732.22, 64: 797.37, 128: 838.38},
        (V100, "16 bits"): {1: 11.38, 2: 12.34, 32: 561.6, 64: 657.91, 128: 706.92},
        (V100, "fp32"): {1: 2.07, 2: 2.51},
    }
    milliseconds = {
        (A100, "16 bits"): {1: 14.61, 2: 35.15, 4: 52.36, 64: 17.56, 128: 33.24},
        (A100, "fp32"): {1: 28.55, 2: 50.15, 4: 96.8, 32: 17.13, 64: 25.51, 128: 49.05},
        (V100, "16 bits"): {1: 27.08, 2: 51.47, 4: 102.18, 32: 25.51, 64: 31.62, 128: 59.9},
        (V100, "fp32"): {1: 100.78, 2: 197.33, 4: 390.33},
    }
    took = {
        "update": {key: {b: b / rate for b, rate in rates.items()} for key, rates in volumes_per_second.items()},
        "forward": {key: {b: ms / 1000 for b, ms in times.items()} for key, times in milliseconds.items()},
    }
    for kind, tables in took.items():
        for (gpu, precision), seconds in tables.items():
            for batch, each in seconds.items():
                name = f"DynUNet {SIZES[batch]}, batch {batch}, {precision}, {kind}"
                yield TimeRow("NVIDIA", name, gpu, each, is_fitted=batch < 32)


def maisi_rows() -> Iterator[TimeRow]:
    """Yield denoising steps of MAISI with its ControlNet; the 30 steps of the second network took whole seconds."""
    took = {
        (64, 64, 32): (57, None),
        (64, 64, 64): (81, None),
        (128, 128, 32): (138, 5),
        (128, 128, 128): (569, 19),
        (128, 128, 192): (904, 30),
    }
    for latent, (thousand, thirty) in took.items():
        size = "x".join(map(str, latent))
        yield TimeRow("MAISI", f"MAISI ddpm {size}, step", A100, thousand / 1000)
        if thirty is not None:
            yield TimeRow("MAISI", f"MAISI rflow {size}, step", A100, thirty / 30)


# Batch, heads, tokens, channels of a head, precision, what counts; card, seconds, whether fitted.
_XFORMERS = {
    ("16 bits", True): {32: 1454.8e-6, 64: 1668.8e-6, 128: 2981.2e-6, 256: 6942.8e-6},
    ("fp32", False): {64: 5601.8e-6, 128: 12773.4e-6, 256: 25945.4e-6},
}
_BOTH = "forward and backward"
ATTENTION: list[tuple[str, tuple[int, ...], str, str, str, float, bool]] = [
    *(
        ("xformers", (64, 16, 1024, channels), precision, "forward", "A100 40GB", seconds, is_fitted)
        for (precision, is_fitted), took in _XFORMERS.items()
        for channels, seconds in took.items()
    ),
    *(
        (
            "ring-attention",
            (b, 32, 16384 // b, 64),
            "16 bits",
            _BOTH,
            "RTX A5000",
            14 * 16384**2 // b * 2048 / rate,
            True,
        )
        for b, rate in ((16, 66.9e12), (8, 72.95e12), (4, 76.64e12), (2, 78.64e12))
    ),
    ("PyTorch", (1, 24, 4608, 128), "16 bits", "forward", "H100 SXM", 4 * 24 * 4608**2 * 128 / 631.338e12, False),
    ("flash-attention", (2, 32, 2048, 64), "16 bits", "forward", "H20", 0.545e-3, False),
    ("flash-attention", (2, 16, 2048, 128), "16 bits", "forward", "H20", 0.532e-3, False),
]


def attention_rows() -> Iterator[TimeRow]:
    """Yield attention alone."""
    for source, shape, precision, kind, gpu, seconds, is_fitted in ATTENTION:
        yield TimeRow(source, attention_name(shape, precision, kind), gpu, seconds, is_fitted)


def attention_name(shape: tuple[int, ...], precision: str, kind: str) -> str:
    """Return the name of a row of attention."""
    return f"attention {'x'.join(map(str, shape))}, {precision}, {kind}"


TIME_ROWS = (
    *nnunet_rows(),
    *nvidia_rows(),
    *maisi_rows(),
    *attention_rows(),
    TimeRow("sglang", QWEN, "H100 SXM", 0.06848),
    TimeRow("sglang", WAN, "H100 SXM", 0.244689),
    TimeRow("PyTorch", CONVOLUTION, "RTX 2080 Ti", 0.04002),
)


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


def count_qwen() -> Callable[[], Any]:
    """Return the decoding of one image."""
    vae = qwen_in_half()
    return torch.no_grad()(lambda: vae.decode(half_zeros(1, LATENT_CHANNELS, 1, 128, 128)))


def count_wan() -> Callable[[], Any]:
    """Return the decoding of 17 frames, by the same network."""
    vae = qwen_in_half()
    return torch.no_grad()(lambda: vae.decode_video(half_zeros(1, LATENT_CHANNELS, 5, 80, 48)))


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
    for _, shape, precision, kind, *_ in ATTENTION:
        found[attention_name(shape, precision, kind)] = count_attention(shape, precision == "16 bits", kind == _BOTH)
    found |= {QWEN: count_qwen, WAN: count_wan}
    found[CONVOLUTION] = count_convolution
    used = {name for row in TIME_ROWS for _, name in row.parts}
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
    """Return the lines of the document's table."""
    lines = []
    for row in TIME_ROWS:
        took, predicted = row.seconds, row.predicted(counted)
        use = "fitted" if row.is_fitted else ""
        figures = f"{took:.4g} | {predicted:.4g} | {predicted / took:.2f}"
        lines.append(f"| {row.source} | {row.step} | {row.gpu} | {figures} | {use} |")
    return lines


def main() -> None:
    """Count all work, store it, and print the table."""
    counted = {name: count_work(build) for name, build in builders().items()}
    parts = {name: [[p.kind, p.is_half, p.nbytes, p.flops, p.kernels] for p in work] for name, work in counted.items()}
    text = ",\n".join(f" {json.dumps(name)}: {json.dumps(work)}" for name, work in parts.items())
    COUNTED.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    print("\n".join(table_lines(counted)))


if __name__ == "__main__":
    main()
