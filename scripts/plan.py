"""Plan a config for a folder of volumes and the memory of a GPU: the most capable one that fits."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import ProgressBar, above_zero, check_output_file, parser, run, write_output
from runtime.files import SHARED_NAMES, printable
from scripts.oom_ladder import add_budget
from settings import ConfigError, DataSettings, Problem, UserError, load_settings, read_overrides
from settings.section import assign

NUM_WORKERS = 2
PLANNED = "# Planned for "
"""How a plan's file says what it is."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/plan.py --data /data/ct --budget-gb 24",
            'python scripts/plan.py --data /data/ct --budget-gb 24 --gpu "RTX 4090" --hours 48 --out configs/ct.yaml',
            "python scripts/plan.py --data /data/mr --budget-gb 12 data.voxel_size=[128,128,96]",
        ],
    )
    result.add_argument("--data", required=True, metavar="FOLDER", help="a folder of volumes, or a dataset.json")
    add_budget(result)
    result.add_argument("--hours", type=above_zero, metavar="H", help="the time that both stages may take together")
    result.add_argument("--out", metavar="FILE", help="write the config, with reasons as comments")
    result.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that the plan has to take")
    return result.parse_intermixed_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Read the volumes, search for the most capable config, print and write it with its reasons."""
    given = _check(options)
    from memory.kernels.gpus import chosen_gpu
    from memory.predict import Predictor
    from memory.watch.calibration import corrected

    gpu, correct = chosen_gpu(options.gpu), partial(corrected, gpu_name=options.gpu)
    # The workers import what they need while the volumes are read.
    with Predictor(NUM_WORKERS, gpu.without_triton) as predictor:
        from memory.planning.fingerprint import take_fingerprint
        from memory.planning.planner import Planner, as_yaml, describe_plan

        channels = given.get("autoencoder.in_channels")
        channels = channels if isinstance(channels, int) else None  # anything else is refused with the other settings
        fingerprint = take_fingerprint(_data_settings(given, options.data), given.get("seed", 42), channels)
        with ProgressBar(desc="predicting", unit="config", leave=False) as bar:
            subject = (fingerprint, given, _name(options))
            plan = Planner(*subject, predictor, options.budget_bytes, gpu, correct, bar.update).plan(options.hours)
    print(describe_plan(plan))
    if options.out is None:
        print("\nnothing was written; add --out configs/my_data.yaml to write the config, with its reasons as comments")
        return 0
    out, command = Path(options.out), shlex.join(["python", "scripts/plan.py", *sys.argv[1:]])
    write_output(out, as_yaml(plan, printable(command), out))
    assert load_settings(out, stage="ldm") == plan.settings, "the file holds another config than was planned"
    on_gpu = "" if options.gpu is None else f" --gpu {shlex.quote(options.gpu)}"
    print(f"\nwritten: {out}")
    print(f"next: python train_autoencoder.py --config {shlex.quote(options.out)} --dry-run{on_gpu}")
    return 0


def _check(options: argparse.Namespace) -> dict[str, Any]:
    """Return the overrides as values by key; raise `UserError` for anything that no reading of the data would mend."""
    if not options.data:
        raise UserError("--data: the path is empty; a folder of volumes or a dataset.json is allowed; give one")
    if options.out is not None:
        check_output_file(options.out, "--out", [options.data])
        out, source = Path(options.out), Path(os.path.realpath(os.path.expanduser(options.data)))
        folder, problem = source if source.is_dir() else source.parent, None
        if source.exists() and Path(os.path.realpath(out)).is_relative_to(folder):
            problem = "lies in the folder of the volumes; any other place is allowed"
        elif out.suffix not in (".yaml", ".yml"):
            problem = "is not the name of a config; .yaml and .yml are allowed"
        elif out.is_file() and PLANNED not in out.read_text(encoding="utf-8", errors="replace"):
            problem = "already exists and was not written by plan.py; new files and plans are allowed"
        if problem is not None:
            raise UserError(f"--out: {out} {problem}; choose another name")
    given = dict(_keys(read_overrides(options.overrides)))
    if "data.source" in given:
        raise ConfigError([Problem("data.source", "given besides --data", "allowed: --data", "leave it out")])
    return given


def _keys(given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield single keys for values that are whole sections, such as data.intensity={mode: window}."""
    for dotted, value in given.items():
        if isinstance(value, dict):
            yield from _keys({f"{dotted}.{name}": part for name, part in value.items()})
        else:
            yield dotted, value


def _data_settings(given: dict[str, Any], folder: str) -> DataSettings:
    """Return the settings by which the volumes are found, turned and measured."""
    values: dict[str, Any] = {"source": os.path.abspath(os.path.expanduser(folder))}
    for key, value in given.items():
        if key.startswith(("data.intensity.", "data.class_labels", "data.include_label_maps", "data.frame")):
            assign(values, key.removeprefix("data."), value)
    return DataSettings.model_validate(values)


def _name(options: argparse.Namespace) -> str:
    """Return the name of the run: that of the file, or of the folder."""
    text = Path(options.out).stem if options.out else Path(os.path.abspath(options.data)).name
    name = re.sub(r"[^\w.-]+", "_", text).lstrip("._-")[:80] or "planned"
    return f"{name}_run" if name.lower() in SHARED_NAMES else name


if __name__ == "__main__":
    sys.exit(run(main, parse()))
