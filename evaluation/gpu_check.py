"""Measure this machine's GPU within a few minutes and leave one file to paste into a report: tables, then all as JSON.

python -m evaluation.gpu_check [--out check_gpu.md] [--seconds 200]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from evaluation import gpu_kernels
from memory.kernels.gpus import find_gpu
from memory.predict.prediction import GIB, PredictionError, Predictor, fingerprint
from memory.watch.memory_watch import without_triton
from models.lean.norm.operators import uses_triton
from runtime.cli import check_output_file, parser, run, write_output
from runtime.precision import computes_bfloat16
from settings import ConfigError, Problem, Settings, load_settings

ROOT = Path(__file__).resolve().parents[1]
FORMAT = 1
STOCK = [
    "autoencoder.implementation=monai",
    "autoencoder.training.use_gradient_checkpointing=false",
    "autoencoder.training.use_perceptual_loss=false",
]
PLAIN = STOCK[1:]
STEPS: tuple[tuple[str, Any, list[str]], ...] = (
    ("high_res", "autoencoder", []),
    ("high_res", "ldm", []),
    ("default", "autoencoder", []),
    ("default", "ldm", []),
    ("high_res", "autoencoder", PLAIN),
    ("high_res", "autoencoder", STOCK),
    ("balanced", "autoencoder", []),
    ("balanced", "ldm", []),
    *(
        (preset, stage, [])
        for preset in ("quality", "ultra_light", "quickstart", "maisi")
        for stage in ("ldm", "autoencoder")
    ),
)
"""What is measured, in this order, as long as there is time."""
START_SECONDS = 12
"""A step is not begun with less time left than this, which is what its process takes to start."""


@dataclass
class Check:
    """The content of the file, and the time that is left to fill it."""

    content: dict[str, Any]
    end: float
    skipped: list[dict[str, str]] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self.end - time.monotonic()

    def skip(self, what: str, reason: str) -> None:
        """Note why something is not measured, and say so."""
        self.skipped.append({"what": what, "reason": reason})
        print(f"skipped: {what}: {reason}", flush=True)

    def collect(self, what: str, rows: Iterable[dict[str, Any]], until: float) -> list[dict[str, Any]]:
        """Return the rows that could be measured before `until`."""
        found: list[dict[str, Any]] = []
        try:
            for row in rows:
                found.append(row)
                if time.monotonic() > until:
                    self.skip(what, f"no time left after {len(found)} rows")
                    break
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self.skip(what, str(error).partition("\n")[0])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return found


def machine(device: torch.device) -> dict[str, Any]:
    """Return what a report needs to know of the machine."""
    gpu = torch.cuda.get_device_properties(device)
    has_triton = uses_triton(device)
    return {
        "gpu": gpu.name,
        "memory_bytes": gpu.total_memory,
        "compute_capability": [gpu.major, gpu.minor],
        "multiprocessors": gpu.multi_processor_count,
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": _version("triton"),
        "norms": "triton" if has_triton else "torch",
        "cpu": _cpu(),
        "cpu_cores": os.cpu_count(),
        "host_memory_bytes": psutil.virtual_memory().total,
    }


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    return next(iter(done.stdout.split()), "") if done.returncode == 0 else ""


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def measure_steps(check: Check, coming: dict[int, Any]) -> None:
    """Measure the steps that fit the card while there is time."""
    room, card = check.content["machine"]["memory_bytes"], find_gpu(check.content["machine"]["gpu"])
    check.content["steps"], check.content["profile"] = [], {}
    for number, (preset, stage, overrides) in enumerate(STEPS):
        what = step_name(preset, stage, overrides)
        if check.left < START_SECONDS:
            check.skip(what, "no time left")
            continue
        settings = settings_of(preset, stage, overrides)
        try:
            prediction = coming[number].result(timeout=check.left)
        except (PredictionError, TimeoutError) as error:
            check.skip(what, f"no prediction ({str(error) or 'no time left'})")
            continue
        if prediction.required_with_margin > room:
            needed = f"{prediction.required_with_margin / GIB:.1f} GiB"
            check.skip(what, f"may need {needed}; this GPU has {room / GIB:.1f}")
            continue
        print(f"measuring {what}", flush=True)
        found, problem = _in_process(settings, stage, check.left)
        if found is None:
            check.skip(what, problem)
            continue
        profile = found.pop("profile")
        if profile and not check.content["profile"]:
            check.content["profile"] = {"preset": preset, "stage": stage, "rows": profile}
        check.content["steps"].append(
            {
                "preset": preset,
                "stage": stage,
                "overrides": overrides,
                "config": fingerprint(settings, stage),
                "tier": prediction.tier,
                **found,
                "predicted_peak_allocated_bytes": prediction.peak_allocated_bytes,
                "predicted_peak_reserved_bytes": prediction.peak_reserved_bytes,
                "predicted_required_bytes": prediction.required_bytes,
                "predicted_seconds": None if card is None else prediction.seconds_per_step(card),
                "kernels": prediction.kernels,
            }
        )


def step_name(preset: str, stage: str, overrides: list[str]) -> str:
    """Return what the tables call a step."""
    variant = {0: "", len(PLAIN): ", plain", len(STOCK): ", stock MONAI"}[len(overrides)]
    return f"{preset}, {stage}{variant}"


def settings_of(preset: str, stage: Any, overrides: list[str]) -> Settings:
    """Return the settings of a step."""
    return load_settings(ROOT / "configs" / f"{preset}.yaml", overrides, stage=stage)


def _in_process(settings: Settings, stage: str, seconds: float) -> tuple[dict[str, Any] | None, str]:
    """Return what a process of its own measured, whose memory nothing else shares; or None and the reason."""
    request = {"settings": settings.model_dump(mode="json"), "stage": stage, "seconds": min(20.0, seconds / 2)}
    command = [sys.executable, "-m", "evaluation.gpu_step"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, input=json.dumps(request), capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"not done within the {seconds:.0f} s that were left"
    if done.returncode:
        return None, next(iter(done.stderr.strip().splitlines()[-1:]), "its process failed without a word")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, ""


def as_text(content: dict[str, Any]) -> str:
    """Return the file: tables for people, then everything as JSON."""
    return "\n".join([*_tables(content), "", "```json", json.dumps(content), "```", ""])


def _tables(content: dict[str, Any]) -> Iterator[str]:
    m = content["machine"]
    capability = ".".join(map(str, m["compute_capability"]))
    yield f"# {m['gpu']}, {m['memory_bytes'] / GIB:.1f} GiB, compute capability {capability}"
    yield ""
    yield (
        f"Driver {m['driver'] or 'unknown'}, torch {m['torch']}, CUDA {m['cuda']}, cuDNN {m['cudnn']}, "
        f"Triton {m['triton'] or 'missing'} (norms by {m['norms']}); {m['cpu']}, {m['cpu_cores']} cores. "
        f"Measured in {content['seconds']:.0f} s."
    )
    b = content["basics"]
    if b:
        products = ", ".join(f"{name} {value:.1f}" for name, value in b["matmul_tflops"].items())
        yield (
            f"Copies {b['copy_gbs']:.0f} GB/s, to the host {b['to_host_gbs']:.1f}, from it {b['to_device_gbs']:.1f}; "
            f"a launch {1e6 * b['launch_seconds']:.1f} us; matrix products in TFLOPS: {products}."
        )
    yield from _table(
        ("step", "seconds", "predicted", "host CPU s", "device s", "first peak GiB", "peak GiB", "predicted GiB"),
        [
            (
                step_name(s["preset"], s["stage"], s["overrides"]),
                *(_number(s[key]) for key in ("seconds", "predicted_seconds", "host_cpu_seconds", "device_seconds")),
                *(_number(s.get(f"{key}peak_reserved_bytes"), 1 / GIB) for key in ("first_", "", "predicted_")),
            )
            for s in content["steps"]
        ],
    )
    passes = ("forward", "data_gradient", "weight_gradient")
    yield from _table(
        ("convolution, TFLOPS", "forward", "data gradient", "weight gradient"),
        [
            (
                f"{c['channels']} channels, {c['dtype']}, {c['layout']}",
                *(_number(c["flops"] / c[f"{name}_seconds"], 1e-12) for name in passes),
            )
            for c in content["convolutions"]
        ],
    )
    yield from _table(
        ("attention", "kernel", "forward s", "backward s"),
        [
            (
                f"{a['tokens']} tokens, {a['dtype']}",
                a["kernel"],
                *(_number(a[f"{k}_seconds"]) for k in ("forward", "backward")),
            )
            for a in content["attention"]
        ],
    )
    yield from _table(
        ("norm, GB/s", "forward", "backward"),
        [
            (
                f"{'x'.join(map(str, n['shape'][1:]))}, {n['dtype']}, {n['layout']}",
                *(_number(n[f"{k}_bytes"] / n[f"{k}_seconds"], 1e-9) for k in ("forward", "backward")),
            )
            for n in content["norms"]
        ],
    )
    profile = content["profile"]
    if profile:
        yield from _table(
            (f"kernel of {profile['preset']}, {profile['stage']}", "calls", "ms"),
            [(r["name"][:80], str(r["calls"]), _number(r["device_seconds"], 1e3)) for r in profile["rows"]],
        )
    yield from _table(("skipped", "why"), [(s["what"], s["reason"]) for s in content["skipped"]])


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; no rows, no lines."""
    if rows:
        yield ""
        for line in (header, ("---", *["---:"] * (len(header) - 1)), *rows):
            yield f"| {' | '.join(cell.replace('|', '/') for cell in line)} |"


