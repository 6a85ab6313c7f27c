"""Peak memory and operations of one whole training step on a GPU, predicted on fake tensors, as a document."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from evaluation.benchmarks.variants import STOCK, VARIANTS, base_settings, use_matrix_attention
from memory.predict import Predictor
from memory.predict.prediction import GIB
from settings import Settings

REFERENCE = "3d_ldm-style loop, fp32"
Row = dict[str, Any]


def measure_peaks(grids: Sequence[tuple[int, ...]], progress: Callable[[str], None]) -> list[Row]:
    """Return peak bytes and FLOPs by grid and variant."""
    rows = []
    for grid in grids:
        settings = base_settings(grid)
        with Predictor() as predictor, fresh_processes() as processes:
            asked: dict[str, Future[Any]] = {REFERENCE: processes.submit(track_reference, settings)}
            for variant in VARIANTS:
                changed = settings.with_overrides(variant.changes)
                asked[variant.name] = (
                    processes.submit(_track_matrix, changed)
                    if variant.has_matrix
                    else predictor.submit(changed, "autoencoder")
                )
            for name, future in asked.items():
                answer = future.result()
                values = answer if isinstance(answer, dict) else answer.to_json()
                figures = {key: values[key] for key in ("peak_allocated_bytes", "host_bytes")}
                is_ours = any(variant.is_ours for variant in VARIANTS if variant.name == name)
                total = values["flops"]["total"]
                rows.append({"grid": list(grid), "variant": name, "is_ours": is_ours, **figures, "flops": total})
                progress(f"{name}, {_grid(rows[-1])}")
    return rows


def fresh_processes() -> ProcessPoolExecutor:
    """Return processes for what no config can express: a prediction installs autocast rules that stay."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)


def _track_matrix(settings: Settings) -> Row:
    """Track the step that training makes, with MONAI's default attention."""
    from memory.predict.step import build_step, track_step

    def build(*question: Any) -> Any:
        step = build_step(*question)
        use_matrix_attention(step.networks_on_device["autoencoder"])
        return step

    return _tracked(track_step(settings, "autoencoder", build=build))


def track_reference(settings: Settings) -> Row:
    """Track one step of the 3d_ldm-style loop; a first step makes the optimizers' states."""
    import torch

    from evaluation.benchmarks.reference_loop import ReferenceLoop
    from memory.predict.emulation import measure_peak

    def run(tracker: Any) -> None:
        loop = ReferenceLoop(settings)
        for network in (loop.autoencoder, loop.discriminator):
            tracker.adopt([*network.parameters(), *network.buffers()], "parameters")
        images = torch.zeros(1, 1, *settings.training_grid)
        loop.step(images)
        tracker.reset()
        loop.step(images)

    return _tracked(measure_peak(run))


def _tracked(tracker: Any) -> Row:
    from memory.predict.records import total_flops

    total = total_flops(tracker.flops)
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
        "Memory is predicted, tensor by tensor, for a GPU; no GPU was used. All rows but the 3d_ldm-style loop make "
        "the same step and optimise the same objective: L1 + KL + 0.01 times the least-squares adversarial loss of the "
        "raw logits for the autoencoder, the mean of the two least-squares losses for the discriminator. The tutorial "
        "that the loop follows optimises the same terms with MONAI's LeakyReLU between logits and squares, and the "
        "discriminator's loss times 0.01. Neither side has a perceptual term.",
        "",
        "## Peak memory of one training step, GiB",
        "",
        "Under bf16 autocast, except the first row. Autoencoder [16, 32, 64] with attention at the lowest level, "
        f"discriminator, both Adam optimizers, batch 1; tensors only. Compute is relative to {STOCK} at {shown}.",
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
