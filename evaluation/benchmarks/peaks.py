"""Peak memory of one whole training step on a GPU, predicted on fake tensors: every variant, every grid.

As a program (`python -m evaluation.benchmarks.peaks`) it predicts one variant that no config can express, in a process
of its own, because the prediction installs autocast rules that cannot be removed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evaluation.benchmarks.variants import Variant, base_settings, variants
from memory.predict import Predictor
from settings import Settings

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "3d_ldm-style loop, fp32"
Row = dict[str, Any]


def measure_peaks(grids: Sequence[tuple[int, ...]], progress: Callable[[str], None]) -> list[Row]:
    """Return peak bytes and FLOPs by grid and variant."""
    rows: list[Row] = []
    with Predictor() as predictor, ThreadPoolExecutor(1) as beside:
        asked: list[tuple[tuple[int, ...], Variant, Future[Any]]] = []
        for grid in grids:
            settings = base_settings(grid, mixed_precision=True)
            asked.append((grid, Variant(REFERENCE, False), beside.submit(_ask, "loop", settings)))
            for variant in variants():
                asked.append((grid, variant, _submit(variant, settings, predictor, beside)))
        for grid, variant, future in asked:
            answer = future.result()
            values = answer if isinstance(answer, dict) else answer.to_json()
            rows.append(
                {
                    "grid": list(grid),
                    "variant": variant.name,
                    "is_ours": variant.is_ours,
                    "peak_allocated_bytes": values["peak_allocated_bytes"],
                    "host_bytes": values["host_bytes"],
                    "flops": values["flops"]["total"],
                }
            )
            progress(f"{variant.name}, {'x'.join(map(str, grid))}")
    return rows


def predict_variants(settings: Settings, progress: Callable[[str], None]) -> dict[str, int]:
    """Return the peak bytes of each variant's step by name."""
    with Predictor() as predictor, ThreadPoolExecutor(1) as beside:
        asked = {variant.name: _submit(variant, settings, predictor, beside) for variant in variants()}
        peaks = {}
        for name, future in asked.items():
            answer = future.result()
            peaks[name] = answer["peak_allocated_bytes"] if isinstance(answer, dict) else answer.peak_allocated_bytes
            progress(f"{name}, peak")
    return peaks


def _submit(variant: Variant, settings: Settings, predictor: Predictor, beside: ThreadPoolExecutor) -> Future[Any]:
    changed = settings.with_overrides(variant.changes)
    if variant.has_matrix:
        return beside.submit(default_attention_peak, changed)
    return predictor.submit(changed, "autoencoder")


def default_attention_peak(settings: Settings) -> dict[str, Any]:
    """Return peak and FLOPs of the step with MONAI's default attention, the N x N matrix."""
    return _ask("matrix", settings)


def _ask(kind: str, settings: Settings) -> dict[str, Any]:
    question = json.dumps({"kind": kind, "settings": settings.model_dump(mode="json")})
    done = subprocess.run(
        [sys.executable, "-m", "evaluation.benchmarks.peaks"],
        cwd=ROOT,
        input=question,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, f"the predicting process ended with code {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Predict the variant described by the JSON on standard input, and print the result as JSON."""
    question = json.loads(sys.stdin.read())
    settings = Settings.model_validate(question["settings"])
    tracker = _matrix_step(settings) if question["kind"] == "matrix" else _reference_step(settings)
    peak = {"peak_allocated_bytes": tracker.peak["device"], "host_bytes": 0, "flops": {"total": tracker.flops.total}}
    print(json.dumps(peak))


def _matrix_step(settings: Settings) -> Any:
    """Track the same step as training makes, with MONAI's default attention."""
    from evaluation.benchmarks.variants import use_matrix_attention
    from memory.predict.step import build_step, track_step

    return track_step(settings, "autoencoder", build=lambda *question: use_matrix_attention(build_step(*question)))


def _reference_step(settings: Settings) -> Any:
    """Track one step of the 3d_ldm-style loop; a first step makes the optimizers' states."""
    import torch

    from evaluation.benchmarks.reference_loop import ReferenceLoop
    from memory.predict.emulation import measure_peak

    def run(tracker: Any) -> None:
        # Fused, because the other forms read the step counter, which has no value in a fake tensor.
        loop = ReferenceLoop(settings, learning_rate=1e-4, kl_weight=1e-7, fused=True)
        for network in (loop.autoencoder, loop.discriminator):
            tracker.adopt([*network.parameters(), *network.buffers()], "parameters")
        images = torch.zeros(1, 1, *settings.training_grid)
        loop.step(images, is_adversarial=True)
        tracker.reset()
        loop.step(images, is_adversarial=True)

    return measure_peak(run)


if __name__ == "__main__":
    main()
