"""Find the settings that affect a stage's training step, to tell whether a change has any effect."""

from __future__ import annotations

from typing import Any

from memory.predict.prediction import Stage
from settings import Settings


def acting_values(settings: Settings, stage: Stage) -> dict[str, Any]:
    """Return all settings as the stage's step uses them, with those it ignores set to None.

    Two configs for which this returns the same values run the same step.
    """
    values = settings.model_dump()
    if stage == "autoencoder":
        values["ldm"] = None
        _resolve_autoencoder(values["autoencoder"], settings)
        return values
    pixel_loss, training = settings.ldm.training.pixel_loss, settings.autoencoder.training
    values["data"]["patch_size"] = None  # stage 2 trains on whole volumes
    knobs: dict[str, Any] = {}
    if not pixel_loss.weight:
        values["ldm"]["training"]["pixel_loss"] = None
        # The autoencoder only encodes, without a backward pass.
        knobs["slab_rows"] = training.slab_rows if settings.ldm.latents.cache == "none" else None
    else:
        chunk = min(pixel_loss.chunk_size, settings.ldm.training.batch_size)
        values["ldm"]["training"]["pixel_loss"]["chunk_size"] = chunk
        # The frozen decoder is always checkpointed.
        levels = training.checkpoint_levels if training.checkpoints_blocks else "all"
        offload = training.use_gradient_checkpointing_offload
        knobs = {"slab_rows": training.slab_rows, "levels": levels, "offload": offload}
        knobs["checkpoint_dtype"] = training.checkpoint_dtype
    values["autoencoder"] = {**values["autoencoder"], "training": knobs, "norm_num_groups": None}
    if not pixel_loss.weight and settings.ldm.latents.cache != "none":
        values["autoencoder"]["implementation"] = None
    return values


def _resolve_autoencoder(values: dict[str, Any], settings: Settings) -> None:
    training, acting = settings.autoencoder.training, values["training"]
    values["norm_num_groups"] = settings.autoencoder.num_groups
    values["use_nonlocal_attention"] = settings.autoencoder.has_middle_attention
    acting["use_gradient_checkpointing"] = training.checkpoints_blocks
    acting["use_nested_checkpointing"] = training.nests_checkpoints
    levels = len(settings.autoencoder.num_channels)
    count = levels if training.checkpoint_levels == "all" else training.checkpoint_levels
    acting["checkpoint_levels"] = count if training.checkpoints_blocks else None
    if not training.uses_discriminator:
        acting["discriminator"] = None
    if not training.use_perceptual_loss:
        acting["perceptual"] = None
    else:
        acting["perceptual"]["chunk_size"] = _slices_at_once(settings)


def _slices_at_once(settings: Settings) -> int | None:
    """Return how many slices pass through the perceptual network at once; None if it takes no slices."""
    training = settings.autoencoder.training
    if not training.perceptual.network.startswith("lpips-"):
        return None
    per_volume = max(max(1, round(training.perceptual.slice_fraction * axis)) for axis in settings.training_grid)
    return min(training.perceptual.chunk_size, per_volume * training.batch_size * settings.autoencoder.in_channels)
