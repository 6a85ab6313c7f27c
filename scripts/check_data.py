"""Check and prepare every volume of a config: report shapes, spacings, intensities and problems, and suggest a grid."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import add_config, check_output_file, parser, run, write_output
from runtime.files import counted, printable, size_text
from settings import UserError, load_settings, look_up
from settings.section import value_text

# Of unusual volumes and volumes without a partner, of which --json has all, and of channels, what is shown.
MOST_SHOWN, MOST_CHANNELS = 10, 4

COLUMNS = ("volume", "class", "shape", "spacing mm", "type", "minimum", "maximum", "scaled from", "problems")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python scripts/check_data.py --config configs/default.yaml data.source=/data/ct"])
    add_config(result)
    result.add_argument("--json", metavar="FILE", help="also write the results as JSON")
    return result.parse_intermixed_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Print one line per volume, every problem and a summary; return 2 if there is a problem."""
    if options.json is not None:
        check_output_file(options.json, "--json", [options.config])
    settings = load_settings(options.config, options.overrides)
    from data.header import problem_lines
    from data.volumes import check_source, split_source

    source = check_source(settings.data, settings.seed, settings.autoencoder.in_channels)
    rows = [COLUMNS, *map(_row, source.volumes, source.checked)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if source.left_out:
        print(f"\nleft out, {counted(len(source.left_out), 'entry')}:")
        print(problem_lines(source.left_out))
    print()
    unpaired = _partner_problems(source, settings)
    suggested = _suggested(source, settings) if source.usable else None
    found = _findings(source, settings, unpaired, suggested)
    if options.json is not None:
        write_output(options.json, json.dumps(found, indent=2) + "\n")
    number = len(source.problems) + len(unpaired)
    if number:
        if source.usable:
            print(f"{_summary(source, None, settings, found, suggested)}\n")
        lines = [*([problem_lines(source.problems)] if source.problems else []), *_first(unpaired)]
        print("\n".join([f"{counted(number, 'problem')}:", *lines]))
        return UserError.exit_code
    volumes = split_source(source, settings.data, settings.seed, settings.autoencoder.in_channels)
    print(_summary(source, volumes, settings, found, suggested))
    print("\nnext: " + shlex.join(["python", "train_autoencoder.py", "--config", options.config, *options.overrides]))
    return 0


def _row(volume, checked) -> tuple[str, ...]:
    import numpy as np

    cells, facts = [""] * 6, checked.facts
    if facts is not None:
        spacing = "x".join(f"{mm:.3g}" for mm in facts.spacing_mm) if facts.has_spacing else "none"
        ends = [f"{low:g} to {high:g}" for low, high in zip(facts.lower, facts.upper, strict=True)]
        scaled = ", ".join(ends if len(ends) <= MOST_CHANNELS else [ends[0], f"and {len(ends) - 1} more channels"])
        cells = ["x".join(map(str, facts.axes)), spacing, np.dtype(facts.dtype).name]
        cells += [f"{facts.minimum:g}", f"{facts.maximum:g}", "" if facts.num_not_finite else scaled]
    return (printable(volume.name), printable(volume.class_name or ""), *cells, str(len(checked.problems) or ""))


def _partner_problems(source, settings) -> list[str]:
    """Return every problem with what the volumes without problems are paired with."""
    if not settings.ldm.conditioning.comes_from_volumes:
        return []
    from data import VolumeFile
    from diffusion.conditioning import find_partners_of

    files = [VolumeFile(v.path, v.name, None, facts.num_channels, facts.digest) for v, facts in source.usable]
    return find_partners_of(settings.ldm.conditioning, settings.data, files)[1]


def _findings(source, settings, unpaired: list[str], suggested: dict | None) -> dict:
    """Return all results as JSON has them."""
    from data.overview import outlier_lines, range_lines
    from data.volumes import suspected_patients

    volumes = []
    for volume, checked in zip(source.volumes, source.checked, strict=True):
        problems = [str(problem) for problem in checked.problems]
        entry = {"volume": volume.name, "class": volume.class_name, "split": volume.split, "problems": problems}
        if (facts := checked.facts) is not None:
            # JSON has no NaN, and a volume without finite voxels has no range.
            low, high = (number if math.isfinite(number) else None for number in (facts.minimum, facts.maximum))
            spacing = facts.spacing_mm if facts.has_spacing else None
            entry |= {"shape": facts.axes, "spacing_mm": spacing, "type": facts.dtype, "minimum": low, "maximum": high}
        volumes.append(entry)
    names, usable = [volume.name for volume, _ in source.usable], [facts for _, facts in source.usable]
    return {
        "volumes": volumes,
        "problems": [str(problem) for problem in source.problems],
        "partner_problems": unpaired,
        "left_out": [str(note) for note in source.left_out],
        "ranges": range_lines(usable, settings.data) if usable else [],
        "unusual": outlier_lines(names, usable, settings.data),
        "patients": suspected_patients(source.volumes),
        "suggested_grid": (suggested or {}).get("data.voxel_size"),
    }


def _suggested(source, settings) -> dict | None:
    """Return the keys that bring the usable volumes to the grid of a plan with the networks of the config."""
    from memory.planning.fingerprint import fingerprint_of
    from memory.planning.layout import suggested_values

    volumes, facts = zip(*source.usable, strict=True)
    return suggested_values(fingerprint_of(volumes, facts, settings.data), settings)


def _summary(source, volumes, settings, found: dict, suggested: dict | None) -> str:
    """Describe the usable volumes; `volumes` is their split, or None if problems stand in its way."""
    from data.overview import stage_problems

    data, num_usable = settings.data, len(source.usable)
    grid = " x ".join(map(str, data.voxel_size))
    lines = [f"{num_usable} of {counted(len(source.volumes), 'volume')} can be read and scaled"]
    if volumes is not None:
        number = counted(num_usable, "volume")
        lines = [f"{number}, no problem: {len(volumes.train)} for training, {len(volumes.val)} for validation"]
    rules = str(data.intensity.mode) if data.intensity.num_rules == 1 else "a rule for each channel"
    lines += [*found["ranges"], f"resized to {grid} ({data.resize}), intensities scaled by {rules}"]
    if volumes is not None and volumes.class_names:
        counts = Counter(file.label for file in (*volumes.train, *volumes.val))
        named = (f"{name} ({counts[label]})" for label, name in enumerate(volumes.class_names))
        lines.append(f"classes: {', '.join(named)}")
    if unusual := found["unusual"]:
        lines += ["", f"unusual, worth a look ({len(unusual)}):", *_first(unusual)]
    if data.group_by is None and found["patients"] is not None:
        lines += ["", found["patients"]]
    refused = stage_problems(settings, data.voxel_size)
    lines += ["", *(f"data.voxel_size {grid} is refused by {problem}" for problem in refused)]
    if suggested is not None:
        changed = {k: value_text(v) for k, v in suggested.items() if value_text(v) != value_text(look_up(settings, k))}
        texts = (f"{key}={text.replace(' ', '').strip('[]')}" for key, text in changed.items())
        voxels = math.prod(suggested["data.voxel_size"])
        if changed:
            lines.append(f"a grid that suits these volumes and both stages: {' '.join(texts)}")
            disk = size_text(4 * settings.autoencoder.in_channels * voxels * num_usable)
            lines.append(
                f"it has {voxels / math.prod(data.voxel_size):.3g} times the voxels of data.voxel_size, and about that "
                f"much of its memory and time; {disk} of prepared volumes"
            )
        else:
            lines.append(f"data.voxel_size {grid} suits these volumes and both stages")
    return "\n".join(lines)


def _first(lines: list[str]) -> list[str]:
    """Return the first lines, indented, and how many more there are."""
    more = [f"  and {len(lines) - MOST_SHOWN} more, which --json FILE lists"] if len(lines) > MOST_SHOWN else []
    return [*(f"  {line}" for line in lines[:MOST_SHOWN]), *more]


if __name__ == "__main__":
    sys.exit(run(main, parse()))
