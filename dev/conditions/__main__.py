"""Write docs/condition_measurements.md: what conditions are worth on given volumes, and `occupied_weight` on surfaces.

Also draw docs/images/conditions.png.

Trains one autoencoder and the networks of each task in runs/; what is trained there already is only measured. All of it
takes some 40 minutes of one CPU core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from command_line import check_output_file, parser, run, write_output

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "docs" / "condition_measurements.md"
PICTURE = ROOT / "docs" / "images" / "conditions.png"
NAMES = ("labels", "hole", "finer", "surfaces")
WEIGHTS = (1.0, 10.0)
SURFACE_STEPS = 120

_INTRODUCTION = """# What conditions are worth

Written by `python -m dev.conditions`; do not edit by hand.

Both networks have the sizes and the recipe of `configs/quickstart.yaml`, with its first guesses. They are trained for
the updates that are named, on one CPU core. Errors are those of samples for held-out volumes, on the scale of 0 to 1:
with the volume's own condition, with that of another volume, and with none, each from the same noise. Several networks
of a task differ in their seeds only; errors are means over them.
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python -m dev.conditions --volumes /data/hippocampus"])
    result.add_argument(
        "--volumes", required=True, metavar="DIR", help="volumes with label maps of the values 0 to 2 in labels/"
    )
    result.add_argument("--only", action="append", choices=NAMES, help="measure only this and keep the other sections")
    result.add_argument("--out", default=str(PATH), metavar="FILE", help="the document")
    result.add_argument("--picture", default=str(PICTURE), metavar="FILE", help="the picture of all tasks together")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Train and measure task by task, and write the document after each."""
    import torch

    from dev.conditions import tasks
    from dev.conditions.document import section_of_surfaces, section_of_task, sections_of
    from dev.conditions.picture import row_of, write_picture

    torch.set_num_threads(1)
    check_output_file(options.out)
    check_output_file(options.picture, "--picture")
    volumes, out = Path(options.volumes).resolve(), Path(options.out)
    sections = sections_of(out.read_text(encoding="utf-8")) if options.only and out.is_file() else {}
    chosen = options.only or NAMES
    known = tasks.tasks(volumes)
    for name in chosen:
        if name == "surfaces":
            found = {weight: tasks.occupancy(weight, SURFACE_STEPS) for weight in WEIGHTS}
            title, text = section_of_surfaces(found, SURFACE_STEPS)
        else:
            task = known[name]
            tasks.stage_one(volumes)
            for seed in task.seeds:
                tasks.stage_two(name, task, seed, volumes)
            title, text = section_of_task(task, list(tasks.measure(name, task)))
        sections[title] = text
        body = "".join(f"\n## {heading}\n\n{part.strip()}\n" for heading, part in sections.items())
        write_output(out, f"{_INTRODUCTION}{body}")
        print(f"{title}\n{text}")
    if known.keys() <= set(chosen):
        write_picture({task.short: row_of(name, task) for name, task in known.items()}, Path(options.picture))
    return 0


if __name__ == "__main__":
    sys.exit(run(main, parse()))
