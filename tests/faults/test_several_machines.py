"""Two machines, as network namespaces joined by a virtual cable: a cut cable or a lost machine costs no step."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.conftest import NUM_STEPS, adopt_stage_one
from tests.faults.runs import free_port, losses

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
QUICK = "last_call_timeout=2,read_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3"


class Host:
    """A network namespace with one end of the cable, kept alive by a process that sleeps."""

    def __init__(self, keeper: subprocess.Popen[str], address: str) -> None:
        self.keeper, self.address = keeper, address

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs another one on this host."""
        return ["nsenter", f"--target={self.keeper.pid}", "--user", "--net", "--preserve-credentials", *command]

    def ip(self, *arguments: str) -> None:
        """Configure the host's network."""
        subprocess.run(self.inside("ip", *arguments), check=True, capture_output=True, text=True)

    def kill(self) -> None:
        """Kill every process on this host except the one that keeps it alive."""
        network = os.readlink(f"/proc/{self.keeper.pid}/ns/net")
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                is_here = entry.name.isdecimal() and os.readlink(entry / "ns" / "net") == network
                if is_here and int(entry.name) != self.keeper.pid:
                    os.kill(int(entry.name), signal.SIGKILL)

    def torchrun(self, folder: Path, log: str, port: int, nodes: str, *script: str | Path) -> subprocess.Popen[str]:
        """Start a script through torchrun for a number of hosts, such as 2 or 1:2; the store is that of the first."""
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc_per_node=1"),
            *("--max-restarts=2", "--rdzv_backend=c10d", f"--rdzv_endpoint={ADDRESSES[0]}:{port}", "--rdzv_id=run"),
            f"--rdzv_conf={QUICK},is_host={int(self.address == ADDRESSES[0])}",
            *(f"--local_addr={self.address}", *map(str, script)),
        ]
        # With torchrun's own store (torch 2.13.0) a host that joins later waits for an address that nobody publishes.
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "cable"}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **own}
        with (folder / log).open("w") as output:
            return subprocess.Popen(
                self.inside(*command), cwd=folder, stdout=output, stderr=output, env=environment,
                text=True,
            )  # fmt: skip


def _keep(command: list[str]) -> subprocess.Popen[str]:
    """Start a process that enters new namespaces and then sleeps."""
    keeper = subprocess.Popen(
        [*command, "sh", "-c", "echo ready; exec sleep 600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert keeper.stdout is not None
    if keeper.stdout.readline() != "ready\n":
        said = keeper.communicate()[1].strip()
        pytest.skip(f"network namespaces are forbidden here: {said}")
    return keeper


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts whose interface `cable` is the cable between them."""
    keepers: list[subprocess.Popen[str]] = []
    try:
        keepers.append(_keep(["unshare", "--user", "--map-root-user", "--net"]))
        first = Host(keepers[0], ADDRESSES[0])
        keepers.append(_keep(first.inside("unshare", "--net")))
        second = Host(keepers[1], ADDRESSES[1])
        first.ip("link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(second.keeper.pid))
        for host in (first, second):
            host.ip("address", "add", f"{host.address}/24", "dev", "cable")
            host.ip("link", "set", "lo", "up")
            host.ip("link", "set", "cable", "up")
        yield first, second
        for host in (first, second):
            host.kill()
    except FileNotFoundError as error:
        pytest.skip(f"network namespaces need a program that is missing: {error.filename}")
    finally:
        for keeper in reversed(keepers):
            keeper.kill()
            keeper.wait()


def _wait(condition: Callable[[], Any], folder: Path, what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path}:\n{path.read_text()}" for path in sorted(folder.glob("*.log")))
            raise AssertionError(f"{what} did not happen within {seconds} seconds\n{logs}")
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "fault"), [("autoencoder", "cut"), ("ldm", "kill")])
def test_a_lost_host_costs_no_step_and_may_join_again(undisturbed, tmp_path, hosts, stage, fault):
    (tmp_path / "tiny.yaml").write_text((undisturbed / "tiny.yaml").read_text())
    if stage == "ldm":
        adopt_stage_one(undisturbed, tmp_path)
    first, second = hosts
    port = free_port()
    script = (ROOT / "tests/faults/train_on_two_hosts.py", ROOT / f"train_{stage}.py", "--config", "tiny.yaml")
    command = ("1:2", *script, f"{stage}.training.gradient_accumulation_steps=1")
    launchers = [host.torchrun(tmp_path, f"host_{number}.log", port, *command) for number, host in enumerate(hosts)]
    _wait((tmp_path / "inside_step").exists, tmp_path, "step 4 on both hosts")

    if fault == "cut":
        first.ip("link", "set", "cable", "down")
    else:
        second.kill()
    (tmp_path / "go_on").touch()
    begun = time.monotonic()
    said = (tmp_path / "host_0.log").read_text
    _wait(lambda: "so that an update on 1 ranks has as many volumes" in said(), tmp_path, "a restart alone")
    assert time.monotonic() - begun < 150, "nobody waits for much longer than the time-out of 30 seconds"

    # The launcher on the lost host waits for the store until TCP gives up, so it is started anew.
    second.kill()
    first.ip("link", "set", "cable", "up")
    launchers[1] = second.torchrun(tmp_path, "host_1_again.log", port, *command)
    _wait(lambda: all(launcher.poll() is not None for launcher in launchers), tmp_path, "the end of the run")
    assert [launcher.returncode for launcher in launchers] == [0, 0], said()
    assert "in use by another process" not in said()

    term = {"autoencoder": "reconstruction", "ldm": "diffusion"}[stage]
    expected = losses(undisturbed, stage, term)
    assert len(expected) == NUM_STEPS
    torch.testing.assert_close(losses(tmp_path, stage, term), expected, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_quickstart_on_two_hosts_has_the_losses_of_one_process(tmp_path, hosts):
    """The commands of scripts/quickstart.sh, with fewer volumes and updates."""
    sizes = {"autoencoder": 1, "ldm": 4}
    keys = ("max_steps=4", "log_every=1", "validate_every=4", "save_every=4")
    shorter = ["--config", str(ROOT / "configs/quickstart.yaml"), "name=tiny", "data.source=phantoms:24"]
    shorter += [f"{stage}.training.{key}" for stage, n in sizes.items() for key in (f"batch_size={n}", *keys)]
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for stage in sizes:
        script, accumulate = ROOT / f"train_{stage}.py", f"{stage}.training.gradient_accumulation_steps=2"
        subprocess.run([sys.executable, script, *shorter, accumulate], cwd=alone, env=environment, check=True)
        port = free_port()
        launchers = [
            host.torchrun(together, f"{stage}_{number}.log", port, "2", script, *shorter)
            for number, host in enumerate(hosts)
        ]
        codes = [launcher.wait(600) for launcher in launchers]
        assert codes == [0, 0], (together / f"{stage}_0.log").read_text()
        term = {"autoencoder": "reconstruction", "ldm": "diffusion"}[stage]
        expected = losses(alone, stage, term)
        assert len(expected) == 4
        torch.testing.assert_close(losses(together, stage, term), expected, rtol=1e-5, atol=0)
    sample = [sys.executable, str(ROOT / "scripts/sample.py"), "--run", "runs/tiny", "--num", "2", "--out", "samples"]
    for folder in (alone, together):
        subprocess.run(sample, cwd=folder, env=environment, check=True)
        assert len(list((folder / "samples").glob("*.nii.gz"))) == 2
