"""What the presets need: the table of both READMEs, and the headers of the presets with what single changes do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from memory.ladder.rungs import build_rungs
from memory.predict.prediction import Prediction, Stage
from scripts.dev.documents.predictions import GPU, Predictions, gib, hours, markdown
from settings import Settings, load_settings

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
HEADER = re.compile(r"^# Predicted .*?(?=^# Start: )", re.MULTILINE | re.DOTALL)
WIDTH = 120
FIRST = "autoencoder.training"
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
    for preset, left, *answers in sorted(asked, key=lambda row: row[2].result().required_bytes):
        first, second, floor = (answer.result() for answer in answers)
        training = preset.autoencoder.training
        others = [first.run_peaks["validation"], *map(second.run_peaks.get, ("encoding the latents", "sampling"))]
        rows.append(
            [
                f"`{preset.name}`",
                "x".join(map(str, preset.training_grid)),
                ", ".join(map(str, preset.autoencoder.num_channels)),
                f"{training.batch_size} x {training.gradient_accumulation_steps}",
                f"{gib(first.required_bytes)} GiB",
                f"{gib(second.required_bytes)} GiB",
                " / ".join(gib(peak["reserved_bytes"] if peak else 0) for peak in others) + " GiB",
                f"{hours(first)} + {hours(second)}",
                _knobs_on(preset),
                str(left),
                f"{gib(floor.required_bytes)} GiB",
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


def knobs(settings: Settings) -> dict[Stage, dict[str, dict[str, Any]]]:
    """Return the changes that a preset's users come to try: each one key, and checkpointing if it needs that."""
    training, levels = settings.autoencoder.training, settings.autoencoder.attention_levels
    is_on, is_mixed = training.checkpoints_blocks, settings.device.mixed_precision
    checkpointed = {f"{FIRST}.use_gradient_checkpointing": True}
    prefix = "" if is_on else "checkpointing, "
    slabs = {f"{FIRST}.slab_rows": 0 if training.slab_rows else 8}
    in_slabs = f"slab_rows={slabs[f'{FIRST}.slab_rows']}"
    first = {
        **_micro_batch(settings, "autoencoder"),
        **_checkpointing(settings, "autoencoder"),
        f"{prefix}checkpoint_levels=1": {**checkpointed, f"{FIRST}.checkpoint_levels": 1},
        f"{prefix}offload": {f"{FIRST}.use_gradient_checkpointing_offload": True},
        f"{prefix}{in_slabs}": {**checkpointed, **slabs},
    }
    if not is_on:
        first[in_slabs] = slabs
    first[f"mixed_precision={str(not is_mixed).lower()}"] = {"device.mixed_precision": not is_mixed}
    if settings.autoencoder.variant == "monai":  # the channels of published weights are fixed
        halved = tuple(channels // 2 for channels in settings.autoencoder.num_channels)
        first["half the channels"] = {"autoencoder.num_channels": halved}
    if sum(levels) > 1:
        lowest = (*(False for _ in levels[1:]), True)
        first["attention on the lowest level only"] = {"autoencoder.attention_levels": lowest}
    if any(levels):
        first["no attention"] = {"autoencoder.attention_levels": tuple(False for _ in levels)}
    if settings.data.patch_size is not None:
        first["patch_size=null"] = {"data.patch_size": None}
    return {"autoencoder": first, "ldm": {**_micro_batch(settings, "ldm"), **_checkpointing(settings, "ldm")}}


def _micro_batch(settings: Settings, stage: Stage) -> dict[str, dict[str, Any]]:
    """Return the smallest micro-batch, or twice the smallest, with as many volumes per update."""
    training = settings.training_of(stage)
    size = 1 if training.batch_size > 1 else 2
    steps = max(1, training.samples_per_rank // size)
    changes = {f"{stage}.training.batch_size": size, f"{stage}.training.gradient_accumulation_steps": steps}
    return {f"batch_size={size}, accumulated {steps}": changes}


def _checkpointing(settings: Settings, stage: Stage) -> dict[str, dict[str, Any]]:
    is_on = settings.training_of(stage).checkpoints_blocks
    name = "no checkpointing" if is_on else "checkpointing"
    return {name: {f"{stage}.training.use_gradient_checkpointing": not is_on}}


def preset_texts(ask: Predictions) -> dict[Path, str]:
    """Return the presets with current headers."""
    asked = {
        preset.name: [
            (ask(preset, stage), {name: ask(preset.with_overrides(change), stage) for name, change in changes.items()})
            for stage, changes in knobs(preset).items()
        ]
        for preset in presets()
        if preset.name != FOR_A_CPU
    }
    texts = {}
    for name, stages in asked.items():
        lines = [
            "# Predicted for the whole run: memory with the CUDA context, no margin (leave 10 to 30 %); "
            f"estimated hours, {GPU}."
        ]
        for number, (as_it_is, changed) in enumerate(stages, start=1):
            entries = [f"{change}: {need(answer.result())}" for change, answer in changed.items()]
            lines += _wrapped(f"# Stage {number}: {need(as_it_is.result())}. With one change:", entries)
        path = CONFIGS / f"{name}.yaml"
        header = "".join(f"{line}\n" for line in lines)
        texts[path] = HEADER.sub(header, path.read_text(encoding="utf-8"), count=1)
    return texts


def need(found: Prediction) -> str:
    """Return what a stage needs, as a header says it."""
    host = f" + {gib(found.host_bytes)} of the host" if found.host_bytes else ""
    return f"{gib(found.required_bytes)} GiB{host}, {hours(found)} h"


def _wrapped(before: str, entries: list[str]) -> list[str]:
    lines = [before]
    for entry in [*(f"{entry};" for entry in entries[:-1]), f"{entries[-1]}."]:
        if len(lines[-1]) + 1 + len(entry) > WIDTH:
            lines.append(f"#   {entry}")
        else:
            lines[-1] += f" {entry}"
    return lines
