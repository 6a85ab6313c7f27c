"""Which device a run gets, and that a GPU which cannot be used is named."""

from __future__ import annotations

import pytest
import torch

from runtime.processes import choose_device, unsupported
from settings import ConfigError, DeviceSettings

WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 3), (12, 0), (12, 1), (13, 0)])
def test_a_build_serves_later_minor_versions_and_what_its_portable_code_reaches(capability):
    assert unsupported(capability, WHEEL) == ""


def test_a_gpu_without_kernels_is_named_with_what_the_build_has():
    assert unsupported((6, 1), WHEEL).startswith("compute capability 6.1, for which this torch has no kernels (it has")
    assert unsupported((11, 0), ["sm_90", "sm_100"]) != ""
    # sm_90a is code for exactly one version.
    assert unsupported((9, 1), ["sm_90a"]) != ""
    assert unsupported((9, 0), ["sm_90a"]) == ""


@pytest.fixture
def cuda_build(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.cuda, "init", init)


def test_a_cuda_build_that_finds_no_gpu_says_why_and_what_to_install(cuda_build, caplog):
    assert choose_device(DeviceSettings(type="auto")).type == "cpu"
    assert "training runs on the CPU: this torch is built for CUDA 13.0" in caplog.text
    assert "(The NVIDIA driver on your system is too old (found version 11040))" in caplog.text
    assert "install torch and torchvision" in caplog.text


@pytest.mark.parametrize("asked", [{"type": "cpu"}, {"type": "auto", "hidden": True}])
def test_nothing_is_said_where_the_cpu_was_asked_for(cuda_build, caplog, monkeypatch, asked):
    if asked.pop("hidden", False):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device(DeviceSettings(**asked)).type == "cpu"
    assert "training runs on the CPU" not in caplog.text


def test_a_card_that_the_build_has_no_kernels_for_is_refused_before_the_first_kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GTX 1080")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: WHEEL)
    with pytest.raises(ConfigError, match=r"GTX 1080, compute capability 6\.1, for which this torch has no kernels"):
        choose_device(DeviceSettings(type="auto"))
