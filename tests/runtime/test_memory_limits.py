"""What a process may take is limited by its cgroups and those around them, of either version."""

import psutil
import pytest

from runtime import host_memory
from runtime.host_memory import available_host_bytes
from runtime.observer import memory_observer

V2 = ("memory.max", "memory.current", "inactive_file 300\nactive_file 5")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "inactive_file 0\ntotal_inactive_file 300")


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Write groups, {folder: (limit, use)}, and what the process belongs to."""
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "MEMBERSHIP", tmp_path / "membership")

    def write(membership, groups, names):
        (tmp_path / "membership").write_text(membership)
        for folder, values in groups.items():
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            for name, value in zip((*names[:2], "memory.stat"), (*values, names[2]), strict=True):
                (tmp_path / folder / name).write_text(f"{value}\n")

    return write


@pytest.mark.parametrize(
    ("membership", "root", "names"),
    [("0::/job/step\n", "", V2), ("5:cpu:/job\n4:memory:/job/step\n0::/\n", "memory/", V1)],
)
@pytest.mark.parametrize(
    ("of_job", "of_step", "left"),
    [((5000, 2000), (4000, 1000), 3300), ((4000, 2000), (9000, 1000), 2300), ((1000, 2000), (9000, 1000), 0)],
)
def test_the_narrowest_group_limits_what_is_free(cgroups, membership, root, names, of_job, of_step, left):
    cgroups(membership, {f"{root}job": of_job, f"{root}job/step": of_step}, names)
    assert available_host_bytes() == left
    assert memory_observer().free_host_bytes() == left


def test_a_container_sees_its_own_group_as_the_root(cgroups):
    cgroups("4:memory:/docker/0123\n", {"memory": (4000, 1000)}, V1)
    assert available_host_bytes() == 3300


@pytest.mark.parametrize(("membership", "limit"), [("0::/job\n", "max"), ("", 0), ("0::/job\n", "")])
def test_without_a_limit_all_that_is_free_may_be_taken(cgroups, membership, limit, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 123456}))
    cgroups(membership, {"job": (limit, 1000)}, V2)
    assert available_host_bytes() == 123456
