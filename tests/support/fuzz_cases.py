"""The inputs of the fuzz campaign: a folder, something wrong in it, and a command line; each a function of its seed."""

from __future__ import annotations

import csv
import io
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from settings import known_keys
from tests.support.campaign import CONFIG
from tests.support.fuzz_damage import (
    ODD_TEXTS,
    ODD_VALUES,
    copy_folder,
    damage_bytes,
    damage_file,
    damage_values,
    damage_yaml,
)

RUN = f"runs/{CONFIG['name']}"
KEYS = tuple(name for name, _ in known_keys())
STRANGE_NAME = os.fsdecode(b"na\xefve \xf0\x9f\x90\x88\n\x1b[31m")
PATHS = (
    "",
    ".",
    "/",
    "/dev/null/x",
    "campaign.yaml",
    "campaign.yaml/x",
    "runs",
    "x" * 300,
    "\udcff/x",
    "~nobody/x",
    "/proc/x",
)
NUMBERS = ("", "x", "-1", "0", "1e999", "nan", "inf", "1" * 5000, "0x10", "٣", "1e9", "-0.0", "2147483648")
VALUES = (
    *(
        "!!python/object/apply:os.system [touch executed]",
        "&a [*a]",
        "{? [1]: 2}",
        "*unknown",
        "2001-01-01",
        "0x10",
        "1_000",
    ),
    *(
        "1" * 5000,
        "1e400",
        ".nan",
        "-.inf",
        "[1, 2",
        "'",
        "\t",
        "null",
        "~",
        "[" * 500,
        "{a: " * 100,
        "\udcff",
        '"\\0"',
    ),
    *("x" * 300, "a/" * 3000, "[1000000000, 1000000000, 1000000000]", "65536", "[65536, 65536, 65536]", "1000000000"),
    *(
        "[" + "64, " * 5000 + "64]",
        "true",
        "-1",
        "0",
        "1",
        "2",
        "3",
        "16",
        "0.5",
        "[8, 16]",
        "[16, 16, 16]",
        "auto",
        "all",
    ),
    *(
        "&a [&b [1,1,1,1,1,1,1,1,1], *b, *b, *b, *b, *b, *b, *b]",
        "!!bool x",
        "!!timestamp x",
        "!!set {a}",
        "<<",
        "{<<: 1}",
    ),
)


@dataclass(frozen=True)
class Case:
    """One input: its kind, what is wrong in words, and the command that meets it."""

    kind: str
    what: str
    arguments: tuple[str, ...]


def make_case(number: int, seed: int, base: Path, folder: Path) -> Case:
    """Copy a folder with a finished run in it, put something wrong into it and return the command."""
    rng = random.Random(f"{seed}/{number}")
    copy_folder(base, folder)
    kind = list(KINDS)[number % len(KINDS)]
    what, arguments = KINDS[kind](folder, rng)
    return Case(kind, what, tuple(arguments))


def _of_data(rng: random.Random) -> list[str]:
    """Return a command that reads a config and the data, and ends without training."""
    dry_run = [rng.choice(("train_autoencoder.py", "train_ldm.py")), "--dry-run"]
    return [*rng.choice((dry_run, *[["scripts/check_data.py"]] * 2)), "--config", "campaign.yaml"]


def _of_config(rng: random.Random, config: str = "campaign.yaml") -> list[str]:
    """Return a command that reads a config and ends quickly."""
    stage = rng.choice(("autoencoder", "ldm"))
    commands = (
        [f"train_{stage}.py", "--dry-run"],
        *[["scripts/check_data.py"]] * 3,
        ["scripts/estimate_memory.py", "--stage", stage],
        # Refused, but only after the config has been read; a whole walk would be legitimately slow.
        ["scripts/oom_ladder.py", "--budget-gb", "0", "--stage", stage],
    )
    # Not phantoms, which would be generated at the default grid if the config has none.
    return [*rng.choice(commands), "--config", config, "data.source=volumes"]


