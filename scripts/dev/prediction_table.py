"""Write docs/prediction.md: every figure that others read from real GPUs, predicted, side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runtime.cli import parser, run

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "docs" / "prediction.md"

_INTRODUCTION = """# Predictions against published and measured figures

Written by `python scripts/dev/prediction_table.py`; do not edit by hand.

Others measured the figures of the first three sections on real GPUs and published them. The code that predicts training
predicts each of them without a GPU, from a network that allocates what the published one does. The sections after them
were measured by `scripts/dev/measure_predictions.py`, without a GPU that computes. Ratios are predicted / published or
predicted / measured.
"""

_QWEN = """## An image VAE in fp16

The VAE of Qwen-Image (`AutoencoderKLQwenImage` of diffusers), one image, RTX 4090, torch 2.7.1, default allocator,
[published here]({source}). Allocated includes the weights. Reserved does not: for encoding it is below
allocated, so it must count from the moment when the weights were loaded. The tensors are contiguous, so each
convolution takes a workspace of the size of its input and its output.
"""

_FALLBACK = """## Convolutions that cuDNN refuses

Single convolutions reported to PyTorch. Above 2^31 elements in a sample, cuDNN before 9.3 is not used and torch unfolds
the input; the last row is just below that limit. `peak` is the whole peak with input and output, `allocation` the
single allocation that failed. The pinned torch ships cuDNN 9.20, which computes all of them; predictions follow the
version that is installed.
"""

_MAISI = """## Training a volumetric diffusion network

The U-Net of MAISI (181 million parameters, batch 1, fp16 autocast, Adam), [published here]({source}) as whole GB.
NVIDIA does not say which figure this is; predicted is what tensors and workspaces allocate.
"""

_UNKNOWN = """## What is not known

- Workspaces of fp32 convolutions, with and without TF32, and of channels-last convolutions: we found no published
  figure that shows one.
- The CUDA context (0.5 GiB is assumed) and NCCL's buffers (0.25 GiB are assumed).
- Times on a GPU: they are lower bounds from data sheets. We found no published time of a volumetric training step with
  enough detail about the step.
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python scripts/dev/prediction_table.py"])
    result.add_argument("--out", default=str(PATH), metavar="FILE", help="the document")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Predict every row and write the document."""
    Path(options.out).write_text(document(), encoding="utf-8")
    print(options.out)
    return 0


def document() -> str:
    """Return the document."""
    from scripts.dev.measured.text import measured_sections
    from scripts.dev.published import figures

    parts = [_INTRODUCTION, _QWEN.format(source=figures.QWEN_SOURCE)]
    for name, rows, is_decode in (("decode", figures.QWEN_DECODE, True), ("encode", figures.QWEN_ENCODE, False)):
        lines = [
            f"| {name} | allocated, published | predicted | ratio | reserved, published | predicted | ratio |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for (height, width), (allocated, reserved) in rows.items():
            first, second = figures.predict_qwen(height, width, is_decode)
            lines.append(f"| {height}x{width} | {_compared(allocated, first)} | {_compared(reserved, second)} |")
        parts.append("\n".join(lines) + "\n")
    lines = ["| source | input | figure | published | predicted | ratio |", "|---|---|---|---:|---:|---:|"]
    for row in figures.CONVOLUTIONS:
        link = f"[pytorch#{row.issue}](https://github.com/pytorch/pytorch/issues/{row.issue})"
        shape = f"{'x'.join(map(str, row.shape))} {str(row.dtype).removeprefix('torch.')}"
        kind = "peak" if row.whole else "allocation"
        lines.append(f"| {link} | {shape} | {kind} | {_compared(row.published, figures.predict_convolution(row))} |")
    parts += [_FALLBACK, "\n".join(lines) + "\n", _MAISI.format(source=figures.MAISI_SOURCE)]
    lines = ["| grid | published | predicted | ratio |", "|---|---:|---:|---:|"]
    for grid, published in figures.MAISI.items():
        lines.append(f"| {'x'.join(map(str, grid))} | {_compared(published, figures.predict_maisi(grid))} |")
    parts += ["\n".join(lines) + "\n", *measured_sections(), _UNKNOWN]
    return "\n".join(parts)


def _compared(published: float, predicted: float) -> str:
    return f"{published:.3f} | {predicted:.3f} | {predicted / published:.3f}"


if __name__ == "__main__":
    sys.exit(run(main, parse()))
