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
from settings.yaml_reader import value_text

# Unusual volumes, and volumes without a partner, that are shown; --json has all of them.
MOST_SHOWN = 10
# Channels whose range of intensities is shown.
MOST_CHANNELS = 4

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
    from data.files.header import grouped, problem_lines
    from data.volumes import check_source, split_source

    source = check_source(settings.data, settings.seed, settings.autoencoder.in_channels)
    rows = [_row(volume, checked) for volume, checked in zip(source.volumes, source.checked, strict=True)]
    _print_table([COLUMNS, *rows])
    print()
    if source.left_out:
        print(f"left out, {counted(len(source.left_out), 'entry')}:")
        print("\n".join(f"  {line}" for line in grouped(source.left_out)) + "\n")
    unpaired = _partner_problems(source, settings)
    if options.json is not None:
        _write_json(options.json, source, settings, unpaired)
    number = len(source.problems) + len(unpaired)
    if number:
        if source.usable:
            print(f"{_summary(source, None, settings)}\n")
        lines = [*([problem_lines(source.problems)] if source.problems else []), *_first(unpaired)]
        print("\n".join([f"{counted(number, 'problem')}:", *lines]))
        return UserError.exit_code
    volumes = split_source(source, settings.data, settings.seed, settings.autoencoder.in_channels)
    print(_summary(source, volumes, settings))
    print("\nnext: " + shlex.join(["python", "train_autoencoder.py", "--config", options.config, *options.overrides]))
    return 0


def _row(volume, checked) -> tuple[str, ...]:
    import numpy as np

    name, class_name = printable(volume.name), printable(volume.class_name or "")
    problems = str(len(checked.problems) or "")
    facts = checked.facts
    if facts is None:
        return (name, class_name, "", "", "", "", "", "", problems)
    ends = [f"{low:g} to {high:g}" for low, high in zip(facts.lower, facts.upper, strict=True)]
    if len(ends) > MOST_CHANNELS:
        ends = [*ends[:1], f"and {len(ends) - 1} more channels"]
    return (
        name,
        class_name,
        "x".join(map(str, facts.axes)),
        "x".join(f"{mm:.3g}" for mm in facts.header.spacing_mm) if facts.has_spacing else "none",
        np.dtype(facts.dtype).name,
        f"{facts.minimum:g}",
        f"{facts.maximum:g}",
        "" if facts.num_not_finite else ", ".join(ends),
        problems,
    )


def _partner_problems(source, settings) -> list[str]:
    """Return every problem with what the volumes without problems are paired with."""
    if not settings.ldm.conditioning.comes_from_volumes:
        return []
    from data.volumes import VolumeFile
    from diffusion.conditioning import find_partners_of

    files = [VolumeFile(v.path, v.name, None, facts.num_channels, facts.digest) for v, facts in source.usable]
    return find_partners_of(settings.ldm.conditioning, settings.data, files)[1]


def _write_json(path: str, source, settings, unpaired: list[str]) -> None:
    from data.overview import outlier_lines, statistics
    from data.split import suspected_patients

    names, usable = _usable(source)
    volumes = []
    for volume, checked in zip(source.volumes, source.checked, strict=True):
        entry = {"volume": volume.name, "class": volume.class_name, "split": volume.split}
        entry["problems"] = [str(problem) for problem in checked.problems]
        facts = checked.facts
        if facts is not None:
            # JSON has no NaN, and a volume without finite voxels has no range.
            low, high = (number if math.isfinite(number) else None for number in (facts.minimum, facts.maximum))
            spacing = facts.header.spacing_mm if facts.has_spacing else None
            entry |= {"shape": facts.axes, "spacing_mm": spacing, "type": facts.dtype, "minimum": low, "maximum": high}
        volumes.append(entry)
    content = {
        "volumes": volumes,
        "problems": [str(problem) for problem in source.problems],
        "partner_problems": unpaired,
        "left_out": [str(note) for note in source.left_out],
        "statistics": statistics(usable, settings.data),
        "unusual": outlier_lines(names, usable, settings.data),
        "patients": suspected_patients(source.volumes),
        "suggested_grid": (_suggested(source, settings) or {}).get("data.voxel_size") if usable else None,
    }
    write_output(path, json.dumps(content, indent=2) + "\n")


