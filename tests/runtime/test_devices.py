"""Which device a run gets, in which precision and layout it computes, and what its libraries may keep."""

from __future__ import annotations

import contextlib
import logging
import os

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models import build_autoencoder
from runtime.precision import CUBLAS_WORKSPACE, ONEDNN_LIMIT, Precision, cublas_bytes, limit_cublas, move
from runtime.processes import choose_device, unsupported
from settings import ConfigError, DeviceSettings, validate

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(("amp_dtype", "dtype"), [("auto", None), ("bfloat16", torch.bfloat16)])
def test_on_a_cpu_mixed_precision_is_float32_unless_a_type_is_named(amp_dtype, dtype):
    assert Precision(DeviceSettings(type="cpu", mixed_precision=True, amp_dtype=amp_dtype), CPU).dtype == dtype


@pytest.mark.parametrize(
    ("amp_dtype", "said", "limit"),
    [("auto", "on a CPU training runs in float32", "AVX512_CORE_BF16"), ("float16", "16 bits are many times", "AVX2")],
)
def test_a_cpu_says_once_in_which_precision_it_trains(amp_dtype, said, limit, caplog, monkeypatch):
    monkeypatch.setenv(ONEDNN_LIMIT, "")
    with caplog.at_level(logging.INFO):
        choose_device(DeviceSettings(type="cpu", mixed_precision=True, amp_dtype=amp_dtype))
    assert caplog.text.count(said) == 1
    assert os.environ[ONEDNN_LIMIT] == limit


WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 3), (12, 0), (12, 1), (13, 0)])
def test_a_build_serves_later_minor_versions_and_what_its_portable_code_reaches(capability):
    assert unsupported(capability, WHEEL) == ""
    assert unsupported((6, 1), WHEEL).startswith("compute capability 6.1, for which this torch has no kernels (it has")
    assert unsupported((11, 0), ["sm_90", "sm_100"]) != ""
    # sm_90a is code for exactly one version.
    assert [unsupported((9, minor), ["sm_90a"]) == "" for minor in (0, 1)] == [True, False]


def test_a_cuda_build_that_finds_no_gpu_says_why_and_what_to_install_unless_the_cpu_was_asked_for(monkeypatch, caplog):
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert choose_device(DeviceSettings(type="cpu")).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device(DeviceSettings(type="auto")).type == "cpu"
    assert "training runs on the CPU" not in caplog.text
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert choose_device(DeviceSettings(type="auto")).type == "cpu"
    assert "training runs on the CPU: this torch is built for CUDA 13.0" in caplog.text
    assert "(The NVIDIA driver on your system is too old (found version 11040))" in caplog.text
    assert "install torch and torchvision" in caplog.text
    with pytest.raises(ConfigError, match=r"device.type: cuda for local rank 0, and torch sees \d GPUs; set device"):
        choose_device(DeviceSettings(type="cuda"))


@pytest.fixture
def card(monkeypatch):
    """Let torch see one GPU of a compute capability."""

    def seen(capability: tuple[int, int]) -> None:
        answers = {"is_available": True, "device_count": 1, "get_device_name": "RTX", "get_arch_list": WHEEL}
        for name, value in {**answers, "get_device_capability": capability}.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)

    return seen


def test_a_card_that_the_build_has_no_kernels_for_is_refused_before_the_first_kernel(card):
    card((6, 1))
    with pytest.raises(ConfigError, match=r"RTX, compute capability 6\.1, for which this torch has no kernels"):
        choose_device(DeviceSettings(type="auto"))


@pytest.mark.parametrize(("capability", "refused"), [((7, 5), True), ((8, 0), False)])
def test_a_gpu_limits_cublas_and_is_refused_bfloat16_if_it_has_no_attention_for_it(
    monkeypatch, card, capability, refused
):
    card(capability)
    monkeypatch.setenv(CUBLAS_WORKSPACE, MONAIS)
    choose_device(DeviceSettings(type="cpu"))
    assert os.environ[CUBLAS_WORKSPACE] == MONAIS
    assert choose_device(DeviceSettings(type="auto")).type == "cuda"
    assert os.environ[CUBLAS_WORKSPACE] == SMALL
    asked = DeviceSettings(type="auto", mixed_precision=True, amp_dtype="bfloat16")
    expected = pytest.raises(ConfigError, match=r"device\.amp_dtype: bfloat16 on RTX, .*; set auto, which chooses")
    with expected if refused else contextlib.nullcontext():
        choose_device(asked)


MONAIS, SMALL, SMALL_BYTES = ":4096:8", ":4096:2:16:8", (4096 * 2 + 16 * 8) * 1024


@pytest.mark.parametrize(
    ("found", "used", "nbytes"),
    [
        ("", SMALL, SMALL_BYTES),
        (MONAIS, SMALL, SMALL_BYTES),
        (":16:8", ":16:8", 128 * 1024),
        (":4096:2:16:4", ":4096:2:16:4", 8256 * 1024),
        (":0:0", ":0:0", 0),
        ("large", "large", SMALL_BYTES),  # a text without sizes means torch's own choice
    ],
)
def test_workspaces_of_cublas_are_small_in_place_of_monais_and_stay_if_the_user_chose_them(
    monkeypatch, found, used, nbytes
):
    monkeypatch.setenv(CUBLAS_WORKSPACE, found)
    limit_cublas()
    assert os.environ[CUBLAS_WORKSPACE] == used
    assert cublas_bytes() == nbytes


def test_a_network_moves_with_its_buffers_and_a_fake_one_stays():
    network = nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2))
    assert move(network, META) is network
    assert {tensor.device for tensor in (*network.parameters(), *network.buffers())} == {META}
    with FakeTensorMode():
        fake = nn.Linear(3, 3)
        weight = fake.weight
        assert move(fake, CPU).weight is weight


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("implementation", ["lean", "monai"])
@pytest.mark.parametrize("memory_format", ["auto", "contiguous", "channels_last"])
def test_a_network_gets_the_memory_format_of_the_settings(memory_format, implementation, fake):
    shape = {"num_channels": [8], "norm_num_groups": 4, "attention_levels": [False], "implementation": implementation}
    with FakeTensorMode() if fake else contextlib.nullcontext():
        network = move(build_autoencoder(validate({"autoencoder": shape}).autoencoder), CPU, memory_format)
        weight = network.encoder.blocks[1].conv1.conv.weight
    last = memory_format == "channels_last" or (memory_format == "auto" and implementation == "lean")
    assert weight.is_contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)


def test_cuda_uses_tf32_and_its_fastest_algorithms():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    try:
        Precision(DeviceSettings(), CPU)
        assert (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32) == (True, True, True)
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before
