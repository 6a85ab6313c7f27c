"""Write docs/quantised.md: what 8-bit optimizer states and quantised latents cost on given volumes.

Every row is kept in docs/quantised.json when its run is over. Without volumes, only the document is written again.
"""

from __future__ import annotations

import argparse
import sys

from command_line import at_least, parser, run
from dev.quantised.document import BOTTLENECKS, DATA, PATH, STATES, document, keep, read

KINDS = ("kl", "vq")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    examples = ["python -m dev.quantised --volumes /data/hippocampus/images", "python -m dev.quantised"]
    result = parser(__doc__ or "", examples)
    result.add_argument("--volumes", metavar="DIR", help="volumes of about the grid's size")
    result.add_argument("--called", default="the volumes given", metavar="TEXT", help="what the document calls them")
    result.add_argument("--grid", type=int, nargs=3, default=[32, 48, 32], metavar="N")
    result.add_argument("--only", choices=(STATES, BOTTLENECKS), help="measure this and keep the other rows")
    result.add_argument("--seeds", type=at_least(1), default=3, help="runs of each kind of states")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Train run by run, keep each row, and write the document."""
    if options.volumes is not None:
        _measure(options)
    PATH.write_text(document(read()), encoding="utf-8")
    print(PATH)
    return 0


def _measure(options: argparse.Namespace) -> None:
    import json

    from dev.quantised.runs import Volumes, bottleneck_row, compare_states

    grid = tuple(options.grid)
    described = {"volumes": options.called, "grid": options.grid}
    DATA.write_text(json.dumps({**read(), **described}, indent=1) + "\n", encoding="utf-8")
    if options.only != BOTTLENECKS:
        for seed in range(options.seeds):
            for row in compare_states(Volumes(options.volumes, grid, 300), seed):
                keep(STATES, row)
    if options.only != STATES:
        for kind in KINDS:
            row = bottleneck_row(Volumes(options.volumes, grid, 3000), [f"autoencoder.bottleneck={kind}"])
            keep(BOTTLENECKS, row)


if __name__ == "__main__":
    sys.exit(run(main, parse()))
