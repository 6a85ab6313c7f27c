"""The file that `scripts/check_gpu.sh` leaves, from parts that are measured on CPU tensors here."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from evaluation import gpu_check, gpu_kernels
from evaluation.gpu_step import measured
from settings import Settings

CPU = torch.device("cpu")


def kernels() -> dict[str, Any]:
    return {
        "basics": gpu_kernels.basics(CPU, num_bytes=1 << 12, size=16),
        "convolutions": list(gpu_kernels.convolutions(CPU, (2,), (4, 4, 4))),
        "attention": list(gpu_kernels.attention(CPU, ("bfloat16",), tokens=1100)),
        "norms": list(gpu_kernels.norms(CPU, ("bfloat16",), ((8, (4, 4, 4)),))),
    }


def test_kernels_are_measured_in_every_dtype_and_layout():
    found = kernels()
    kinds = {(row["dtype"], row["layout"]) for row in found["convolutions"]}
    assert kinds == {(dtype, layout) for dtype in gpu_kernels.DTYPES for layout in gpu_kernels.LAYOUTS}
    assert found["convolutions"][0]["flops"] == 2 * 27 * 2 * 2 * 64
    (attention,) = found["attention"]
    assert attention["kernel"] == "flash"
    assert found["norms"][0]["forward_bytes"] == 3 * 8 * 64 * 2
    seconds = [value for rows in found.values() if isinstance(rows, list) for row in rows for value in row.items()]
    assert all(value > 0 for name, value in seconds if name.endswith("_seconds"))


def test_attention_that_would_need_all_pairs_is_refused():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match="matrix of all pairs"):
        list(gpu_kernels.attention(CPU, ("bfloat16",), tokens=1100))


@pytest.mark.parametrize("stage", ["autoencoder", "ldm"])
def test_a_step_is_timed_and_profiled(tiny_values, stage):
    tiny_values["device"] = {"type": "cpu"}
    found = measured(Settings.model_validate(tiny_values), stage, seconds=0)
    assert found["updates"] == 1
    assert found["seconds"] > 0
    assert found["host_cpu_seconds"] > 0
    assert found["device_seconds"] is None, "a CPU has no kernels of a GPU"
    assert found["precision"] == "float32"


STEP = {
    "preset": "high_res", "stage": "autoencoder", "overrides": [], "seconds": 1.5, "predicted_seconds": None,
    "host_cpu_seconds": 0.1, "device_seconds": 1.4, "first_peak_reserved_bytes": 3 << 30,
    "peak_reserved_bytes": 2 << 30, "predicted_peak_reserved_bytes": 2 << 30,
}  # fmt: skip


def test_the_file_has_tables_and_can_be_read_back():
    machine = {
        "gpu": "RTX", "memory_bytes": 8 << 30, "compute_capability": [8, 6], "driver": "", "torch": "2", "cuda": "13",
        "cudnn": 9, "triton": "", "norms": "torch", "cpu": "CPU", "cpu_cores": 2,
    }  # fmt: skip
    content = {
        "format": 1, "machine": machine, **kernels(), "steps": [STEP], "seconds": 12.0,
        "profile": {**STEP, "rows": [{"name": "a|b", "calls": 2, "device_seconds": 0.5}]},
        "skipped": [{"what": "high_res, stock MONAI", "reason": "may need 11.2 GiB; this GPU has 8.0"}],
    }  # fmt: skip
    lines = gpu_check.as_text(content).splitlines()
    assert "| high_res, autoencoder | 1.5 | - | 0.1 | 1.4 | 3 | 2 | 2 |" in lines
    assert "| a/b | 2 | 500 |" in lines
    assert "| high_res, stock MONAI | may need 11.2 GiB; this GPU has 8.0 |" in lines
    start = lines.index("```json")
    assert json.loads("\n".join(lines[start + 1 : lines.index("```", start)])) == content


def test_what_fails_or_has_no_time_left_is_skipped_with_a_line(capsys):
    check = gpu_check.Check({}, time.monotonic() + 60)

    def rows():
        yield {"number": 1}
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")

    assert check.collect("attention", rows(), check.end) == [{"number": 1}]
    assert check.collect("norms", iter([{"number": 1}, {"number": 2}]), time.monotonic()) == [{"number": 1}]
    reasons = ["CUDA out of memory", "no time left after 1 rows"]
    assert [entry["reason"] for entry in check.skipped] == reasons
    assert capsys.readouterr().out.splitlines() == [
        f"skipped: {what}: {reason}" for what, reason in zip(("attention", "norms"), reasons, strict=True)
    ]


def test_every_step_that_is_measured_has_a_config():
    for preset, stage, overrides in gpu_check.STEPS:
        assert gpu_check.settings_of(preset, stage, overrides)
        assert gpu_check.step_name(preset, stage, overrides)
    assert {preset for preset, *_ in gpu_check.STEPS} == {
        path.stem for path in (gpu_check.ROOT / "configs").glob("*.yaml")
    }
