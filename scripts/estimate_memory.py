"""Predict the memory of one training step, without a GPU and without running it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import add_config, check_output_file, parser, run, write_output
from settings import load_settings


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/estimate_memory.py --config configs/high_res.yaml",
            "python scripts/estimate_memory.py --config configs/quality.yaml --stage ldm --json estimate.json",
            "python scripts/estimate_memory.py --config configs/high_res.yaml autoencoder.training.slab_rows=8",
        ],
    )
    add_config(result)
    result.add_argument("--stage", choices=("autoencoder", "ldm"), default="autoencoder", help="default: autoencoder")
    result.add_argument("--json", metavar="FILE", help="also write the prediction as JSON; -: only to standard output")
    return result.parse_intermixed_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Predict the memory and print it."""
    if options.json not in (None, "-"):
        check_output_file(options.json, "--json", [options.config])
    from memory.predict import predict
    from memory.predict.text import describe_prediction
    from memory.watch.calibration import corrected

    start = time.perf_counter()
    settings = load_settings(options.config, options.overrides, stage=options.stage)
    prediction = corrected(predict(settings, options.stage))
    if options.json is not None:
        values = {**prediction.to_json(), "seconds": round(time.perf_counter() - start, 2)}
        text = json.dumps(values, indent=2) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
            return 0
        write_output(options.json, text)
    if not options.quiet:
        print(f"{settings.name}, {options.stage}: one training step\n")
        print(describe_prediction(prediction))
    return 0


if __name__ == "__main__":
    sys.exit(run(main, parse()))
