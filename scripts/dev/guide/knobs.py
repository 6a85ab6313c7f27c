"""What single changes make of a preset's memory and compute, for the header of the preset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memory.predict.prediction import GIB, Prediction, Stage
from settings import Settings, look_up

if TYPE_CHECKING:
    from memory.predict import Predictor
    from scripts.dev.guide.stored import StoredPredictor

WIDTH = 120
FIRST, SECOND = "autoencoder.training", "ldm.training"
FOR_A_CPU = "quickstart"
"""On a GPU, most of what this preset needs is the CUDA context, whatever is changed."""


@dataclass(frozen=True)
class Knob:
    """A change to a preset, named by its key's new value, and the stage that it is predicted for."""

    name: str
    stage: Stage
    changes: dict[str, Any]


def knobs(settings: Settings) -> Iterator[Knob]:
    """Yield the changes that a preset's users come to try: each one key, with checkpointing if the key acts with it."""
    if settings.name == FOR_A_CPU:
        return
    training = settings.autoencoder.training
    is_on = training.checkpoints_blocks
    checkpointed = {f"{FIRST}.use_gradient_checkpointing": True}
    prefix = "" if is_on else "checkpointing, "
    yield _micro_batch(settings, "autoencoder", FIRST)
    yield _checkpointing("autoencoder", FIRST, is_on)
    yield Knob(f"{prefix}checkpoint_levels=1", "autoencoder", {**checkpointed, f"{FIRST}.checkpoint_levels": 1})
    yield Knob(f"{prefix}offload", "autoencoder", {f"{FIRST}.use_gradient_checkpointing_offload": True})
    rows = 0 if training.slab_rows else 8
    yield Knob(f"{prefix}slab_rows={rows}", "autoencoder", {**checkpointed, f"{FIRST}.slab_rows": rows})
    is_mixed = settings.device.mixed_precision
    name = "mixed_precision=false" if is_mixed else "mixed_precision=true"
    yield Knob(name, "autoencoder", {"device.mixed_precision": not is_mixed})
    halved = tuple(channels // 2 for channels in settings.autoencoder.num_channels)
    yield Knob("half the channels", "autoencoder", {"autoencoder.num_channels": halved})
    if any(settings.autoencoder.attention_levels):
        none = (False,) * len(settings.autoencoder.attention_levels)
        yield Knob("no attention", "autoencoder", {"autoencoder.attention_levels": none})
    yield _micro_batch(settings, "ldm", SECOND)
    yield _checkpointing("ldm", SECOND, settings.ldm.training.checkpoints_blocks)


def _micro_batch(settings: Settings, stage: Stage, where: str) -> Knob:
    """Return the smallest micro-batch, or twice the smallest, with as many volumes per update."""
    training = look_up(settings, where)
    size = 1 if training.batch_size > 1 else 2
    steps = max(1, training.samples_per_rank // size)
    changes = {f"{where}.batch_size": size, f"{where}.gradient_accumulation_steps": steps}
    return Knob(f"batch_size={size}, accumulated {steps}", stage, changes)


def _checkpointing(stage: Stage, where: str, is_on: bool) -> Knob:
    name = "no checkpointing" if is_on else "checkpointing"
    return Knob(name, stage, {f"{where}.use_gradient_checkpointing": not is_on})


def predict_knobs(
    presets: list[Settings], predictor: Predictor | StoredPredictor
) -> dict[str, list[tuple[Knob, Prediction]]]:
    """Return each preset's knobs with their predictions, by the preset's name."""
    asked = {
        preset.name: [
            (knob, predictor.submit(preset.with_overrides(knob.changes), knob.stage)) for knob in knobs(preset)
        ]
        for preset in presets
    }
    return {name: [(knob, answer.result()) for knob, answer in answers] for name, answers in asked.items()}


def knob_lines(before: str, stage: Stage, base: Prediction, answers: list[tuple[Knob, Prediction]]) -> list[str]:
    """Return a comment that begins with `before` and lists the knobs of a stage, broken between them."""
    entries = [_entry(knob, found, base) for knob, found in answers if knob.stage == stage]
    if not entries:
        return [f"# {before}."]
    lines = [f"# {before}. With one change:"]
    for entry in [*(f"{entry};" for entry in entries[:-1]), f"{entries[-1]}."]:
        if len(lines[-1]) + 1 + len(entry) > WIDTH:
            lines.append(f"#   {entry}")
        else:
            lines[-1] += f" {entry}"
    return lines


def _entry(knob: Knob, found: Prediction, base: Prediction) -> str:
    compute = f"{found.flops['total'] / base.flops['total']:.2f}x"
    host = f" + {found.host_bytes / GIB:.1f} of the host" if found.host_bytes else ""
    return f"{knob.name}: {found.required_bytes / GIB:.1f} GiB{host}{'' if compute == '1.00x' else f' ({compute})'}"
