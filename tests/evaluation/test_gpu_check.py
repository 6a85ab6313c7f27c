"""The file that `scripts/check_gpu.sh` leaves, from parts that are measured on CPU tensors here."""

from __future__ import annotations

import json
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from evaluation import gpu_check
from memory.watch.calibration import CheckedGpu
from settings import Settings

CPU = torch.device("cpu")
MACHINE = {"gpu": "RTX 4090", "memory_bytes": 8 << 30, "torch": "2", "cudnn": 9}


def kernels() -> dict[str, list[dict[str, Any]]]:
    return {
        "norms": list(gpu_check.norms(CPU, ("bfloat16",), ((8, 4, 4, 4),))),
        "attention": list(gpu_check.attention(CPU, ("bfloat16",), tokens=1100)),
        "convolutions": list(gpu_check.convolutions(CPU, (2,), (4, 4, 4))),
    }


def prediction(gib: float = 1.0, seconds: float = 0.1) -> Future[Any]:
    values = {name: round(gib * 2**30) for name in ("peak_allocated_bytes", "peak_reserved_bytes", "required_bytes")}
    future: Future[Any] = Future()
    more = {"required_with_margin": gib * 2**30, "tier": "plain", "kernels": 9}
    future.set_result(SimpleNamespace(**values, **more, seconds_per_step=lambda card: seconds))
    return future


def test_kernels_are_measured_in_every_dtype_and_layout_and_attention_names_its_kernel():
    found = kernels()
    kinds = {(row["dtype"], row["layout"]) for row in found["convolutions"]}
    assert kinds == {(dtype, layout) for dtype in gpu_check.DTYPES for layout in gpu_check.LAYOUTS}
    assert found["attention"][0]["kernel"] == "flash"
    values = [entry for rows in found.values() for row in rows for entry in row.items()]
    assert all(value > 0 for name, value in values if name.endswith(("_seconds", "_gbs", "_tflops")))
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match="matrix of all pairs"):
        list(gpu_check.attention(CPU, ("bfloat16",), tokens=1100))


@pytest.mark.parametrize("stage", ["autoencoder", "ldm"])
def test_a_step_is_timed_and_profiled(tiny_values, stage):
    tiny_values["device"] = {"type": "cpu"}
    found = gpu_check.measured(Settings.model_validate(tiny_values), stage, seconds=0)
    assert (found["updates"], found["precision"]) == (1, "float32")
    assert min(found["seconds"], found["host_cpu_seconds"]) > 0
    assert found["device_seconds"] is None, "a CPU has no kernels of a GPU"


def test_what_fits_is_measured_the_rest_is_named_and_the_file_can_be_read_back(tmp_path, monkeypatch, capsys):
    out = tmp_path / "check_gpu.md"
    check = gpu_check.Check({"format": gpu_check.FORMAT, "machine": MACHINE}, 60, out)
    monkeypatch.setattr(gpu_check, "STEPS", [("default", "ldm", variant) for variant in ("", "plain", "stock MONAI")])
    measured = {"seconds": 1.5, "device_seconds": None, "peak_allocated_bytes": 1 << 30, "profile": [{"name": "a|b"}]}
    monkeypatch.setattr(gpu_check, "step_result", lambda *asked: dict(measured))
    gpu_check.measure_steps(check, [prediction(), prediction(gib=11.2), prediction(seconds=40)])

    def rows():
        yield {"number": 1}
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")

    check.collect("attention", rows(), share=1)
    check.collect("norms", iter([{"number": 1}, {"number": 2}]), share=0)
    assert check.content["attention"] == check.content["norms"] == [{"number": 1}]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped")]
    assert said[:3:2] == [
        "skipped: default, ldm, plain: may need 11.2 GiB of 8.0",
        "skipped: attention: CUDA out of memory",
    ]
    assert said[1].startswith("skipped: default, ldm, stock MONAI: may take 170 s of the ")
    assert said[3] == "skipped: norms: no time left after 1 rows"

    text = out.read_text()
    assert "| default, ldm | ldm |" in text
    assert "| a/b |" in text
    stored = json.loads(text.partition("```json\n")[2].partition("\n```")[0])
    assert stored == check.content
    (step,) = CheckedGpu.model_validate(stored).steps
    assert (step.seconds, step.predicted_seconds, step.predicted_peak_allocated_bytes) == (1.5, 0.1, 1 << 30)


def test_a_process_that_fails_or_takes_too_long_is_a_reason(tiny_values):
    settings = Settings.model_validate(tiny_values)
    with pytest.raises(RuntimeError, match="not done within the 0 s that were left"):
        gpu_check.step_result(gpu_check.step_process(), settings, "ldm", 0, 0)
    with pytest.raises(RuntimeError, match=r"nonsense"):
        gpu_check.step_result(gpu_check.step_process(), settings, "nonsense", 100, 0)


def test_every_step_that_is_measured_has_a_config():
    assert all(gpu_check.settings_of(*step) for step in gpu_check.STEPS)
    assert {preset for preset, *_ in gpu_check.STEPS} == {p.stem for p in (gpu_check.ROOT / "configs").glob("*.yaml")}
