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

from runtime.cli import above_zero, check_output_file, parser, run, write_output
from runtime.files import SHARED_NAMES, printable
from settings import ConfigError, DataSettings, Problem, UserError, load_settings, read_overrides

LARGEST_BUDGET_GB = 1_000_000
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
    result.add_argument(
        "--budget-gb", type=float, required=True, metavar="N", help="memory of the GPU in GB, for example 24"
    )
    result.add_argument(
        "--gpu", metavar="NAME", help='for the time, such as "RTX 4090"; default: this machine\'s, or A100'
    )
    result.add_argument("--hours", type=above_zero, metavar="H", help="the time that both stages may take together")
    result.add_argument("--out", metavar="FILE", help="write the config, with reasons as comments")
    result.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that the plan has to take")
    return result.parse_intermixed_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Read the volumes, search for the most capable config, print and write it with its reasons."""
    given = _check(options)
    from memory.kernels.gpus import chosen_gpu
    from memory.predict import Predictor
    from memory.predict.prediction import GIB
    from runtime.cli.bars import ProgressBar

    gpu = chosen_gpu(options.gpu)
    source = {"source": os.path.abspath(os.path.expanduser(options.data))}
    # The workers import what they need while the volumes are read.
    with Predictor(NUM_WORKERS, gpu.without_triton) as predictor:
        from memory.planning.fingerprint import take_fingerprint
        from memory.planning.planner import Planner
        from memory.planning.search import PredictionCache
        from memory.watch.calibration import corrected

        channels = given.get("autoencoder.in_channels")
        channels = channels if isinstance(channels, int) else None  # anything else is refused with the other settings
        fingerprint = take_fingerprint(_data_settings(given, source), given.get("seed", 42), channels)
        with ProgressBar(desc="predicting", unit="config", disable=options.quiet, leave=False) as bar:
            budget = round(options.budget_gb * GIB)
            correct = partial(corrected, gpu_name=options.gpu)
            predictions = PredictionCache(predictor, budget, gpu, correct, bar.update)
            plan = Planner(fingerprint, given, predictions, _name(options)).plan(options.hours)
    from memory.planning.text import as_yaml, describe_plan

    print(describe_plan(plan))
    if options.out is not None:
        out = Path(options.out)
        command = shlex.join(["python", "scripts/plan.py", *sys.argv[1:]])
        write_output(out, as_yaml(plan, printable(command), out))
        written = load_settings(out, stage="ldm")
        assert written == plan.settings, "the file holds another config than was planned"
    print(_next(options))
    return 0


def _check(options: argparse.Namespace) -> dict[str, Any]:
    """Return the overrides as values by key; raise `UserError` for anything that no reading of the data would mend."""
    if not options.data:
        raise UserError("--data: the path is empty; a folder of volumes or a dataset.json is allowed; give one")
    if options.out is not None:
        _check_out(options.out, options.data)
    if not 0 < options.budget_gb <= LARGEST_BUDGET_GB:
        allowed = f"allowed: above 0, at most {LARGEST_BUDGET_GB}"
        raise ConfigError([Problem("--budget-gb", f"found {options.budget_gb:g}", allowed, "for example 24")])
    given = dict(_keys(read_overrides(options.overrides)))
    if "data.source" in given:
        raise ConfigError([Problem("data.source", "given besides --data", "allowed: --data", "leave it out")])
    return given


def _check_out(out: str, data: str) -> None:
    """Raise `UserError` for an output among the volumes, or not a YAML file, or a config that is not a plan."""
    check_output_file(out, "--out", [data])
    path, source = Path(out), Path(os.path.realpath(os.path.expanduser(data)))
    if source.exists() and Path(os.path.realpath(out)).is_relative_to(source if source.is_dir() else source.parent):
        raise UserError(f"--out: {out} lies in the folder of the volumes; any other place is allowed; choose one")
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out: {out} is not the name of a config; .yaml and .yml are allowed; choose one of them")
    if path.is_file() and PLANNED not in path.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"--out: {out} already exists and was not written by plan.py; choose another name")


def _keys(given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield single keys for values that are whole sections, such as data.intensity={mode: window}."""
    for dotted, value in given.items():
        if isinstance(value, dict):
            yield from _keys({f"{dotted}.{name}": part for name, part in value.items()})
        else:
            yield dotted, value


def _data_settings(given: dict[str, Any], source: dict[str, Any]) -> DataSettings:
    """Return the settings by which the volumes are found, turned and measured."""
    names = ("class_labels", "include_label_maps", "frame")
    values = {name: given[f"data.{name}"] for name in names if f"data.{name}" in given}
    keys = [key for key in given if key.startswith("data.intensity.")]
    intensity = {key.rsplit(".", 1)[-1]: given[key] for key in keys}
    return DataSettings.model_validate({**values, **source, **({"intensity": intensity} if intensity else {})})


def _name(options: argparse.Namespace) -> str:
    """Return the name of the run: that of the file, or of the folder."""
    text = Path(options.out).stem if options.out else Path(os.path.abspath(options.data)).name
    name = re.sub(r"[^\w.-]+", "_", text).lstrip("._-")[:80] or "planned"
    return f"{name}_run" if name.lower() in SHARED_NAMES else name


def _next(options: argparse.Namespace) -> str:
    if options.out is None:
        return "\nnothing was written; add --out configs/my_data.yaml to write the config, with its reasons as comments"
    gpu = "" if options.gpu is None else f" --gpu {shlex.quote(options.gpu)}"
    command = f"python train_autoencoder.py --config {shlex.quote(options.out)} --dry-run{gpu}"
    return f"\nwritten: {options.out}\nnext: {command}"


if __name__ == "__main__":
    sys.exit(run(main, parse()))
