"""Run the Triton kernels on CPU tensors through Triton's interpreter, and print how far they are from the truth.

A program of its own: whether kernels are interpreted is decided when Triton is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import triton  # type: ignore[import-untyped]

from models.lean.norm import triton_launch
from models.lean.norm.operators import group_means
from models.lean.norm.torch_kernels import Norm
from tests.models.lean.norm.norm_cases import (
    EPS,
    Case,
    all_cases,
    distances,
    forget_launches,
    inputs,
    sums_of,
    whole_distances,
)


def beyond_32_bits(folder: Path) -> float:
    """Return the distance for channels that lie 2^30 values apart, in a file of which only a few pages exist."""
    step = 2**30
    shape, strides = (1, 4, 1, 2, 3), (4 * step, step, 6, 3, 1)
    room = torch.from_file(str(folder / "sparse"), shared=True, size=3 * step + 6, dtype=torch.float16)
    x = room.as_strided(shape, strides)
    x.copy_(torch.arange(24.0).view(shape))
    dense = x.clone()
    mean, rstd = triton_launch.statistics(x, 2, EPS)
    norm = Norm(mean, rstd, torch.ones(4), torch.zeros(4), silu=False)
    found, expected = torch.empty_like(dense), torch.empty_like(dense)
    triton_launch.normalise(found, x, norm, 0)
    triton_launch.normalise(expected, dense, norm, 0)
    triton_launch.normalise(x, dense, norm, 0)
    sums = sums_of(triton_launch, expected, dense, norm) - sums_of(triton_launch, x, dense, norm)
    return float((found - expected).abs().max() + (x - expected).abs().max() + sums.abs().max())


def main() -> None:
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 is missing"
    results = {}
    # Small tiles and blocks, so that small volumes have many of them; then one that spans tiles of the real size.
    real_size, triton_launch.TILE_VALUES, triton_launch.COMBINE_BLOCK = triton_launch.TILE_VALUES, 128, 4
    for case in all_cases():
        results[str(case)] = distances(case, inputs(case), triton_launch, group_means)
        results[f"small {case}"] = whole_distances(case, inputs(case), triton_launch)
    triton_launch.SMALL_VALUES = 0
    for size, triton_launch.MOST_PARTS in (("large", 8192), ("huge", 1)):
        forget_launches(triton_launch)
        for case in all_cases():
            results[f"{size} {case}"] = whole_distances(case, inputs(case), triton_launch)
    results["beyond 32 bits"] = {"y": beyond_32_bits(Path(sys.argv[1]))}
    triton_launch.TILE_VALUES, triton_launch.COMBINE_BLOCK = real_size, 2048
    forget_launches(triton_launch)
    case = Case((1, 4, 17, 16, 19), 2, wild=True)
    results["real tiles"] = distances(case, inputs(case), triton_launch, group_means)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
