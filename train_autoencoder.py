"""Stage 1: train the autoencoder that encodes volumes as latents and decodes them.

python train_autoencoder.py --config configs/quickstart.yaml
"""

from __future__ import annotations

import argparse
import logging
import sys
from functools import partial

from runtime.cli import INTERRUPTED, add_training, overrides_of, parser, run
from settings import Settings, load_settings

log = logging.getLogger("train_autoencoder")


def main(options: argparse.Namespace) -> int:
    """Check the config before the slow imports, then train; with --on-oom, retry with less memory."""
    settings = load_settings(options.config, overrides_of(options), stage="autoencoder")
    from memory.watch.memory_watch import train_with_rungs

    return train_with_rungs(lambda s: train(s, options.dry_run, options.gpu), settings, "autoencoder", options.on_oom)


def train(configured: Settings, is_dry_run: bool, gpu: str | None = None) -> int:
    """Train, resuming from the newest checkpoint if there is one; return the exit code."""
    from data import prepare_volumes
    from data.batches import BatchPlan, ValidationBatches, training_batches
    from evaluation.report import publish, show_validation
    from losses import ensure_perceptual_weights
    from memory.watch.memory_watch import MemoryWatch
    from runtime.processes import processes
    from training.autoencoder_step import AutoencoderStep
    from training.checkpoints import ResumableRun, ensure_pretrained, export, for_ranks
    from training.loop import run_loop
    from training.run_setup import check_run, describe_run, open_run, summarise, warn_of_stage_two
    from training.validation.stages import validate_autoencoder

    check_run(configured, is_dry_run)
    with (
        processes(configured) as process,
        MemoryWatch(
            settings := for_ranks(configured, "autoencoder", process), "autoencoder", process, is_dry_run, gpu
        ) as watch,
    ):
        # Check everything that the run needs, and say what it will do.
        if not is_dry_run:  # which needs no weights: a login node may have neither them nor internet
            ensure_perceptual_weights(settings.autoencoder.training)
        ensure_pretrained(settings.autoencoder)
        volumes = prepare_volumes(settings.data, settings.seed, settings.autoencoder.in_channels, is_dry_run)
        warn_of_stage_two(settings, volumes, process)
        log.info(summarise(settings, "autoencoder", len(volumes.train), process.world_size))
        watch.announce(len(volumes.train), len(volumes.val))
        if is_dry_run:
            return 0
        with open_run(settings, process) as run_folder:
            # Build the networks and optimizers, and resume where the run stopped.
            plan = BatchPlan.of(settings.autoencoder.training, settings.seed, process.rank, process.world_size)
            step = AutoencoderStep(settings, process, files_of=plan.names(volumes.train))
            resumable = ResumableRun(step, run_folder, volumes, configured)
            first_step = resumable.resume()
            describe_run(run_folder, configured, process, volumes)
            watch.record(run_folder.path)

            # The volumes of step n depend on the seed and n alone, so a resumed run sees the same batches.
            batches = training_batches(volumes.train, settings.data, plan, first_step, step.training.last_step)
            held_out = ValidationBatches(volumes.val, settings.data, process.rank, process.world_size)
            validate = partial(validate_autoencoder, step, held_out, volumes.val)
            if not run_loop(resumable, batches, watch, validate, show_validation):
                return INTERRUPTED
            export(step, run_folder)
            publish(run_folder, process)
    return 0


if __name__ == "__main__":
    arguments = parser(
        "Train the autoencoder (stage 1). Run the same command again to resume.",
        [
            "python train_autoencoder.py --config configs/high_res.yaml --dry-run",
            "python train_autoencoder.py --config configs/high_res.yaml data.source=/data/ct",
            "torchrun --nproc_per_node=4 train_autoencoder.py --config configs/balanced.yaml",
        ],
    )
    add_training(arguments, "autoencoder")
    sys.exit(run(main, arguments.parse_intermixed_args()))
