"""Our step beside stock MONAI, with our knobs added one at a time: peak memory and operations.

Each is tracked on fake tensors, as it would run on a GPU.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from memory.predict import Predictor
from memory.predict.prediction import GIB, Stage
from settings import Settings

Row = dict[str, Any]
STAGE: Stage = "autoencoder"
MATRIX, STOCK = "stock MONAI, default attention", "stock MONAI, SDPA"
"""The first stores the N x N matrix of attention, as MONAI does unless it is told otherwise."""
STOCK_CHECKPOINTED = f"{STOCK}, use_checkpoint"
_TRAINING = "autoencoder.training"
_STOCK = {"autoencoder.implementation": "monai", f"{_TRAINING}.use_gradient_checkpointing": False}
_LEAN = {**_STOCK, "autoencoder.implementation": "lean"}
_CHECKPOINTED = {f"{_TRAINING}.use_gradient_checkpointing": True}
_SLABS = {**_LEAN, **_CHECKPOINTED, f"{_TRAINING}.slab_rows": 8}
_OFFLOAD = {f"{_TRAINING}.use_gradient_checkpointing_offload": True, f"{_TRAINING}.use_nested_checkpointing": False}
VARIANTS: dict[str, dict[str, Any]] = {
    MATRIX: _STOCK,
    STOCK: _STOCK,
    STOCK_CHECKPOINTED: {**_STOCK, **_CHECKPOINTED},
    "ours, lean blocks": _LEAN,
    "ours, checkpointing": {**_LEAN, **_CHECKPOINTED},
    "ours, nested, slabs of 8": _SLABS,
    "ours, offload, slabs of 8": {**_SLABS, **_OFFLOAD},
}
"""Ways to make the same step: what they change in its settings."""


def measure_peaks(grids: Sequence[tuple[int, ...]], progress: Callable[[str], None]) -> list[Row]:
    """Return peak bytes and FLOPs by grid and variant."""
    # A prediction installs autocast rules that stay, and no config has MONAI's default attention.
    fresh = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    rows = []
    with Predictor() as predictor, fresh as processes:
        for grid in grids:
            changed = {name: base_settings(grid).with_overrides(changes) for name, changes in VARIANTS.items()}
            asked: dict[str, Future[Any]] = {MATRIX: processes.submit(track_matrix, changed.pop(MATRIX))}
            asked |= {name: predictor.submit(one, STAGE) for name, one in changed.items()}
            for name, future in asked.items():
                values = future.result() if name == MATRIX else future.result().to_json()
                figures = {key: values[key] for key in ("peak_allocated_bytes", "host_bytes")}
                figures["flops"] = values["flops"]["total"]
                rows.append({"grid": list(grid), "variant": name, "is_ours": name.startswith("ours"), **figures})
                progress(f"{name}, {_grid(rows[-1])}")
    return rows


def track_matrix(settings: Settings) -> Row:
    """Track the step that training makes, with MONAI's default attention."""
    from memory.predict.step import build_step, tracked_step

    def build(*question: Any) -> Any:
        step = build_step(*question)
        modules: Any = step.networks_on_device["autoencoder"].modules()
        blocks = [module for module in modules if hasattr(module, "use_flash_attention")]
        assert blocks, "there is no attention to switch"
        for block in blocks:
            block.use_flash_attention = False
        return step

    with tracked_step(settings, STAGE, build=build) as (_, tracker):
        total = tracker.flops.total() - tracker.flops["attention"]  # which is in the others, too
    return {"peak_allocated_bytes": tracker.peak["device"], "host_bytes": 0, "flops": {"total": total}}


def document_text(rows: Sequence[Row]) -> str:
    """Return benchmarks.md."""
    by_variant: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], {})[_grid(row)] = row
    heads = list(by_variant[STOCK])
    shown = heads[min(2, len(heads) - 1)]
    stock = by_variant[STOCK][shown]
    lines = [
        "# Benchmarks",
        "",
        "Written by `python scripts/benchmark.py`; `docs/benchmarks.json` has the figures that its `--json` writes. "
        "Memory is predicted, tensor by tensor, for a GPU; no GPU was used. All rows make the same step and optimise "
        "the same objective: L1 + KL + 0.01 times the least-squares adversarial loss of the raw logits for the "
        "autoencoder, the mean of the two least-squares losses for the discriminator. Neither side has a perceptual "
        "term.",
        "",
        "## Peak memory of one training step, GiB",
        "",
        "Under bf16 autocast. Autoencoder [16, 32, 64] with attention at the lowest level, discriminator, both Adam "
        f"optimizers, batch 1; tensors only. Compute is relative to {STOCK} at {shown}.",
        "",
        f"| | {' | '.join(heads)} | compute |",
        "|---|" + "---:|" * (len(heads) + 1),
    ]
    for name, by_grid in by_variant.items():
        cells = [f"{row['peak_allocated_bytes'] / GIB:.2f}" for row in by_grid.values()]
        bold = f"**{name}**" if by_grid[shown]["is_ours"] else name
        lines.append(f"| {' | '.join([bold, *cells])} | {by_grid[shown]['flops'] / stock['flops']:.2f}x |")
    ranked = sorted((by_grid[shown] for by_grid in by_variant.values()), key=lambda row: row["peak_allocated_bytes"])
    ours, rival = (next(row for row in ranked if row["is_ours"] == is_ours) for is_ours in (True, False))
    factors = [f"{row['peak_allocated_bytes'] / ours['peak_allocated_bytes']:.1f}" for row in (rival, stock)]
    verdict = (
        f"At {shown} our leanest step needs {factors[0]} times less than the leanest of the others "
        f"({rival['variant']}) and {factors[1]} times less than {STOCK}."
    )
    return "\n".join([*lines, "", verdict]) + "\n"


def _grid(row: Row) -> str:
    return "x".join(map(str, row["grid"]))


def base_settings(grid: tuple[int, ...]) -> Settings:
    """Return the step that all variants make: combination A of the memory guide, on a given grid."""
    training = {
        "batch_size": 1,
        "gradient_accumulation_steps": 1,
        "use_perceptual_loss": False,
        "optimizer": "adam",
        "adversarial_start_step": 0,
        "discriminator": {"num_layers_d": 2, "num_channels": 16},
    }
    autoencoder = {"num_channels": (16, 32, 64), "norm_num_groups": 8, "attention_levels": [False, False, True]}
    values = {"name": "benchmark", "data": {"voxel_size": grid}, "autoencoder": {**autoencoder, "training": training}}
    return Settings.model_validate({**values, "device": {"mixed_precision": True}})
