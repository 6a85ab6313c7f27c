"""Which precision a device computes in, and what it says about that."""

import logging
import os

import pytest
import torch

from runtime.precision import ONEDNN_LIMIT, Precision
from runtime.processes import choose_device
from settings import DeviceSettings

CPU = torch.device("cpu")


@pytest.mark.parametrize(("amp_dtype", "dtype"), [("auto", None), ("bfloat16", torch.bfloat16)])
def test_on_a_cpu_mixed_precision_is_float32_unless_a_type_is_named(amp_dtype, dtype):
    assert Precision(DeviceSettings(type="cpu", mixed_precision=True, amp_dtype=amp_dtype), CPU).dtype == dtype


@pytest.mark.parametrize(
    ("amp_dtype", "said", "limit"),
    [("auto", "on a CPU training runs in float32", "AVX512_CORE_BF16"), ("float16", "float16 is many times", "AVX2")],
)
def test_a_cpu_says_once_in_which_precision_it_trains(amp_dtype, said, limit, caplog, monkeypatch):
    monkeypatch.setenv(ONEDNN_LIMIT, "")
    with caplog.at_level(logging.INFO):
        choose_device(DeviceSettings(type="cpu", mixed_precision=True, amp_dtype=amp_dtype))
    assert caplog.text.count(said) == 1
    assert os.environ[ONEDNN_LIMIT] == limit