def _of_run(rng: random.Random, suffix: str) -> list[str]:
    """Return a command that reads files of this kind in a run, or any command that reads a run."""
    small = ["--num", "2", "--steps", "1"]
    stage = rng.choice(("autoencoder", "ldm"))
    report = ["scripts/report.py", "--run", RUN]
    train = [[f"train_{stage}.py", "--config", name] for name in (f"{RUN}/config.yaml", "campaign.yaml")]
    use = [
        ["scripts/sample.py", "--run", RUN, *small],
        ["scripts/evaluate.py", "--run", RUN, *small, "--json", "evaluation.json"],
        ["scripts/reconstruct.py", "--run", RUN, "--input", "volumes", "--out", "reconstructed"],
        ["scripts/export_checkpoint.py", "--weights", f"{RUN}/{stage}.safetensors", "--out", "exported.pt"],
        [*_IMPORT, "--weights", f"{RUN}/{stage}.safetensors", "--out", "imported"],
    ]
    readers = {
        ".pt": train,
        ".safetensors": use,
        ".png": [report],
        ".json": [report, *train],
        ".jsonl": [report, *train],
    }
    return rng.choice(readers.get(suffix, [report, [*report, "--run", RUN], *use, *train]))


_IMPORT = ("scripts/import_checkpoint.py", "--from", "monai", "--config", "campaign.yaml")


def _config(folder: Path, rng: random.Random) -> tuple[str, list[str]]:
    path = folder / "campaign.yaml"
    if rng.random() < 0.5:
        path.write_bytes(damage_yaml(path.read_bytes(), rng))
        what = "other values"
    else:
        what = damage_file(path, rng)
    return f"config: {what}", _of_config(rng)


def _override(folder: Path, rng: random.Random) -> tuple[str, list[str]]:
    odd_keys = ("", ".", "data", "data..x", "d\u0430ta.source", "x" * 300)
    key = rng.choice(KEYS if rng.random() < 0.9 else odd_keys)
    value = rng.choice(VALUES) if rng.random() < 0.7 else json.dumps(rng.choice(ODD_VALUES))
    override = f"{key}={value}".replace("\0", "")
    return f"override {override[:60]}", [*_of_config(rng), override]


def _volumes(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "volumes").iterdir() if path.is_file())


def _listing(folder: Path, rng: random.Random) -> tuple[str, list[str]]:
    names = [path.name for path in _volumes(folder)]
    values: Any = {
        "training": [{"image": name, "label": number % 2} for number, name in enumerate(names[:-1])],
        "validation": names[-1:],
    }
    if rng.random() < 0.3:
        values["training"][0] = rng.choice(
            ({"image": "x" * 300}, {"image": "../x.nii"}, {"image": STRANGE_NAME}, 3, None, {})
        )
    for _ in range(rng.choice((1, 2, 3))):
        values = damage_values(values, rng)
    path = folder / "volumes" / "dataset.json"
    path.write_text(json.dumps(values))
    what = damage_file(path, rng) if rng.random() < 0.4 else "other values"
    source = rng.choice(("volumes", "volumes/dataset.json"))
    command = [*_of_data(rng), f"data.source={source}"]
    return f"dataset.json: {what}", command


def _labels(folder: Path, rng: random.Random) -> tuple[str, list[str]]:
    names = [path.name for path in _volumes(folder)]
    rows = [["file", "label"], *([name, str(number % 2)] for number, name in enumerate(names))]
    for _ in range(rng.choice((0, 1, 2))):
        row = rng.choice(rows)
        row.insert(rng.randrange(3), rng.choice(("file", "label", "", "a,b", '"', "\n", "9" * 5000, STRANGE_NAME)))
    text = io.StringIO()
    csv.writer(text, delimiter=rng.choice(",,,,;")).writerows(rows)
    path = folder / "labels.csv"
    path.write_bytes(text.getvalue().encode("utf-8", "surrogateescape"))
    what = damage_file(path, rng) if rng.random() < 0.5 else "other values"
    command = [*_of_data(rng), "data.source=volumes", "data.class_labels=labels.csv"]
    return f"labels.csv: {what}", command