def _number(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.4g}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python -m evaluation.gpu_check --out check_gpu.md"])
    result.add_argument("--out", metavar="FILE", default="check_gpu.md", help="file to write; default: check_gpu.md")
    result.add_argument("--seconds", type=float, default=200.0, help="how long it may take; default: 200")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Measure, and write the file."""
    check_output_file(options.out, "--out", [])
    if not torch.cuda.is_available():
        raise ConfigError([Problem("device", "no CUDA device", "", "run this on a machine with a GPU")])
    start, device = time.monotonic(), torch.device("cuda", 0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    halves = ("bfloat16", "float16") if computes_bfloat16(device) else ("float16",)
    content: dict[str, Any] = {"format": FORMAT, "machine": machine(device), "basics": {}}
    check = Check(content, start + options.seconds)
    with Predictor(without_triton=without_triton(device)) as predictor:
        # Predictions need the CPU only, and are made while the kernels are measured.
        coming = {
            number: predictor.submit(settings_of(preset, stage, overrides), stage)
            for number, (preset, stage, overrides) in enumerate(STEPS)
        }
        half = start + options.seconds / 3
        print("measuring copies, convolutions, attention and norms", flush=True)
        content["basics"] = next(
            iter(check.collect("copies and products", iter([gpu_kernels.basics(device)]), half)), {}
        )
        content["attention"] = check.collect("attention", gpu_kernels.attention(device, halves), half)
        content["convolutions"] = check.collect("convolutions", gpu_kernels.convolutions(device), half)
        content["norms"] = check.collect("norms", gpu_kernels.norms(device, halves), half)
        measure_steps(check, coming)
    content["skipped"], content["seconds"] = check.skipped, time.monotonic() - start
    write_output(options.out, as_text(content))
    print("\n".join(_tables(content)))
    print(f"\n{options.out}: this file is all that a report needs")
    return 0


if __name__ == "__main__":
    sys.exit(run(main, parse()))
