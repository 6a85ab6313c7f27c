"""Stage 2: train the diffusion model that samples latents, which the autoencoder of stage 1 decodes to volumes.

python train_ldm.py --config configs/quickstart.yaml
"""

from __future__ import annotations

import argparse
import logging
import sys

from runtime.cli import INTERRUPTED, add_training, overrides_of, parser, run
from settings import Settings, load_settings

log = logging.getLogger("train_ldm")


def main(options: argparse.Namespace) -> int:
    """Check the config before the slow imports, then train; with --on-oom, retry with less memory."""
    settings = load_settings(options.config, overrides_of(options), stage="ldm")
    from memory.watch.memory_watch import train_with_rungs

    return train_with_rungs(lambda s: train(s, options.dry_run, options.gpu), settings, "ldm", options.on_oom)


def train(configured: Settings, is_dry_run: bool, gpu: str | None = None) -> int:
    """Train, resuming from the newest checkpoint if there is one; return the exit code."""
    from data import prepare_volumes
    from data.batches import BatchPlan
    from diffusion.conditioning import check_conditions
    from diffusion.latents import prepare_latents
    from diffusion.normalisation import ensure_weights
    from evaluation.report import publish, show_validation
    from memory.watch.memory_watch import MemoryWatch
    from models.volume_codec import frozen_codec
    from runtime.processes import processes
    from training.checkpoints import ResumableRun, export, for_ranks
    from training.ldm_step import LatentDiffusionStep
    from training.loop import run_loop
    from training.run_setup import check_run, describe_run, open_run, summarise
    from training.validation.stages import LdmValidation, RealVolumes

    check_run(configured, is_dry_run)
    with (
        processes(configured) as process,
        MemoryWatch(settings := for_ranks(configured, "ldm", process), "ldm", process, is_dry_run, gpu) as watch,
    ):
        # Check everything that the run needs, and say what it will do.
        ensure_weights(settings, is_dry_run)
        volumes = prepare_volumes(settings.data, settings.seed, settings.autoencoder.in_channels, is_dry_run)
        pairs = check_conditions(settings, volumes)
        log.info(summarise(settings, "ldm", len(volumes.train), process.world_size))
        watch.announce(len(volumes.train), len(volumes.val))
        if is_dry_run:
            return 0
        with open_run(settings, process) as run_folder:
            # Load the frozen autoencoder, prepare the latents, build the U-Net, and resume where the run stopped.
            codec = frozen_codec(settings, process)
            with watch.guard(run_folder.path, 0, "encoding the latents"):
                latents = prepare_latents(codec, volumes, settings, process, pairs)
            plan = BatchPlan.of(settings.ldm.training, settings.seed, process.rank, process.world_size)
            step = LatentDiffusionStep(settings, process, True, codec, latents, plan.names(volumes.train))
            resumable = ResumableRun(step, run_folder, volumes, configured)
            first_step = resumable.resume()
            describe_run(run_folder, configured, process, volumes)
            watch.record(run_folder.path)

            # The latents of step n depend on the seed and n alone, so a resumed run sees the same batches.
            batches = latents.training_batches(plan, first_step, step.training.last_step)
            validate = LdmValidation(step, latents, RealVolumes(volumes, latents.settings))
            if not run_loop(resumable, batches, watch, validate, show_validation):
                return INTERRUPTED
            export(step, run_folder)
            publish(run_folder, process)
            validate.log_skill()
    return 0


if __name__ == "__main__":
    arguments = parser(
        "Train the latent diffusion model (stage 2) on a trained autoencoder. Run the same command again to resume.",
        [
            "python train_ldm.py --config configs/high_res.yaml --dry-run",
            "python train_ldm.py --config configs/high_res.yaml ldm.autoencoder=weights/autoencoder.safetensors",
            "torchrun --nproc_per_node=4 train_ldm.py --config configs/balanced.yaml",
        ],
    )
    add_training(arguments, "ldm")
    sys.exit(run(main, arguments.parse_intermixed_args()))
