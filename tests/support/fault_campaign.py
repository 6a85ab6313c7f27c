"""Kill short runs of both stages again and again and check that nothing is lost.

python tests/support/fault_campaign.py --kills 100
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import os
import platform
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runtime.cli import at_least, check_output_file, parser, run
from settings import UserError
from tests.support.campaign import CONFIG, NUM_STEPS, add_campaign, conclude, num_jobs, write_config
from tests.support.warm_start import PATIENCE_SECONDS, Command, WarmStart

log = logging.getLogger("fault_campaign")

SCRIPTS = {"autoencoder": "train_autoencoder.py", "ldm": "train_ldm.py"}
KILLS_PER_STAGE = 10
START, RUNNING, SAVING = "while starting", "while running", "while saving"
MOMENTS = (START, RUNNING, RUNNING, SAVING, SAVING)
"""Kill times are drawn from these; start-up is rarer, because nothing can be lost there."""


@dataclass
class Tally:
    """What a campaign has seen; the threads of a campaign share one."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    interrupted_saves: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    identical: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_kills(self) -> int:
        """Return how many commands were killed."""
        return self.kills.total()


class Reference:
    """The undisturbed run of both stages, and how many seconds each took to start and to train."""

    def __init__(self, folder: Path, start: WarmStart) -> None:
        self.folder = folder
        self.starting: dict[str, float] = {}
        self.training: dict[str, float] = {}
        folder.mkdir()
        write_config(folder)
        for stage in SCRIPTS:
            self._train(stage, start)

    def _train(self, stage: str, start: WarmStart) -> None:
        began = time.monotonic()
        command = start(self.folder, SCRIPTS[stage], "--config", "campaign.yaml", output=self.folder / f"{stage}.log")
        _until(lambda: command.exit_code is not None or _is_training(command, stage), 0.005)
        self.starting[stage] = time.monotonic() - began
        if command.wait() != 0:
            raise UserError(f"the undisturbed run of stage {stage} failed:\n{command.output}")
        self.training[stage] = time.monotonic() - began - self.starting[stage]


