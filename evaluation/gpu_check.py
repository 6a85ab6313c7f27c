"""Measure this machine's GPU within a few minutes and leave one file to paste into a report: tables, then all as JSON.

python -m evaluation.gpu_check [--out check_gpu.md] [--seconds 160]

Kernels have a third of the time, full steps of the presets the rest. Both go from small to large, and what is left out
for want of time or memory is noted. The file is written after each part, so that it is there however this ends.
`memory/watch/calibration.py` reads the machine and the steps back.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer

from memory.kernels.gpus import find_gpu
from memory.predict.prediction import GIB, Prediction, Predictor, Stage, fingerprint, fullest_step
from memory.watch.memory_watch import without_triton
from models.lean import native
from models.lean.layout import CHANNELS_LAST, CONTIGUOUS
from models.lean.norm import group_norm
from models.lean.norm.operators import uses_triton
from runtime.cli import check_output_file, parser, run, write_output
from runtime.precision import computes_bfloat16
from runtime.processes import processes
from settings import ConfigError, Problem, Settings, load_settings

ROOT = Path(__file__).resolve().parents[1]
FORMAT = 1
PLAIN = ["autoencoder.training.use_gradient_checkpointing=false", "autoencoder.training.use_perceptual_loss=false"]
VARIANTS = {"": [], "plain": PLAIN, "stock MONAI": ["autoencoder.implementation=monai", *PLAIN]}
_STAGES: tuple[Stage, Stage] = ("ldm", "autoencoder")
STEPS = [
    *((preset, stage, "") for preset in ("quickstart", "default", "ultra_light", "high_res") for stage in _STAGES),
    *(("high_res", _STAGES[1], variant) for variant in ("plain", "stock MONAI")),
    *((preset, stage, "") for preset in ("balanced", "maisi", "quality") for stage in _STAGES),
]
"""Preset, stage and variant of the steps that are measured, from small to large, as long as there is time."""
START_SECONDS = 10
"""What building a step and trying convolution kernels takes; with less time left, a step is not begun."""
MOST_UPDATES = 5
UNTIMED_UPDATES = 3
"""Untimed updates: two before the timed ones and one under the profiler."""

LAYOUTS = {"channels_last": CHANNELS_LAST, "contiguous": CONTIGUOUS}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": torch.float32}
ATTENTION = dict(zip(native.ATTENTION, ("flash", "efficient", "cudnn", "flash"), strict=True))
SECONDS_EACH = 0.02


class Check:
    """The content of the file, and the time that is left to fill it."""

    def __init__(self, content: dict[str, Any], seconds: float, out: str | Path) -> None:
        self.content = {**content, "skipped": []}
        self._start, self._seconds, self._out = time.monotonic(), seconds, out

    def left(self, share: float = 1.0) -> float:
        """Return the seconds that are left of a share of the time."""
        return self._start + share * self._seconds - time.monotonic()

    def skip(self, what: str, reason: str) -> None:
        """Note why something is not measured, and say so."""
        self.content["skipped"].append({"what": what, "reason": reason})
        print(f"skipped: {what}: {reason}", flush=True)

    def collect(self, what: str, rows: Iterable[dict[str, Any]], share: float) -> None:
        """Keep the rows that can be measured within a share of the time."""
        print(f"measuring {what}", flush=True)
        found = self.content[what] = []
        try:
            for row in rows:
                found.append(row)
                if self.left(share) < 0:
                    self.skip(what, f"no time left after {len(found)} rows")
                    break
        except RuntimeError as error:  # also out of memory
            self.skip(what, str(error).partition("\n")[0])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.save()

    def save(self) -> None:
        """Write what there is so far."""
        self.content["seconds"] = time.monotonic() - self._start
        write_output(self._out, as_text(self.content))


def machine(device: torch.device) -> dict[str, Any]:
    """Return what a report needs to know of the machine."""
    gpu = torch.cuda.get_device_properties(device)
    smi, cpuinfo = shutil.which("nvidia-smi"), Path("/proc/cpuinfo")
    driver = ""
    if smi is not None:
        asked = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
        driver = next(iter(done.stdout.split()), "") if done.returncode == 0 else ""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    cpus = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "missing"
    return {
        "gpu": gpu.name,
        "memory_bytes": gpu.total_memory,
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton,
        "norms": "triton" if uses_triton(device) else "torch",
        "cpu": next(iter(cpus), platform.processor()),
        "cpu_cores": os.cpu_count(),
    }


def seconds_of(function: Callable[..., Any], *inputs: Any, **options: Any) -> float:
    """Return the time of one call, from several in a row after one that is not counted."""
    timer = Timer("function(*inputs, **options)", globals={"function": function, "inputs": inputs, "options": options})
    return float(timer.blocked_autorange(min_run_time=SECONDS_EACH).mean)


def _passes(out: Tensor, sources: Sequence[Tensor], function: Callable[..., Any], *inputs: Any) -> tuple[float, float]:
    """Return the times of a call without a graph and of the gradients of its output."""
    backward = seconds_of(torch.autograd.grad, out, sources, out.detach(), retain_graph=True)
    with torch.no_grad():
        return seconds_of(function, *inputs), backward


def norms(
    device: torch.device,
    dtypes: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...] = ((64, 64, 64, 16), (16, 128, 128, 64), (24, 128, 128, 64)),
) -> Iterator[dict[str, Any]]:
    """Yield the bandwidth of GroupNorm with SiLU, by the bytes that it must read and write."""
    for shape, dtype, (layout, memory) in product(shapes, dtypes, LAYOUTS.items()):
        norm = nn.GroupNorm(8, shape[0], device=device)
        x = torch.zeros((1, *shape), dtype=DTYPES[dtype], device=device).contiguous(memory_format=memory)
        out = group_norm(x.requires_grad_(), norm, silu=True)
        forward, backward = _passes(out, [x, *norm.parameters()], partial(group_norm, silu=True), x, norm)
        # Forward reads twice and writes once, backward reads four times and writes once.
        found = {"forward_gbs": 3e-9 * x.nbytes / forward, "backward_gbs": 5e-9 * x.nbytes / backward}
        yield {"shape": list(shape), "dtype": dtype, "layout": layout, **found}


class _AttentionKernel(TorchDispatchMode):
    """Notes which kernel of attention ran; "math" builds the matrix of all pairs."""

    name = "math"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = ATTENTION.get(func, self.name)
        return func(*args, **(kwargs or {}))


def attention(device: torch.device, dtypes: tuple[str, ...], tokens: int = 65536) -> Iterator[dict[str, Any]]:
    """Yield the times of attention with a head of 64; raise `RuntimeError` if it needs the matrix of all pairs."""
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    for dtype in dtypes:
        shape = (3, 1, 1, tokens, 64)
        parts = torch.zeros(shape, dtype=DTYPES[dtype], device=device).requires_grad_().unbind()
        with _AttentionKernel() as kernel:
            attend(*(part[:, :, :1024] for part in parts))
        if kernel.name == "math":
            raise RuntimeError(f"attention in {dtype} has no kernel here that does without the matrix of all pairs")
        forward, backward = _passes(attend(*parts), parts, attend, *parts)
        found = {"dtype": dtype, "kernel": kernel.name, "forward_seconds": forward, "backward_seconds": backward}
        yield {"tokens": tokens, **found}


def convolutions(
    device: torch.device, channels: tuple[int, ...] = (16, 24, 32, 64), grid: tuple[int, ...] = (128, 128, 64)
) -> Iterator[dict[str, Any]]:
    """Yield what 3x3x3 convolutions and their two gradients reach, in TFLOPS."""
    for number, (dtype, kind), (layout, memory) in product(channels, DTYPES.items(), LAYOUTS.items()):
        x = torch.zeros((1, number, *grid), dtype=kind, device=device).contiguous(memory_format=memory)
        weight = torch.zeros((number, number, 3, 3, 3), dtype=kind, device=device).contiguous(memory_format=memory)
        backward = partial(native.convolution_backward, padding=(1, 1, 1))
        tera = 2e-12 * 27 * number**2 * x[0, 0].numel()
        yield {
            "channels": number,
            "dtype": dtype,
            "layout": layout,
            "forward_tflops": tera / seconds_of(F.conv3d, x, weight, padding=1),
            "data_gradient_tflops": tera / seconds_of(backward, x, x, weight, (True, False)),
            "weight_gradient_tflops": tera / seconds_of(backward, x, x, weight, (False, True)),
        }


def settings_of(preset: str, stage: Stage, variant: str) -> Settings:
    """Return the settings of a step."""
    return load_settings(ROOT / "configs" / f"{preset}.yaml", VARIANTS[variant], stage=stage)


def measure_steps(check: Check, coming: list[Future[Prediction]]) -> None:
    """Measure the steps that fit the card while there is time, each in a process of its own.

    `coming` are their predictions. The process of the next step does its imports during the one before.
    """
    check.content |= {"steps": [], "profile": []}
    waiting = step_process()
    try:
        for (preset, stage, variant), asked in zip(STEPS, coming, strict=True):
            what = ", ".join(filter(None, (preset, stage, variant)))
            settings = settings_of(preset, stage, variant)
            try:
                predicted = _affordable(check, asked)
                print(f"measuring {what}", flush=True)
                process, waiting = waiting, step_process()
                found = step_result(process, settings, stage, check.left(), min(20.0, check.left() / 2))
            except (RuntimeError, TimeoutError) as error:
                check.skip(what, str(error) or "no time left")
                continue
            check.content["profile"] = found.pop("profile") or check.content["profile"]
            about = {"step": what, "stage": stage, "config": fingerprint(settings, stage)}
            check.content["steps"].append({**about, **found, **predicted})
            check.save()
    finally:
        waiting.kill()
        waiting.communicate()


def _affordable(check: Check, asked: Future[Prediction]) -> dict[str, Any]:
    """Return what was predicted; raise `RuntimeError` if that needs more memory or time than there is."""
    room, card = check.content["machine"]["memory_bytes"], find_gpu(check.content["machine"]["gpu"])
    prediction = asked.result(timeout=max(0.0, check.left()))
    seconds = None if card is None else prediction.seconds_per_step(card)
    needed = START_SECONDS + (UNTIMED_UPDATES + 1) * (seconds or 0.0)
    if prediction.required_with_margin > room:
        raise RuntimeError(f"may need {prediction.required_with_margin / GIB:.1f} GiB of {room / GIB:.1f}")
    if needed > check.left():
        raise RuntimeError(f"may take {needed:.0f} s of the {max(0.0, check.left()):.0f} that are left")
    return {
        "tier": prediction.tier,
        "predicted_seconds": seconds,
        "predicted_peak_allocated_bytes": prediction.peak_allocated_bytes,
        "predicted_peak_reserved_bytes": prediction.peak_reserved_bytes,
        "predicted_required_bytes": prediction.required_bytes,
        "kernels": prediction.kernels,
    }


def step_process() -> subprocess.Popen[str]:
    """Start a process that measures one step and waits for the question; nothing else shares its memory."""
    command = [sys.executable, "-c", "from evaluation.gpu_check import answer; answer()"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def step_result(
    process: subprocess.Popen[str], settings: Settings, stage: str, limit: float, timed: float
) -> dict[str, Any]:
    """Return what a process measured, updates timed for `timed` seconds; raise `RuntimeError` past `limit` seconds."""
    question = {"settings": settings.model_dump(mode="json"), "stage": stage, "seconds": timed}
    try:
        out, errors = process.communicate(json.dumps(question), timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise RuntimeError(f"not done within the {limit:.0f} s that were left") from None
    if process.returncode:
        raise RuntimeError(next(iter(errors.strip().splitlines()[-1:]), "its process failed without a word"))
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def answer() -> None:
    """Read a question from standard input, and print what the step takes as JSON."""
    import memory.predict.step  # noqa: F401  its imports are slow, and done before the question comes

    question = json.loads(sys.stdin.read())
    settings = Settings.model_validate(question["settings"])
    print(json.dumps(measured(settings, question["stage"], question["seconds"])))


def measured(settings: Settings, stage: Stage, seconds: float) -> dict[str, Any]:
    """Return what updates of a stage take; as many as fit into `seconds` are timed, at least one."""
    from memory.predict.step import build_step

    start = time.perf_counter()
    with processes(settings) as process:
        device = process.device
        step = build_step(settings, stage, device)
        first, training = fullest_step(settings, stage), step.training
        example, per_step = step.example_batch(training.batch_size), training.gradient_accumulation_steps
        example = example.pin_memory() if device.type == "cuda" else example
        finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None

        def update(number: int) -> tuple[float, float]:
            micro_batches = []
            for micro_batch in range(per_step):
                begin = (number * per_step + micro_batch) * training.batch_size
                micro_batches.append(replace(example, positions=tuple(range(begin, begin + training.batch_size))))
            finish()
            wall, cpu = time.perf_counter(), time.process_time()
            step(micro_batches, number)
            cpu = time.process_time() - cpu  # before the wait, in which the host may spin
            finish()
            return time.perf_counter() - wall, cpu

        def peaks(prefix: str = "") -> dict[str, int]:
            if device.type != "cuda":
                return {}
            most = (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved)
            found = {f"{prefix}peak_{of.__name__.split('_')[-1]}_bytes": of(device) for of in most}
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            return found

        update(first)
        result: dict[str, Any] = peaks("first_")
        update(first + 1)  # with the states of the optimizer
        times = [update(first + 2)]
        while len(times) < MOST_UPDATES and time.perf_counter() - start < seconds:
            times.append(update(first + 2 + len(times)))
        result |= peaks()
        with torch.profiler.profile() as profiler:
            update(first + 2 + len(times))
        # Operators of the host repeat the time of the kernels that they launch.
        kernels = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
        rows = sorted(((k.self_device_time_total / 1e6, k.count, k.key) for k in kernels), reverse=True)
        return result | {
            "seconds": statistics.median(wall for wall, _ in times),
            "host_cpu_seconds": statistics.median(cpu for _, cpu in times),
            "device_seconds": sum(row[0] for row in rows) or None,
            "updates": len(times),
            "precision": step.precision.name,
            "profile": [{"name": name, "calls": n, "device_seconds": took} for took, n, name in rows[:20]],
        }


def as_text(content: dict[str, Any]) -> str:
    """Return the file: a table for each part, with bytes in GiB, then everything as JSON."""
    lines = [f"# {content['machine']['gpu']}"]
    for part, value in content.items():
        rows = [value] if isinstance(value, dict) else value
        if isinstance(rows, list) and rows:
            lines += ["", f"## {part}", ""]
            for row in ([*rows[0]], ["---"] * len(rows[0]), *([*row.items()] for row in rows)):
                lines.append(f"| {' | '.join(cell if isinstance(cell, str) else _cell(*cell) for cell in row)} |")
    return "\n".join([*lines, "", "```json", json.dumps(content), "```", ""])


def _cell(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        value = f"{value / GIB:.4g} GiB"
    text = f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
    return text.replace("|", "/")[:80]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python -m evaluation.gpu_check --out check_gpu.md"])
    result.add_argument("--out", metavar="FILE", default="check_gpu.md", help="file to write; default: check_gpu.md")
    result.add_argument("--seconds", type=float, default=160.0, help="how long it may take; default: 160")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Measure, and write the file."""
    check_output_file(options.out, "--out", [])
    if not torch.cuda.is_available():
        raise ConfigError([Problem("device", "no CUDA device", "", "run this on a machine with a GPU")])
    device = torch.device("cuda", 0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    halves = ("bfloat16", "float16") if computes_bfloat16(device) else ("float16",)
    check = Check({"format": FORMAT, "machine": machine(device)}, options.seconds, options.out)
    with Predictor(2, without_triton=without_triton(device)) as predictor:
        # Predictions need the CPU only, and are made while the kernels are measured.
        coming = [predictor.submit(settings_of(*step), step[1]) for step in STEPS]
        kernels = {"norms": norms(device, halves), "attention": attention(device, halves)}
        for what, rows in {**kernels, "convolutions": convolutions(device)}.items():
            check.collect(what, rows, share=1 / 3)
        measure_steps(check, coming)
    check.save()
    print(f"\n{options.out}: this file is all that a report needs")
    return 0


if __name__ == "__main__":
    sys.exit(run(main, parse()))
