"""Give every command damaged files and invalid arguments, and check that each gets a readable error.

python tests/support/fuzz_campaign.py --cases 1000
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runtime.cli import at_least, check_output_file, parser, run
from settings import UserError
from tests.support.campaign import add_campaign, conclude, num_jobs, write_config
from tests.support.warm_start import Command, WarmStart

log = logging.getLogger("fuzz_campaign")

EXIT_CODES = (0, 2, 3, 130)
PROCESSOR_SECONDS = 10.0
CLOCK_SECONDS = 150.0
"""A hanging case may use no processor time, so the clock limits it too, generously because the machine may be busy."""

MEMORY_BYTES = 6 << 30
NUM_STEPS = 4


@dataclass
class Tally:
    """What a campaign has seen; its threads share one."""

    codes: Counter[tuple[str, int]] = field(default_factory=Counter)
    commands: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    longest: float = 0.0
    seconds: float = 0.0

    @property
    def num_cases(self) -> int:
        """Return how many cases were run."""
        return self.codes.total()


def prepare(folder: Path, start: WarmStart) -> Path:
    """Make the folder that every case gets a copy of: a config, a finished run and volumes of every format."""
    folder.mkdir(parents=True)
    write_config(folder, NUM_STEPS)
    for stage in ("autoencoder", "ldm"):
        command = start(folder, f"train_{stage}.py", "--config", "campaign.yaml", output=folder / "output.log")
        if command.wait() != 0:
            raise UserError(f"the run that the cases damage failed in stage {stage}:\n{command.output}")
    (folder / "output.log").unlink()
    phantoms = sorted((folder / "runs" / "phantoms").rglob("*.nii.gz"))
    _write_volumes(folder / "volumes", phantoms)
    return folder


def _write_volumes(folder: Path, phantoms: list[Path]) -> None:
    import nibabel
    import numpy as np
    import SimpleITK

    folder.mkdir()
    voxels = [np.asarray(nibabel.load(path).dataobj, dtype=np.float32) for path in phantoms]
    shutil.copy(phantoms[0], folder / "a.nii.gz")
    nibabel.save(nibabel.load(phantoms[1]), folder / "b.nii")
    np.save(folder / "c.npy", voxels[2])
    np.savez_compressed(folder / "d.npz", image=voxels[3], affine=np.eye(4))
    for name, array in (("e.mha", voxels[4]), ("f.nrrd", voxels[5])):
        SimpleITK.WriteImage(SimpleITK.GetImageFromArray(array), str(folder / name), useCompression=True)


class Campaign:
    """Runs cases, each in a folder of its own, and records those that fail."""

    def __init__(self, folder: Path, base: Path, seed: int, start: WarmStart) -> None:
        self.folder, self.base, self.seed, self.start = folder, base, seed, start
        self.tally = Tally()

    def run(self, numbers: Iterable[int], jobs: int, on_case: Callable[[], Any] = lambda: None) -> Tally:
        """Run these cases, `jobs` at a time."""
        began = time.monotonic()

        def attempt(number: int) -> None:
            self.attempt(number)
            on_case()

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(attempt, numbers))
        self.tally.seconds = time.monotonic() - began
        return self.tally

    def attempt(self, number: int) -> None:
        """Run one case; keep its folder if it fails."""
        from tests.support.fuzz_cases import make_case

        folder = self.folder / f"case_{number:04d}"
        case = make_case(number, self.seed, self.base, folder)
        output = self.folder / f"case_{number:04d}.log"
        began = time.monotonic()
        command = self.start(folder, *case.arguments, output=output)
        code = _wait(command)
        self.tally.longest = max(self.tally.longest, time.monotonic() - began)
        self.tally.codes[case.kind, -1 if code is None else code] += 1
        self.tally.commands[case.arguments[0]] += 1
        wrong = _what_is_wrong(code, command.output)
        if (folder / "executed").exists():
            wrong = "code from the input was executed"
        if wrong:
            line = " ".join(case.arguments).encode("unicode_escape").decode()[:160]
            self.tally.failures.append(
                f"case {number} ({case.what.encode('unicode_escape').decode()}): {wrong}: {line}"
            )
            return
        shutil.rmtree(folder, ignore_errors=True)
        output.unlink()


def _wait(command: Command) -> int | None:
    """Return the exit code; None if the command had to be killed, together with its child processes."""
    import psutil

    deadline = time.monotonic() + CLOCK_SECONDS
    while (code := command.exit_code) is None:
        seconds, memory = 0.0, 0
        with contextlib.suppress(psutil.Error):
            family = [psutil.Process(command.pid), *psutil.Process(command.pid).children(recursive=True)]
            # The command's own time only: predictions run in a child process, which has to import torch first.
            seconds = sum(family[0].cpu_times()[:2])
            memory = sum(process.memory_info().rss for process in family)
        if seconds > PROCESSOR_SECONDS or memory > MEMORY_BYTES or time.monotonic() > deadline:
            for process in family[1:]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            command.end()
            return None
        time.sleep(0.02)
    return code


def _what_is_wrong(code: int | None, output: str) -> str:
    if code is None:
        return f"no end within {PROCESSOR_SECONDS:g} s of work, {CLOCK_SECONDS:g} s by the clock and 6 GiB"
    if "Traceback (most recent call last)" in output:
        return f"a traceback ({output.strip().splitlines()[-1][:100]})"
    if code not in EXIT_CODES:
        return f"exit code {code}"
    if code == 2 and "error: " not in output and not re.search(r"\d problems? in ", output):
        return "exit code 2 without a reason"
    return ""


def document(tally: Tally, command: str) -> str:
    """Return the campaign's result as Markdown."""
    kinds = list(dict.fromkeys(kind for kind, _ in sorted(tally.codes)))
    codes = sorted({code for _, code in tally.codes})
    names = {0: "0, done", 2: "2, refused", 3: "3, out of memory", 130: "130, interrupted", -1: "no end"}
    lines = [
        "# Fuzz campaign",
        "",
        f"Written by `{command}`.",
        "",
        "Every case is a command in a folder with a finished tiny run, in which one thing is wrong: a config, an",
        "override, a dataset.json, a table of labels, a volume of any format, a file of the run, an argument, or a",
        "file of another kind. Files are cut, changed, emptied, given other values, or replaced by a folder, a pipe, a",
        f"device or a loop of links. A case must end within {PROCESSOR_SECONDS:g} s of processor time, without a",
        "traceback, with one of the documented exit codes, and with a reason where it is refused.",
        "",
        "| what is wrong | " + " | ".join(names.get(code, str(code)) for code in codes) + " |",
        "|---|" + "---:|" * len(codes),
    ]
    for kind in kinds:
        lines.append(f"| {kind} | " + " | ".join(str(tally.codes[kind, code]) for code in codes) + " |")
    ran = ", ".join(f"{name} {count}" for name, count in sorted(tally.commands.items()))
    lines += [
        "",
        f"{tally.num_cases} cases in {tally.seconds / 60:.1f} minutes on {len(os.sched_getaffinity(0))} cores "
        f"({platform.machine()}), the longest {tally.longest:.1f} s; failures: {len(tally.failures)}.",
        "",
        f"By command: {ran}.",
    ]
    lines += ["", *(f"- {failure}" for failure in tally.failures)] if tally.failures else []
    return "\n".join(lines) + "\n"