class DisturbedRun:
    """One run of both stages in its own folder, killed several times per stage, then allowed to finish."""

    def __init__(self, folder: Path, reference: Reference, start: WarmStart, tally: Tally, rng: random.Random) -> None:
        self.folder, self.reference, self.start, self.tally, self.rng = folder, reference, start, tally, rng
        folder.mkdir()
        write_config(folder)
        self.checkpoints = folder / "runs" / CONFIG["name"] / "checkpoints"
        self._number = itertools.count()

    def stage(self, stage: str, moments: Sequence[str], num_workers: int, on_kill: Callable[[], Any]) -> None:
        """Train one stage, killing it at these points unless it finishes first; record what went wrong."""
        for moment in moments:
            before = _whole_checkpoints(self.checkpoints, stage)
            command = self._command(stage, num_workers)
            self._wait_for(moment, command, stage)
            command.send(signal.SIGKILL)
            code = command.wait()
            self._check_start(stage, command, before)
            if code == 0:
                break  # it exited before the signal arrived
            if code != -signal.SIGKILL:
                raise UserError(
                    f"{self.folder}: stage {stage} ended with {code} instead of resuming:\n{command.output}"
                )
            self.tally.kills[stage, moment] += 1
            self.tally.interrupted_saves[stage] += bool(list(self.checkpoints.glob(f".{stage}_*.{command.pid}.tmp")))
            self._check_checkpoints(stage, before)
            on_kill()
        before = _whole_checkpoints(self.checkpoints, stage)
        command = self._command(stage, num_workers)
        if (code := command.wait()) != 0:
            raise UserError(f"{self.folder}: stage {stage} ended with {code} when left alone:\n{command.output}")
        self._check_start(stage, command, before)
        self._check_result(stage)

    def _command(self, stage: str, num_workers: int) -> Command:
        output = self.folder / f"{stage}_{next(self._number):03d}.log"
        return self.start(
            self.folder, SCRIPTS[stage], "--config", "campaign.yaml", f"data.num_workers={num_workers}", output=output
        )

    def _wait_for(self, moment: str, command: Command, stage: str) -> None:
        """Wait until a random time of the kind `moment`, or until the command has ended."""
        if moment == START:
            time.sleep(self.rng.uniform(0, self.reference.starting[stage]))
            return
        _until(lambda: command.exit_code is not None or _is_training(command, stage), 0.005)
        time.sleep(self.rng.uniform(0, self.reference.training[stage] / 4))
        if moment == SAVING:
            pattern = f".{stage}_*.{command.pid}.tmp"
            _until(lambda: command.exit_code is not None or any(self.checkpoints.glob(pattern)), 0.0005)
            time.sleep(self.rng.choice([0, self.rng.uniform(0, 0.01)]))

    def _check_start(self, stage: str, command: Command, before: list[int]) -> None:
        """Check that the command resumed from the newest checkpoint, unless it was killed before it could say so."""
        match = re.search(rf"resuming {stage} after step (\d+)", command.output)
        if match is not None:
            self.tally.resumed[stage] += 1
            if int(match[1]) != max(before, default=0):
                self._fail(stage, f"resumed after step {match[1]}, but checkpoints {before} were there")
        elif before and _is_training(command, stage):
            self._fail(stage, "started from scratch despite existing checkpoints")

    def _check_checkpoints(self, stage: str, before: list[int]) -> None:
        """Check that the kill lost no checkpoint, and that none with a final name is damaged."""
        after = _whole_checkpoints(self.checkpoints, stage)
        named = list(self.checkpoints.glob(f"{stage}_step_*.pt"))
        if len(after) != len(named):
            self._fail(stage, f"{len(named) - len(after)} damaged checkpoints under a final name")
        if len(after) < min(len(before), 2) or max(after, default=0) < max(before, default=0):
            self._fail(stage, f"checkpoints {before} before the kill, {after} after it")

    def _check_result(self, stage: str) -> None:
        """Check that weights, complete state and logged steps equal those of the undisturbed run."""
        mine, reference = (place / "runs" / CONFIG["name"] for place in (self.folder, self.reference.folder))
        name = f"{stage}.safetensors"
        is_same = _weights(mine / name) == _weights(reference / name)
        is_same = is_same and _final_state(mine, stage) == _final_state(reference, stage)
        if not is_same:
            self._fail(stage, "the final weights differ from the undisturbed run")
        self.tally.identical[stage] += is_same
        steps = [
            entry["step"]
            for entry in map(json.loads, (mine / "metrics.jsonl").read_text().splitlines())
            if entry["stage"] == stage and f"{stage}_gradient_norm" in entry
        ]
        if steps != list(range(1, NUM_STEPS + 1)):
            self._fail(stage, f"metrics.jsonl holds the steps {steps}")

    def _fail(self, stage: str, text: str) -> None:
        self.tally.failures.append(f"{self.folder.name}, stage {stage}: {text}")


def _is_training(command: Command, stage: str) -> bool:
    return re.search(rf"{stage}: +\d+%", command.output) is not None  # the progress bar of the training loop


def _until(condition: Any, pause: float) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise UserError("a run neither trained nor ended: see its log")
        time.sleep(pause)


def _whole_checkpoints(folder: Path, stage: str) -> list[int]:
    """Return the steps of the checkpoints whose content has the hash in their name."""
    steps = []
    for path in folder.glob(f"{stage}_step_*.pt"):
        *_, step, digest = path.stem.split("_")
        if hashlib.sha256(path.read_bytes()).hexdigest().startswith(digest):
            steps.append(int(step))
    return sorted(steps)


def _weights(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return names, shapes and bytes of exported weights, without the settings beside them: free keys may differ."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    del header["__metadata__"]
    return header, content[end:]


def _final_state(run_folder: Path, stage: str) -> str:
    """Return a hash of everything in the last checkpoint but the settings."""
    import torch

    path = max((run_folder / "checkpoints").glob(f"{stage}_step_{NUM_STEPS:08d}_*.pt"))
    state = torch.load(path, map_location="cpu", weights_only=True)
    del state["settings"]
    digest = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, dict):
            for name, entry in value.items():
                digest.update(repr(name).encode())
                feed(entry)
        elif isinstance(value, list | tuple):
            for entry in value:
                feed(entry)
        elif isinstance(value, torch.Tensor):
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())

    feed(state)
    return digest.hexdigest()


