"""Write docs/memory_guide.md: every memory technique with its rule of thumb and its predicted effect."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memory.predict.prediction import GIB
from runtime.cli import parser, run
from settings import ConfigError, Settings, load_settings

if TYPE_CHECKING:
    from scripts.dev.guide.techniques import Changes, Point, Technique

ROOT = Path(__file__).resolve().parents[2]
COMBINATIONS = {
    "high_res": ("A", "10 to 14 GB, for 24 GB"),
    "balanced": ("B", "18 to 22 GB, for 32 GB"),
    "quality": ("C, with checkpointing", "for 40 GB and more"),
    "default": ("64^3 preset", "about 8 GB, 5 with mixed precision"),
    "ultra_light": ("ultra light", "6 to 9 GB"),
    "maisi": ("MAISI's networks", "none"),
}
PLAIN = {
    "autoencoder.training.use_gradient_checkpointing": False,
    "autoencoder.training.perceptual.chunk_size": 8,
}
"""What turns `quality` into combination C as the rules of thumb have it, pasted into the defaults."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "", ["python scripts/dev/memory_guide.py", "python scripts/dev/memory_guide.py --out guide.md"]
    )
    result.add_argument("--out", default=str(ROOT / "docs" / "memory_guide.md"), metavar="FILE", help="the document")
    result.add_argument("--quick", action="store_true", help="a 32x32x16 grid, as a smoke test")
    result.add_argument(
        "--stored", action="store_true", help="reuse docs/predictions.json, for changes of wording only"
    )
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Predict everything, then write the document and, with its figures, what was predicted."""
    from tqdm import tqdm

    from scripts.dev.guide.stored import RecordingPredictor, StoredPredictor, question, write

    if options.stored and options.quick:
        raise ConfigError(
            "--stored: found with --quick; allowed: one of them; the stored figures are of the whole grid"
        )
    predictor = StoredPredictor("guide") if options.stored else RecordingPredictor(2)
    with predictor, tqdm(desc="predicting", unit="config", disable=options.quiet) as bar:
        ask = Asker(predictor, bar)
        text = document(ask, (32, 32, 16) if options.quick else None)
    Path(options.out).write_text(text, encoding="utf-8")
    if isinstance(predictor, RecordingPredictor) and not options.quick:
        matrices = {question(s, "autoencoder", has_matrix=True): answer for s, answer in ask.matrices}
        write("guide", {**predictor.answers, **matrices})
    print(options.out)
    return 0


def document(ask: Asker, grid: tuple[int, ...] | None = None) -> str:
    """Return the guide, with the figures that `ask` gives."""
    from scripts.dev.guide.catalogue import CATALOGUE
    from scripts.dev.guide.techniques import RULES_ORDER, SAME_FIRST, base_settings

    base = base_settings()
    if grid is not None:
        base = base.with_overrides({"data.voxel_size": grid})
    first = ask.all(base, _cumulative(SAME_FIRST))
    second = ask.all(base, _cumulative(RULES_ORDER))
    techniques = [ask.all(base, technique.points, technique.stage) for technique in CATALOGUE]
    presets = {name: load_settings(ROOT / "configs" / f"{name}.yaml") for name in COMBINATIONS}
    combined = {name: ask(preset) for name, preset in presets.items()}
    plain = ask(presets["quality"].with_overrides(PLAIN))
    lines = [
        *_INTRODUCTION,
        *_cumulative_table("The ladder, the same mathematics first", SAME_FIRST, [a.result() for a in first]),
        *_cumulative_table(
            "For comparison: the order of the rules of thumb", RULES_ORDER, [a.result() for a in second]
        ),
        *_combinations({name: answer.result() for name, answer in combined.items()}, plain.result(), presets),
        "## One technique at a time",
        "",
    ]
    for technique, answers in zip(CATALOGUE, techniques, strict=True):
        lines += _technique(technique, [answer.result() for answer in answers])
    lines += _host_memory() + _times(ROOT / "docs" / "benchmarks.json")
    return "\n".join(lines).rstrip() + "\n"


class Asker:
    """Asks for each config once, however many tables show it; `bar` counts the answers."""

    def __init__(self, predictor: Any, bar: Any) -> None:
        self._predictor, self._bar = predictor, bar
        self._asked: dict[tuple[str, str], Any] = {}
        self.matrices: list[tuple[Settings, dict[str, Any]]] = []

    def __call__(self, settings: Settings, stage: str = "autoencoder") -> Any:
        """Return the future answer to one config."""
        key = (stage, settings.model_dump_json())
        if key not in self._asked:
            self._asked[key] = self._predictor.submit(settings, stage)
            if self._bar is not None:
                self._asked[key].add_done_callback(lambda _: self._bar.update(1))
        return self._asked[key]

    def all(self, base: Settings, points: tuple[Point, ...], stage: str = "autoencoder") -> list[Any]:
        """Return the future answers to the points of a table."""
        answers = []
        for point in points:
            settings = base.with_overrides(_fitting(point.changes, base))
            answers.append(self._matrix(settings) if point.has_matrix else self(settings, stage))
        return answers

    def _matrix(self, settings: Settings) -> Any:
        from concurrent.futures import Future
        from types import SimpleNamespace

        from evaluation.benchmarks.measurements import default_attention_peak
        from scripts.dev.guide.stored import StoredPredictor, question

        if isinstance(self._predictor, StoredPredictor):
            return self._predictor.find(question(settings, "autoencoder", has_matrix=True))
        values = default_attention_peak(settings)
        self.matrices.append((settings, values))
        answer: Future[Any] = Future()
        answer.set_result(SimpleNamespace(**values))
        return answer


def _fitting(changes: Changes, base: Settings) -> Changes:
    """Return changes that a small grid also takes."""
    rows = base.training_grid[0] // 2
    limited = dict(changes)
    if limited.get("autoencoder.training.slab_rows", 0) > rows:
        limited["autoencoder.training.slab_rows"] = rows
    return limited


def _cumulative(points: tuple[Point, ...]) -> tuple[Point, ...]:
    from scripts.dev.guide.techniques import Point

    changes: Changes = {}
    result = []
    for point in points:
        changes = {**changes, **point.changes}
        result.append(Point(point.name, changes))
    return tuple(result)


_INTRODUCTION = [
    "# Memory guide",
    "",
    "Written by `python scripts/dev/memory_guide.py`; do not edit by hand.",
    "",
    "What each knob does to one training step at 256x256x64. Every figure is a prediction: the real training step runs",
    "on tensors without data, under the rules of CUDA autocast, and each tensor is followed until its release.",
    "The peak covers tensors and the workspaces of cuDNN and cuBLAS, but not the CUDA context (0.5 GiB is assumed",
    "elsewhere). Nothing was measured on a GPU; [prediction.md](prediction.md) compares predictions with figures that",
    "others have published. Compute counts convolutions, matrix products and attention.",
    "",
    "**Same mathematics** knobs leave every gradient unchanged up to rounding, and may change when a run resumes.",
    "**Different mathematics** knobs change what is learned.",
    "",
    "When a step does not fit, in this order: mixed precision and lean blocks, which the other sections assume; a",
    "smaller batch with more accumulation; checkpointing; slabs; offload; then what changes the mathematics, with the",
    "grid last. For your own config and GPU:",
    "`python scripts/oom_ladder.py --config configs/high_res.yaml --budget-gb 8`.",
    "",
]


def _cumulative_table(title: str, points: tuple[Point, ...], answers: list[Any]) -> list[str]:
    lines = [
        f"## {title}",
        "",
        "Cumulative: each row keeps the changes of the rows above it.",
        "",
        "| knob | peak GiB | change | reserved GiB, default / expandable | host GiB | compute | peak in |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for number, (point, answer) in enumerate(zip(points, answers, strict=True)):
        before = answers[max(0, number - 1)].peak_allocated_bytes
        change = f"{answer.peak_allocated_bytes / before - 1:+.0%}" if number else ""
        lines.append(
            f"| {point.name} | {answer.peak_allocated_bytes / GIB:.2f} | {change} | "
            f"{answer.peak_reserved_default_bytes / GIB:.2f} / {answer.peak_reserved_expandable_bytes / GIB:.2f} | "
            f"{answer.host_bytes / GIB:.2f} | {_compute(answer, answers[0])} | {answer.phase} |"
        )
    return [*lines, ""]


def _compute(answer: Any, base: Any) -> str:
    return f"{answer.flops['total'] / max(1, base.flops['total']):.2f}x"


def _combinations(answers: dict[str, Any], plain: Any, presets: dict[str, Settings]) -> list[str]:
    """Return the table of the combinations; `plain` is the answer to combination C without checkpointing."""
    from memory.kernels.gpus import check_gpu
    from scripts.dev.guide.stored import StoredPredictor
    from scripts.dev.preset_table import GPU

    stored, card = StoredPredictor("presets"), check_gpu(GPU)
    lines = [
        "## The combinations",
        "",
        "A, B and C are what rules of thumb recommend for GPUs of 24, 32, and 40 GB and more: A has narrow networks",
        "and recomputes to save memory, B recomputes nothing, C has the widest networks and more attention.",
        "Needed is what the whole run of stage 1 reserves, with the CUDA context. Hours are lower bounds for both",
        f"stages on {card.name}.",
        "",
        "| config | combination | rule of thumb | grid | peak GiB | needed GiB | hours, stage 1 + stage 2 |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for name, (letter, rule) in COMBINATIONS.items():
        grid = "x".join(map(str, presets[name].training_grid))
        stages = [stored.submit(presets[name], stage).result() for stage in ("autoencoder", "ldm")]
        hours = " + ".join(f"{stage.hours(card):.1f}" for stage in stages)
        rows = [(f"`configs/{name}.yaml`", letter, answers[name], hours)]
        if name == "quality":
            rows.append(("as pasted from the rules of thumb", "C, without checkpointing", plain, ""))
        for config, title, answer, time in rows:
            sizes = f"{answer.peak_allocated_bytes / GIB:.2f} | {answer.required_bytes / GIB:.2f}"
            lines.append(f"| {config} | {title} | {rule} | {grid} | {sizes} | {time} |")
    return [*lines, ""]


def _technique(technique: Technique, answers: list[Any]) -> list[str]:
    lines = [
        f"### {technique.title}",
        "",
        f"{technique.keys} ({technique.promise})",
        "",
        f"Rule of thumb: {technique.rule}.",
        "",
        "| config | peak GiB | against the first row | host GiB | compute |",
        "|---|---:|---:|---:|---:|",
    ]
    for point, answer in zip(technique.points, answers, strict=True):
        share = answer.peak_allocated_bytes / answers[0].peak_allocated_bytes - 1
        change = "" if answer is answers[0] else f"{share:+.0%}"
        lines.append(
            f"| {point.name} | {answer.peak_allocated_bytes / GIB:.2f} | {change} | "
            f"{answer.host_bytes / GIB:.2f} | {_compute(answer, answers[0])} |"
        )
    return [*lines, "", f"When: {technique.when}", ""]


def _host_memory() -> list[str]:
    """Return the techniques that no prediction of the device can show."""
    mib = 256 * 256 * 64 * 4 / (1 << 20)
    return [
        "## Host memory and the allocator",
        "",
        "**`data.prepared`** (rule of thumb: `cache_rate: 0`, which is read too). Each volume is resampled to the "
        f"grid once. With `disk` it stays as a file, {mib:.0f} MiB for 256x256x64 in float32, which all workers, "
        "processes, runs and both stages read through a memory map: the system's file cache holds it while memory is "
        "free, and gives the memory back when something needs it. With `memory` each process holds all its volumes. "
        "Neither uses GPU memory.",
        "",
        "**`data.num_workers`, `data.pin_memory`, `data.persistent_workers`** (rule of thumb: fewer workers, about 2 "
        "GB less). Together the workers hold the micro-batches of one update and one more each, of "
        f"{mib:.0f} MiB times the batch size, besides their own processes. {_workers()}",
        "",
        "**`data.use_augmentation`** (rule of thumb: off while the autoencoder trains). It uses no GPU memory.",
        "",
        "**`device.allocator: expandable_segments:True`** (rule of thumb: less fragmentation). The two tables at the "
        "top replay the step's allocations through both kinds of allocator; the difference is what the setting saves. "
        "Do not combine it with `max_split_size_mb`: blocks above that limit are never split for smaller requests, "
        "which can double what is reserved.",
        "",
        "**`CUBLAS_WORKSPACE_CONFIG`**: cuBLAS keeps a workspace for each thread that multiplies matrices, one in "
        "forward and one in backward. MONAI asks for 32 MiB each. Training replaces that by 8 MiB, but leaves any "
        "other value that you set.",
        "",
        "**`ldm.latents.cache`**: with `disk` or `memory` the encoder uses no GPU memory while stage 2 trains, "
        "and each volume is encoded once.",
        "",
    ]


def _workers() -> str:
    presets = [load_settings(path) for path in sorted((ROOT / "configs").glob("*.yaml"))]
    fixed = [f"`{preset.name}` {preset.data.num_workers}" for preset in presets if preset.data.num_workers != "auto"]
    return (
        "With `auto` the number follows from how long a sample takes, and memory is pinned if there is a GPU; "
        f"presets with a fixed number of workers: {', '.join(fixed) or 'none'}."
    )


def _times(path: Path) -> list[str]:
    """Return the step-time ratios of the benchmark's document; nothing while it has none."""
    rows = json.loads(path.read_text(encoding="utf-8")).get("steps", []) if path.is_file() else []
    if not rows:
        return []
    grid = "x".join(map(str, rows[0]["grid"]))
    lines = [
        "## Time",
        "",
        f"Whole fp32 steps on a CPU at {grid}, interleaved, relative to stock MONAI with SDPA; no GPU was timed.",
        "",
        "| step | time |",
        "|---|---:|",
    ]
    return [*lines, *(f"| {row['variant']} | {row['ratio']:.2f}x |" for row in rows)]


if __name__ == "__main__":
    sys.exit(run(main, parse()))