def main(options: argparse.Namespace) -> int:
    """Run the campaign; return 1, and keep the folders of the failed cases, if any failed."""
    from tqdm import tqdm

    if options.write is not None:
        check_output_file(options.write, "--write")
    folder = Path(tempfile.mkdtemp(prefix="fuzz_campaign_"))
    log.info("failed cases and their logs: %s", folder)
    start = WarmStart()
    campaign = Campaign(folder, prepare(folder / "base", start), options.seed, start)
    numbers = options.only or range(options.cases)
    with tqdm(total=len(numbers), desc="cases", unit="case", dynamic_ncols=True) as bar:
        tally = campaign.run(numbers, num_jobs(options), bar.update)
    text = document(tally, f"python tests/support/fuzz_campaign.py --cases {options.cases} --seed {options.seed}")
    return conclude(text, tally.failures, folder, options)


if __name__ == "__main__":
    arguments = parser(
        "Give every command damaged files and invalid arguments, and check that each gets a readable error.",
        [
            "python tests/support/fuzz_campaign.py --cases 1000 --write docs/fuzz_campaign.md",
            "python tests/support/fuzz_campaign.py --only 17 --only 230",
        ],
    )
    arguments.add_argument("--cases", type=at_least(1), default=1000, help="how many (1000)")
    arguments.add_argument("--only", type=int, action="append", metavar="N", help="run only this case; may be repeated")
    add_campaign(arguments, "cases")
    sys.exit(run(main, arguments.parse_args()))
