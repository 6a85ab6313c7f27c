"""Predict the memory and the time of a training run, without a GPU and without running it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.cli import add_config, check_output_file, parser, run, write_output
from settings import ConfigError, Problem, load_settings

LARGEST_GPUS = 4096


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(
        __doc__ or "",
        [
            "python scripts/estimate_memory.py --config configs/high_res.yaml",
            "python scripts/estimate_memory.py --config configs/quality.yaml --stage ldm --json estimate.json",
            "python scripts/estimate_memory.py --config configs/high_res.yaml autoencoder.training.slab_rows=8",
            'python scripts/estimate_memory.py --config configs/balanced.yaml --gpu "RTX 4090" --gpus 4',
        ],
    )
    add_config(result)
    text = "stage to predict; default: autoencoder"
    result.add_argument("--stage", choices=("autoencoder", "ldm"), default="autoencoder", help=text)
    result.add_argument("--json", metavar="FILE", help="also write the prediction as JSON; -: print only the JSON")
    text = 'GPU to predict the time for, such as "RTX 4090"; default: this machine\'s, or A100'
    result.add_argument("--gpu", metavar="NAME", help=text)
    result.add_argument("--gpus", type=int, default=1, metavar="N", help="how many GPUs train together; default: 1")
    return result.parse_intermixed_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Predict memory and time, and print them."""
    if options.json not in (None, "-"):
        check_output_file(options.json, "--json", [options.config])
    if not 1 <= options.gpus <= LARGEST_GPUS:
        problem = Problem("--gpus", f"found {options.gpus}", f"allowed: 1 to {LARGEST_GPUS}", "for example 4")
        raise ConfigError([problem])
    from memory.kernels.gpus import chosen_gpu
    from memory.predict import Predictor

    start = time.perf_counter()
    settings = load_settings(options.config, options.overrides, stage=options.stage)
    gpu = chosen_gpu(options.gpu)
    with Predictor(without_triton=gpu.without_triton) as predictor:
        coming = predictor.submit(settings, options.stage)
        # These import torch while the worker predicts.
        from memory.predict.text import describe_prediction
        from memory.watch.calibration import corrected

        prediction = corrected(coming.result(), options.gpu)
    if options.json is not None:
        values = {
            **prediction.to_json(),
            "required_bytes": prediction.needed_bytes(options.gpus),
            "gpu": gpu.name if prediction.is_for_gpu else None,
            "gpus": options.gpus,
            "seconds_per_step": prediction.seconds_per_step(gpu) if prediction.is_for_gpu else None,
            "hours": prediction.hours(gpu) if prediction.is_for_gpu else None,
            "seconds": round(time.perf_counter() - start, 2),
        }
        text = json.dumps(values, indent=2) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
            return 0
        write_output(options.json, text)
    if not options.quiet:
        print(f"{settings.name}, {options.stage}: one training step\n")
        print(describe_prediction(prediction, gpu, options.gpus))
    return 0


if __name__ == "__main__":
    sys.exit(run(main, parse()))