def _usable(source) -> tuple[list[str], list]:
    """Return the names and facts of the volumes without problems."""
    return [volume.name for volume, _ in source.usable], [facts for _, facts in source.usable]


def _suggested(source, settings) -> dict | None:
    """Return the keys that bring the usable volumes to the grid of a plan with the networks of the config."""
    from memory.planning.fingerprint import fingerprint_of
    from memory.planning.layout import suggested_values

    volumes, facts = zip(*source.usable, strict=True)
    return suggested_values(fingerprint_of(volumes, facts, settings.data), settings)


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _summary(source, volumes, settings) -> str:
    """Describe the usable volumes; `volumes` is their split, or None if problems stand in its way."""
    from data.overview import outlier_lines, range_lines, stage_problems
    from data.split import suspected_patients

    data = settings.data
    names, facts = _usable(source)
    first = f"{len(facts)} of {counted(len(source.volumes), 'volume')} can be read and scaled"
    if volumes is not None:
        first = (
            f"{counted(len(facts), 'volume')}, no problem: {len(volumes.train)} for training, "
            f"{len(volumes.val)} for validation"
        )
    lines = [
        first,
        *range_lines(facts, data),
        f"resized to {_times(data.voxel_size)} ({data.resize}), intensities scaled by "
        + (str(data.intensity.mode) if data.intensity.num_rules == 1 else "a rule for each channel"),
    ]
    if volumes is not None and volumes.class_names:
        counts = Counter(file.label for file in (*volumes.train, *volumes.val))
        named = (f"{name} ({counts[label]})" for label, name in enumerate(volumes.class_names))
        lines.append(f"classes: {', '.join(named)}")
    unusual = outlier_lines(names, facts, data)
    if unusual:
        lines += ["", f"unusual, worth a look ({len(unusual)}):", *_first(unusual)]
    patients = suspected_patients(source.volumes) if data.group_by is None else None
    if patients is not None:
        lines += ["", patients]
    lines.append("")
    refused = stage_problems(settings, data.voxel_size)
    lines += [f"data.voxel_size {_times(data.voxel_size)} is refused by {problem}" for problem in refused]
    suggested = _suggested(source, settings)
    if suggested is not None:
        current = {key: look_up(settings, key) for key in suggested}
        changed = {key: value for key, value in suggested.items() if value_text(value) != value_text(current[key])}
        if not changed:
            lines.append(f"data.voxel_size {_times(data.voxel_size)} suits these volumes and both stages")
        else:
            lines.append(f"a grid that suits these volumes and both stages: {_overrides(changed)}")
            lines.append(f"it has {_cost_text(suggested['data.voxel_size'], settings, len(facts))}")
    return "\n".join(lines)


def _first(lines: list[str]) -> list[str]:
    """Return the first lines, indented, and how many more there are."""
    more = len(lines) - MOST_SHOWN
    return [
        *(f"  {line}" for line in lines[:MOST_SHOWN]),
        *([f"  and {more} more, which --json FILE lists"] if more > 0 else []),
    ]


def _cost_text(grid: list[int], settings, number: int) -> str:
    """Return what a grid costs compared with the one that is set."""
    ratio = math.prod(grid) / math.prod(settings.data.voxel_size)
    disk = 4 * settings.autoencoder.in_channels * math.prod(grid) * number
    return (
        f"{ratio:.3g} times the voxels of data.voxel_size, and about that much of its memory and time; "
        f"{size_text(disk)} of prepared volumes"
    )


def _overrides(values: dict) -> str:
    texts = {True: "true", False: "false"}
    return " ".join(
        f"{key}={','.join(map(str, value)) if isinstance(value, list) else texts.get(value, value)}"
        for key, value in values.items()
    )


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


if __name__ == "__main__":
    sys.exit(run(main, parse()))