def campaign(folder: Path, num_kills: int, seed: int, jobs: int, on_kill: Callable[[], Any]) -> Tally:
    """Make the undisturbed run, then disturbed ones until `num_kills` commands were killed."""
    start, tally = WarmStart(), Tally()
    began = time.monotonic()
    reference = Reference(folder / "undisturbed", start)

    def disturb(number: int, kills: dict[str, int]) -> None:
        rng = random.Random(f"{seed}/{number}")
        disturbed = DisturbedRun(folder / f"run_{number:03d}", reference, start, tally, rng)
        for stage in SCRIPTS:
            disturbed.stage(stage, rng.choices(MOMENTS, k=kills[stage]), number % 2, on_kill)

    numbers = itertools.count()
    with ThreadPoolExecutor(jobs) as pool:
        while (missing := num_kills - tally.num_kills) > 0:
            waiting = [pool.submit(disturb, next(numbers), kills) for kills in _shares(missing)]
            for future in waiting:
                future.result()
    tally.seconds = time.monotonic() - began
    return tally


def _shares(kills: int) -> list[dict[str, int]]:
    """Divide kills into runs of at most `KILLS_PER_STAGE` in each stage."""
    shares = []
    while kills > 0:
        first = min(KILLS_PER_STAGE, -(-kills // 2))
        second = min(KILLS_PER_STAGE, kills - first)
        shares.append({"autoencoder": first, "ldm": second})
        kills -= first + second
    return shares


def document(tally: Tally, command: str) -> str:
    """Return the campaign's result as Markdown."""
    lines = [
        "# Fault campaign",
        "",
        f"Written by `{command}`.",
        "",
        "Short runs of both stages are killed with SIGKILL at random moments and restarted with the same command",
        "until they finish. Every second run reads its volumes in a worker process.",
        "",
        "| stage | " + " | ".join(f"killed {moment}" for moment in (START, RUNNING, SAVING)) + " | of these with a "
        "half-written checkpoint | resumed from a checkpoint | runs finished bit-identical |",
        "|---|" + "---:|" * 6,
    ]
    for stage in SCRIPTS:
        kills = " | ".join(str(tally.kills[stage, moment]) for moment in (START, RUNNING, SAVING))
        rest = f"{tally.interrupted_saves[stage]} | {tally.resumed[stage]} | {tally.identical[stage]}"
        lines.append(f"| {stage} | {kills} | {rest} |")
    lines += [
        "",
        f"{tally.num_kills} kills in {tally.seconds / 60:.1f} minutes on {len(os.sched_getaffinity(0))} cores "
        f"({platform.machine()}); failures: {len(tally.failures)}.",
        "",
        "After every kill the checkpoints on disk are hashed: none with a final name may be damaged, none may be lost,",
        "and the next start must resume from the newest. A finished run must equal the undisturbed one bit for bit:",
        "exported weights; networks, optimizers and averages in the last checkpoint; and each step once in",
        "`metrics.jsonl`. Commands are forked from a process that has already done the imports, so that kills hit",
        "training.",
    ]
    lines += ["", *(f"- {failure}" for failure in tally.failures)] if tally.failures else []
    return "\n".join(lines) + "\n"


def main(options: argparse.Namespace) -> int:
    """Run the campaign; return 1, and keep the folder of the runs, if anything was lost."""
    if options.write is not None:
        check_output_file(options.write, "--write")
    from tqdm import tqdm

    folder = Path(tempfile.mkdtemp(prefix="fault_campaign_"))
    log.info("runs and their logs: %s", folder)
    with tqdm(total=options.kills, desc="kills", unit="kill", dynamic_ncols=True) as bar:
        tally = campaign(folder, options.kills, options.seed, num_jobs(options), bar.update)
    text = document(tally, f"python tests/support/fault_campaign.py --kills {options.kills} --seed {options.seed}")
    return conclude(text, tally.failures, folder, options)


if __name__ == "__main__":
    arguments = parser(
        "Kill short runs of both stages at random moments and check that nothing is lost.",
        ["python tests/support/fault_campaign.py --kills 100 --write docs/fault_campaign.md"],
    )
    arguments.add_argument("--kills", type=at_least(1), default=100, help="commands to kill (100)")
    add_campaign(arguments, "runs")
    sys.exit(run(main, arguments.parse_args()))
