"""The workspaces of cuBLAS: small, unless the user says otherwise."""

import os

import pytest
import torch

from runtime.cublas import limit_workspaces, workspace_bytes, workspace_config
from runtime.processes import choose_device
from settings import DeviceSettings

NAME = "CUBLAS_WORKSPACE_CONFIG"
MONAIS, SMALL = ":4096:8", ":4096:2:16:8"


@pytest.mark.parametrize("found", [None, "", MONAIS])
def test_workspaces_are_small_in_place_of_monais(monkeypatch, found):
    monkeypatch.delenv(NAME, raising=False) if found is None else monkeypatch.setenv(NAME, found)
    assert workspace_bytes() == (4096 * 2 + 16 * 8) * 1024
    limit_workspaces()
    assert os.environ[NAME] == workspace_config() == SMALL


@pytest.mark.parametrize(("chosen", "kib"), [(":16:8", 128), (":4096:1", 4096), (":4096:2:16:4", 8256), (":0:0", 0)])
def test_workspaces_that_the_user_chose_stay(monkeypatch, chosen, kib):
    monkeypatch.setenv(NAME, chosen)
    limit_workspaces()
    assert os.environ[NAME] == chosen
    assert workspace_bytes() == kib * 1024


def test_a_text_without_sizes_means_torchs_own_choice(monkeypatch):
    monkeypatch.setenv(NAME, "large")
    assert workspace_bytes() == (4096 * 2 + 16 * 8) * 1024


def test_choosing_a_gpu_limits_the_workspaces(monkeypatch):
    monkeypatch.setenv(NAME, MONAIS)
    choose_device(DeviceSettings(type="cpu", mixed_precision=False))
    assert os.environ[NAME] == MONAIS
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    choose_device(DeviceSettings(type="cuda"))
    assert os.environ[NAME] == SMALL
