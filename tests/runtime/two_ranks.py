"""Run by test_processes.py as one or as two processes: makes one backward of each stage and validates.

Writes what it found to found_<rank>.pt in the current folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from data import DataSplit, prepare_volumes
from data.batches import BatchPlan, ValidationBatches, training_batches
from diffusion.conditioning import check_conditions
from diffusion.latents import prepare_latents
from models.volume_codec import frozen_codec
from runtime.files import RunFolder
from runtime.processes import Process, processes
from settings import DataError, Settings, UserError, load_settings
from tests.training.steps import gradients
from training.autoencoder_step import AutoencoderStep
from training.checkpoints import export
from training.ldm_step import LatentDiffusionStep
from training.validation.skill import Skill
from training.validation.stages import validate_autoencoder

STEP = 3  # the discriminator takes part


def count_reductions(network: nn.Module) -> list[int]:
    """Return a list that gets an entry whenever gradients are exchanged."""
    travelled: list[int] = []
    if isinstance(network, DistributedDataParallel):

        def note(_, bucket):  # torch compares annotations with classes, and ours are text
            travelled.append(bucket.index())
            work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        network.register_comm_hook(None, note)
    return travelled


def stage_one(settings: Settings, process: Process, volumes: DataSplit, found: dict[str, Any]) -> None:
    step = AutoencoderStep(settings, process)
    found["reductions"] = [count_reductions(step._parallel_autoencoder), count_reductions(step._parallel_discriminator)]
    plan = BatchPlan.of(settings.autoencoder.training, settings.seed, process.rank, process.world_size)
    micro_batches = next(training_batches(volumes.train, settings.data, plan, STEP, STEP + 1))
    step.backward(micro_batches, STEP)
    found["autoencoder"] = gradients(step)
    # 3 volumes: two for one process, one for the other; 1 volume: none for the other.
    for number in (3, 1):
        held_out = ValidationBatches(volumes.train[:number], settings.data, process.rank, process.world_size)
        found[f"validation of {number}"], _ = validate_autoencoder(step, held_out)
    found["validation of 0"], _ = validate_autoencoder(step, [])
    export(step, RunFolder(Path("runs") / settings.name))
    process.barrier()


def stage_two(settings: Settings, process: Process, volumes: DataSplit, found: dict[str, Any]) -> None:
    codec = frozen_codec(settings, process)
    latents = prepare_latents(codec, volumes, settings, process)
    found["latent scale"] = latents.normalisation.scale
    step = LatentDiffusionStep(settings, process, codec=codec, latents=latents)
    found["reductions"].append(count_reductions(step._parallel_unet))
    plan = BatchPlan.of(settings.ldm.training, settings.seed, process.rank, process.world_size)
    step.backward(next(iter(latents.training_batches(plan, STEP, STEP + 1))), STEP)
    found["ldm"] = gradients(step)
    found["held-out loss"] = Skill(latents, step.codec, step.normalisation, settings, process)(step.unet)


def conditional(settings: Settings, process: Process, volumes: DataSplit, found: dict[str, Any]) -> None:
    """Make one backward with volumes in which a hole is to be filled."""
    hole = {"encoding": "autoencoder", "source": "target", "degrade": {"hole": (5, 5, 5)}}
    changes = {"conditioning.volume": hole, "latents.cache": "memory"}
    settings = settings.with_overrides({f"ldm.{key}": value for key, value in changes.items()})
    codec = frozen_codec(settings, process)
    latents = prepare_latents(codec, volumes, settings, process, check_conditions(settings, volumes))
    found["condition scale"] = latents.conditions.metadata
    step = LatentDiffusionStep(settings, process, codec=codec, latents=latents)
    plan = BatchPlan.of(settings.ldm.training, settings.seed, process.rank, process.world_size)
    step.backward(next(iter(latents.training_batches(plan, STEP, STEP + 1))), STEP)
    found["conditional"] = gradients(step)
    found["conditional skill"] = Skill(latents, step.codec, step.normalisation, settings, process)(step.unet)


def agreements(process: Process, found: dict[str, Any]) -> None:
    """Raise errors in one process and record what each process gets."""
    is_last = process.rank == process.world_size - 1
    found["any"] = (process.any(is_last), process.any(False))
    found["from first"] = process.broadcast(f"said by {process.rank}")
    try:
        with process.raise_on_all_ranks():
            if is_last:
                raise DataError("volume.nii: gone")
    except UserError as error:
        found["together"] = (str(error), error.exit_code, error.is_reported_by_another_rank)


def codebook(settings: Settings, process: Process, volumes: DataSplit, found: dict[str, Any]) -> None:
    """Make one update with a codebook, of which most codes restart."""
    changes = {"bottleneck": "vq", "codebook_size": 32, "training.adversarial_weight": 0.0}
    settings = settings.with_overrides({f"autoencoder.{key}": value for key, value in changes.items()})
    step = AutoencoderStep(settings, process)
    plan = BatchPlan.of(settings.autoencoder.training, settings.seed, process.rank, process.world_size)
    step(next(training_batches(volumes.train, settings.data, plan, STEP, STEP + 1)), STEP)
    state = step.autoencoder.state_dict()
    found["codebook"] = {name: tensor for name, tensor in state.items() if name.startswith("quantiser.")}


def bad_value(settings: Settings, process: Process, found: dict[str, Any]) -> None:
    """Let the last process meet a value that is not finite."""
    step = AutoencoderStep(settings, process, files_of=lambda number, micro_batch: [f"seen by {process.rank}"])
    batch = step.example_batch(1)
    if process.rank == process.world_size - 1:
        batch.image.fill_(float("nan"))
    step([batch], STEP)
    try:
        step.guard.raise_if_bad()
    except UserError as error:
        found["not finite"] = str(error)


def main(config: str) -> None:
    settings = load_settings(config, sys.argv[2:])
    found: dict[str, Any] = {}
    with processes(settings) as process:
        volumes = prepare_volumes(settings.data, settings.seed, settings.autoencoder.in_channels)
        stage_one(settings, process, volumes, found)
        stage_two(settings, process, volumes, found)
        conditional(settings, process, volumes, found)
        codebook(settings, process, volumes, found)
        agreements(process, found)
        bad_value(settings, process, found)
        torch.save(found, f"found_{process.rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
