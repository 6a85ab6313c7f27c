"""What the presets need: the table of both READMEs, and the headers of the presets with what single changes do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory.ladder.rungs import build_rungs
from memory.predict.prediction import Stage
from scripts.dev.documents.guide import markdown
from scripts.dev.documents.predictions import GPU, Figures, Predictions, gib
from settings import Settings, load_settings, look_up

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
HEADER = re.compile(r"^# Predicted .*?(?=^# Start: )", re.MULTILINE | re.DOTALL)
WIDTH = 120
FIRST, SECOND = "autoencoder.training", "ldm.training"
FOR_A_CPU = "quickstart"
"""On a GPU, most of what this preset needs is the CUDA context, so its header predicts nothing."""


def presets() -> list[Settings]:
    """Return all presets."""
    return [load_settings(path) for path in sorted(CONFIGS.glob("*.yaml"))]


def preset_table(ask: Predictions) -> str:
    """Return the table of the presets, smallest stage 1 first."""
    asked = []
    for preset in presets():
        ladder = [rung for rung in build_rungs(preset, "autoencoder", "lossless-first") if rung.same_mathematics]
        asked.append((preset, len(ladder) - 1, ask(preset), ask(preset, "ldm"), ask(ladder[-1].settings)))
    rows = []
    for preset, left, *answers in sorted(asked, key=lambda row: row[2].result().required):
        first, second, floor = (answer.result() for answer in answers)
        training = preset.autoencoder.training
        others = (first.other_phases["validation"], *map(second.other_phases.get, ("encoding the latents", "sampling")))
        rows.append(
            [
                f"`{preset.name}`",
                "x".join(map(str, preset.training_grid)),
                ", ".join(map(str, preset.autoencoder.num_channels)),
                f"{training.batch_size} x {training.gradient_accumulation_steps}",
                f"{gib(first.required)} GiB",
                f"{gib(second.required)} GiB",
                " / ".join(gib(nbytes or 0) for nbytes in others) + " GiB",
                f"{first.hours:.1f} + {second.hours:.1f}",
                _knobs_on(preset),
                str(left),
                f"{gib(floor.required)} GiB",
            ]
        )
    columns = ["preset", "grid", "channels", "batch x accumulation", "stage 1 needs", "stage 2 needs"]
    columns += ["validation / encoding / sampling", f"hours on {GPU}", "memory knobs on", "rungs left"]
    return markdown([*columns, "stage 1 on the last rung"], rows)


def _knobs_on(settings: Settings) -> str:
    training = settings.autoencoder.training
    knobs = {
        "lean blocks": settings.autoencoder.implementation == "lean",
        "AMP": settings.device.mixed_precision,
        "checkpointing": training.checkpoints_blocks,
        "nested": training.nests_checkpoints,
        f"slabs of {training.slab_rows}": training.slab_rows > 0,
        "offload": training.use_gradient_checkpointing_offload,
    }
    return ", ".join(name for name, is_on in knobs.items() if is_on)


@dataclass(frozen=True)
class Knob:
    """A change to a preset, named by its key's new value, and the stage that it is predicted for."""

    name: str
    stage: Stage
    changes: dict[str, Any]


def knobs(settings: Settings) -> Iterator[Knob]:
    """Yield the changes that a preset's users come to try: each one key, with checkpointing if the key acts with it."""
    training, data = settings.autoencoder.training, settings.data
    is_on = training.checkpoints_blocks
    checkpointed = {f"{FIRST}.use_gradient_checkpointing": True}
    prefix = "" if is_on else "checkpointing, "
    rows = 0 if training.slab_rows else 8
    yield _micro_batch(settings, "autoencoder", FIRST)
    yield _checkpointing("autoencoder", FIRST, is_on)
    yield Knob(f"{prefix}checkpoint_levels=1", "autoencoder", {**checkpointed, f"{FIRST}.checkpoint_levels": 1})
    yield Knob(f"{prefix}offload", "autoencoder", {f"{FIRST}.use_gradient_checkpointing_offload": True})
    yield Knob(f"{prefix}slab_rows={rows}", "autoencoder", {**checkpointed, f"{FIRST}.slab_rows": rows})
    if not is_on:
        yield Knob(f"slab_rows={rows}", "autoencoder", {f"{FIRST}.slab_rows": rows})
    is_mixed = settings.device.mixed_precision
    name = "mixed_precision=false" if is_mixed else "mixed_precision=true"
    yield Knob(name, "autoencoder", {"device.mixed_precision": not is_mixed})
    if settings.autoencoder.variant == "monai":  # the channels of published weights are fixed
        halved = tuple(channels // 2 for channels in settings.autoencoder.num_channels)
        yield Knob("half the channels", "autoencoder", {"autoencoder.num_channels": halved})
    yield from _less_attention(settings)
    if data.patch_size is not None:
        yield Knob("patch_size=null", "autoencoder", {"data.patch_size": None})
    yield _micro_batch(settings, "ldm", SECOND)
    yield _checkpointing("ldm", SECOND, settings.ldm.training.checkpoints_blocks)


def _less_attention(settings: Settings) -> Iterator[Knob]:
    levels = settings.autoencoder.attention_levels
    if sum(levels) > 1:
        lowest = (*(False for _ in levels[1:]), True)
        yield Knob("attention on the lowest level only", "autoencoder", {"autoencoder.attention_levels": lowest})
    if any(levels):
        yield Knob("no attention", "autoencoder", {"autoencoder.attention_levels": tuple(False for _ in levels)})


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


def preset_texts(ask: Predictions) -> dict[Path, str]:
    """Return the presets with current headers."""
    chosen = [preset for preset in presets() if preset.name != FOR_A_CPU]
    asked = {
        preset.name: (
            {"autoencoder": ask(preset), "ldm": ask(preset, "ldm")},
            [(knob, ask(preset.with_overrides(knob.changes), knob.stage)) for knob in knobs(preset)],
        )
        for preset in chosen
    }
    texts = {}
    for name, (stages, changes) in asked.items():
        lines = [
            "# Predicted for the whole run: memory with the CUDA context, no margin (leave 10 to 30 %); "
            f"estimated hours, {GPU}."
        ]
        for number, stage in enumerate(stages, start=1):
            entries = [f"{knob.name}: {_need(answer.result())}" for knob, answer in changes if knob.stage == stage]
            lines += _wrapped(f"# Stage {number}: {_need(stages[stage].result())}. With one change:", entries)
        path = CONFIGS / f"{name}.yaml"
        header = "".join(f"{line}\n" for line in lines)
        texts[path] = HEADER.sub(header, path.read_text(encoding="utf-8"), count=1)
    return texts


def _need(found: Figures) -> str:
    host = f" + {gib(found.host)} of the host" if found.host else ""
    return f"{gib(found.required)} GiB{host}, {found.hours:.1f} h"


def _wrapped(before: str, entries: list[str]) -> list[str]:
    lines = [before]
    for entry in [*(f"{entry};" for entry in entries[:-1]), f"{entries[-1]}."]:
        if len(lines[-1]) + 1 + len(entry) > WIDTH:
            lines.append(f"#   {entry}")
        else:
            lines[-1] += f" {entry}"
    return lines