def _volume(folder: Path, rng: random.Random) -> tuple[str, list[str]]:
    path = rng.choice(_volumes(folder))
    if rng.random() < 0.7:
        path.write_bytes(damage_bytes(path.read_bytes(), rng))
        what = "other bytes"
    else:
        what = damage_file(path, rng)
    if rng.random() < 0.2 and path.is_file():
        path = path.rename(path.with_name(STRANGE_NAME + path.name))
        what += ", strange name"
    commands = (
        [*_of_data(rng), "data.source=volumes"],
        ["scripts/check_data.py", "--config", "campaign.yaml", "data.source=volumes", "--json", "checks.json"],
        ["scripts/reconstruct.py", "--run", RUN, "--input", f"volumes/{path.name}", "--out", "reconstructed"],
    )
    return f"volume {path.name[-8:]}: {what}", rng.choice(commands)


def _run_folder(folder: Path, rng: random.Random) -> tuple[str, list[str]]:
    files = sorted(path for path in (folder / RUN).rglob("*") if path.is_file() and "tensorboard" not in path.parts)
    # Choose the kind first, so that every kind is equally likely however many files it has.
    suffix = rng.choice(sorted({path.suffix for path in files}))
    path = rng.choice([path for path in files if path.suffix == suffix])
    what = damage_file(path, rng)
    return f"{path.relative_to(folder / RUN)}: {what}", _of_run(rng, suffix if rng.random() < 0.8 else "")


def _arguments(folder: Path, rng: random.Random) -> tuple[str, list[str]]:
    """Use an impossible path, an invalid number, or an option that does not exist."""
    command = rng.choice((_of_run(rng, ""), _of_config(rng)))
    draw = rng.random()
    if draw < 0.5:
        option = rng.choice(("--json", "--out", "--write-config", "--run", "--input", "--config", "--weights"))
        extra = [option, rng.choice(PATHS)]
    elif draw < 0.8:
        option = rng.choice(
            ("--num", "--steps", "--seed", "--batch-size", "--guidance-scale", "--budget-gb", "--class")
        )
        extra = [option, rng.choice(NUMBERS)]
    else:
        extra = [
            rng.choice(("--help", "--quiet", "--x", "-", "--", "\udcff", "a" * 3000, "--stage", "--order", "--on-oom"))
        ]
    return f"argument {' '.join(extra)[:40]}", [*command, *extra]


def _odd_file(folder: Path, rng: random.Random) -> tuple[str, list[str]]:
    """Give a file that has nothing to do with what the command expects."""
    path = folder / rng.choice((STRANGE_NAME, "odd", "odd.yaml", "odd.json", "odd.pt", "odd.safetensors", "odd.nii.gz"))
    path.write_bytes(rng.choice((*ODD_TEXTS, rng.randbytes(1000), (folder / "campaign.yaml").read_bytes())))
    stage = rng.choice(("autoencoder", "ldm"))
    commands = (
        _of_config(rng, path.name),
        [*_of_data(rng), f"data.source={path.name}"],
        ["scripts/export_checkpoint.py", "--weights", path.name, "--out", "exported.safetensors"],
        [*_IMPORT, "--weights", path.name, "--out", "imported"],
        ["scripts/reconstruct.py", "--run", RUN, "--input", path.name, "--out", "reconstructed"],
        ["scripts/report.py", "--run", path.name],
        ["scripts/sample.py", "--run", path.name],
        ["train_autoencoder.py", "--config", "campaign.yaml", f"autoencoder.pretrained={path.name}", "name=other"],
        [f"train_{stage}.py", "--config", "campaign.yaml", f"ldm.autoencoder={path.name}", "name=other"],
    )
    return f"odd file {path.suffix}", rng.choice(commands)


KINDS: dict[str, Callable[[Path, random.Random], tuple[str, list[str]]]] = {
    "config": _config,
    "override": _override,
    "dataset.json": _listing,
    "labels": _labels,
    "volume": _volume,
    "run folder": _run_folder,
    "run folder again": _run_folder,
    "arguments": _arguments,
    "odd file": _odd_file,
}
