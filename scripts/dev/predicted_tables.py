"""What documents say about memory and hours, predicted anew: tables, headers of presets, the output of a ladder."""

from __future__ import annotations

import functools
import re
import shlex
import textwrap
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from memory.kernels.gpus import check_gpu, chosen_gpu
from memory.ladder.rungs import build_rungs
from memory.ladder.walk import describe_ladder, walk
from memory.predict import Predictor
from memory.predict.prediction import GIB, Prediction, Stage
from scripts import oom_ladder
from settings import Settings, load_settings, read_overrides

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GPU = "RTX 4090"
"""The card for which all documents show hours."""
FOR_A_CPU = "quickstart"
"""On a GPU, most of what this preset needs is the CUDA context, so its header predicts nothing."""
TABLE = re.compile(r"(?P<head><!-- table: (?P<name>.+?)(?:; (?P<common>.+?))? -->\n\|.*\n\|.*\n)(?P<rows>(?:\|.*\n)*)")
OUTPUT = re.compile(r"(<!-- output of: (?P<command>.+?) -->\n```text\n)(?P<output>.*?)(```\n)", re.DOTALL)
HEADER = re.compile(r"^# Predicted .*?(?=^# Start: )", re.MULTILINE | re.DOTALL)
WIDTH, KEPT = 120, "\xa0"  # a space that does not end a line

Changes = dict[str, Any]
Ask = Callable[..., Future[Prediction]]
"""Returns the future prediction of settings and a stage, the autoencoder's unless given."""


def of_predictions(root: Path) -> dict[Path, str]:
    """Return the current text of the documents that show predictions."""
    with Predictor(2) as predictor:
        asked: dict[tuple[Stage, str], Future[Prediction]] = {}

        def ask(settings: Settings, stage: Stage = "autoencoder") -> Future[Prediction]:
            ignored = {"name", "seed", *(["ldm"] if stage == "autoencoder" else [])}
            key = (stage, settings.model_dump_json(exclude=ignored))
            if key not in asked:
                asked[key] = predictor.submit(settings, stage)
            return asked[key]

        def current(table: re.Match[str]) -> str:
            special = {"presets": preset_table, "combinations": combination_table, "rules of thumb": rules_table}
            return table["head"] + special.get(table["name"], guide_table)(table, ask)

        texts = preset_texts(ask)
        for name in ("README.md", "README.zh-CN.md", "docs/memory_guide.md", "docs/memory_guide.zh-CN.md"):
            text = TABLE.sub(current, (root / name).read_text(encoding="utf-8"))
            texts[root / name] = OUTPUT.sub(lambda block: block[1] + output_of(block["command"]) + block[4], text)
    return texts


@functools.cache
def output_of(command: str) -> str:
    """Return what a ladder, the only command whose output documents show, prints now."""
    python, script, *words = shlex.split(command)
    assert (python, script) == ("python", "scripts/oom_ladder.py"), f"{command}: not the command of a ladder"
    given = oom_ladder.parse(words)
    settings = load_settings(CONFIGS.parent / given.config, given.overrides, stage=given.stage)
    ladder = walk(settings, given.stage, given.budget_bytes, given.order, gpu=chosen_gpu(given.gpu))
    return describe_ladder(ladder, None).rstrip() + "\n"


def gib(nbytes: float, digits: int = 1) -> str:
    """Return a number of bytes in GiB, without the unit."""
    return f"{nbytes / GIB:.{digits}f}"


def _hours(prediction: Prediction) -> str:
    return f"{prediction.hours(check_gpu(GPU)):.1f}"


def _rows(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _axes(grid: tuple[int, ...]) -> str:
    return "x".join(map(str, grid))


# The memory guide: each row of a table has, in a comment, the keys in which its config differs from the base


def base_settings() -> Settings:
    """Return 256x256x64 as people first try it: stock blocks, fp32, perceptual loss, a full discriminator."""
    first: Changes = {"batch_size": 1, "gradient_accumulation_steps": 1, "use_gradient_checkpointing": False}
    first |= {"use_perceptual_loss": True, "perceptual": {"network": "lpips-squeeze"}}
    first |= {"discriminator": {"num_layers_d": 3, "num_channels": 32}}
    networks = {"implementation": "monai", "num_channels": [32, 64, 64], "attention_levels": [False, False, True]}
    return Settings.model_validate(
        {
            "name": "guide",
            "data": {"voxel_size": [256, 256, 64]},
            "autoencoder": {**networks, "training": first},
            "ldm": {"training": {"batch_size": 4}},
            "device": {"mixed_precision": False},
        }
    )


def guide_configs(table: re.Match[str]) -> dict[str, Settings]:
    """Return the configs of a table by its first column; on a ladder, each row keeps the changes above it."""
    common = read_overrides((table["common"] or "").split())
    configs = {}
    for line in table["rows"].splitlines():
        cell = line.split("|")[1].strip()
        preset, keys = re.match(r"`configs/(.+)`", cell), re.search(r"<!-- (.+) -->", cell)
        base = load_settings(CONFIGS / preset[1]) if preset else base_settings()
        changes = common | (read_overrides(keys[1].split()) if keys else {})
        configs[cell] = base.with_overrides(changes)
        common = changes if table["name"] == "ladder" else common
    return configs


def guide_table(table: re.Match[str], ask: Ask) -> str:
    """Return the rows of a table: peaks, beside the row above on a ladder and beside the first row elsewhere."""
    is_ladder, stage = table["name"] == "ladder", "ldm" if table["name"] == "stage 2" else "autoencoder"
    answers = {cell: ask(settings, stage) for cell, settings in guide_configs(table).items()}
    base = above = next(iter(answers.values())).result()
    lines = []
    for cell, answer in answers.items():
        found = answer.result()
        peak = found.peak_allocated_bytes
        change = "" if found is base else f"{peak / above.peak_allocated_bytes - 1:+.0%}"
        reserved = (found.peak_reserved_default_bytes, found.peak_reserved_expandable_bytes)
        both = [" / ".join(gib(nbytes, 2) for nbytes in reserved)] if is_ladder else []
        compute = f"{found.flops['total'] / base.flops['total']:.2f}x"
        phase = [found.phase] if is_ladder else []
        lines.append([cell, gib(peak, 2), change, *both, gib(found.host_bytes, 2), compute, *phase])
        above = found if is_ladder else base
    return _rows(lines)


def combination_table(table: re.Match[str], ask: Ask) -> str:
    """Return the rows of the combinations, each with what both stages need."""
    asked = {cell: (ask(preset), ask(preset, "ldm")) for cell, preset in guide_configs(table).items()}
    lines = []
    for line, (first, second) in zip(table["rows"].splitlines(), asked.values(), strict=True):
        one, two = first.result(), second.result()
        sizes = [gib(nbytes, 2) for nbytes in (one.peak_allocated_bytes, one.required_bytes, two.required_bytes)]
        lines.append([*(cell.strip() for cell in line.split("|")[1:5]), *sizes, f"{_hours(one)} + {_hours(two)}"])
    return _rows(lines)


def rules_table(table: re.Match[str], ask: Ask) -> str:
    """Return the rows that compare rules of thumb with what stock MONAI and this project need, and stock's speed."""
    configs = guide_configs(table)
    asked = [
        [ask(s.with_overrides({"autoencoder.implementation": i})) for i in ("monai", "lean")] for s in configs.values()
    ]
    seconds = [stock.result().seconds_per_step(check_gpu(GPU)) for stock, _ in asked]
    lines = []
    for line, answers, time in zip(table["rows"].splitlines(), asked, seconds, strict=True):
        config, memory, speed = (cell.strip() for cell in line.split("|")[1:4])
        needs = [gib(answer.result().required_bytes) for answer in answers]
        lines.append([config, memory, speed, *needs, f"{seconds[0] / time:.2f}x"])
    return _rows(lines)


# The presets


def presets() -> list[Settings]:
    """Return all presets."""
    return [load_settings(path) for path in sorted(CONFIGS.glob("*.yaml"))]


def preset_table(table: re.Match[str], ask: Ask) -> str:
    """Return the rows of the presets, smallest stage 1 first."""
    asked = []
    for preset in presets():
        ladder = [rung for rung in build_rungs(preset, "autoencoder", "lossless-first") if rung.same_mathematics]
        asked.append((preset, len(ladder) - 1, ask(preset), ask(preset, "ldm"), ask(ladder[-1].settings)))
    rows = []
    for preset, left, *answers in sorted(asked, key=lambda row: row[2].result().required_bytes):
        first, second, floor = (answer.result() for answer in answers)
        plan = preset.autoencoder.training
        others = [first.run_peaks["validation"], *map(second.run_peaks.get, ("encoding the latents", "sampling"))]
        knobs_on = {
            "lean blocks": preset.autoencoder.implementation == "lean",
            "AMP": preset.device.mixed_precision,
            "checkpointing": plan.checkpoints_blocks,
            "nested": plan.nests_checkpoints,
            f"slabs of {plan.slab_rows}": plan.slab_rows > 0,
            "offload": plan.use_gradient_checkpointing_offload,
        }
        rows.append(
            [
                f"`{preset.name}`",
                _axes(preset.training_grid),
                ", ".join(map(str, preset.autoencoder.num_channels)),
                f"{plan.batch_size} x {plan.gradient_accumulation_steps}",
                f"{gib(first.required_bytes)} GiB",
                f"{gib(second.required_bytes)} GiB",
                " / ".join(gib(peak["reserved_bytes"] if peak else 0) for peak in others) + " GiB",
                f"{_hours(first)} + {_hours(second)}",
                ", ".join(name for name, is_on in knobs_on.items() if is_on),
                str(left),
                f"{gib(floor.required_bytes)} GiB",
            ]
        )
    return _rows(rows)


def knobs(settings: Settings) -> dict[Stage, dict[str, Changes]]:
    """Return the changes that a preset's users come to try: each one key, and checkpointing if it needs that."""
    plan, levels, first = settings.autoencoder.training, settings.autoencoder.attention_levels, "autoencoder.training"
    is_mixed, slabs = settings.device.mixed_precision, {f"{first}.slab_rows": 0 if plan.slab_rows else 16}
    in_slabs = f"slab_rows={slabs[f'{first}.slab_rows']}"
    prefix = "" if plan.checkpoints_blocks else "checkpointing, "
    checkpointed = {f"{first}.use_gradient_checkpointing": True}
    changes = {
        **_in_both_stages(settings, "autoencoder"),
        f"{prefix}checkpoint_levels=1": {**checkpointed, f"{first}.checkpoint_levels": 1},
        f"{prefix}offload": {f"{first}.use_gradient_checkpointing_offload": True},
        f"{prefix}{in_slabs}": {**checkpointed, **slabs},
    }
    if not plan.checkpoints_blocks:
        changes[in_slabs] = slabs
    changes[f"mixed_precision={str(not is_mixed).lower()}"] = {"device.mixed_precision": not is_mixed}
    if settings.autoencoder.variant == "monai":  # the channels of published weights are fixed
        halved = tuple(count // 2 for count in settings.autoencoder.num_channels)
        changes["half the channels"] = {"autoencoder.num_channels": halved}
    if sum(levels) > 1:
        lowest = (*(False for _ in levels[1:]), True)
        changes["attention on the lowest level only"] = {"autoencoder.attention_levels": lowest}
    if any(levels):
        changes["no attention"] = {"autoencoder.attention_levels": tuple(False for _ in levels)}
    if settings.data.patch_size is not None:
        changes["patch_size=null"] = {"data.patch_size": None}
    return {"autoencoder": changes, "ldm": _in_both_stages(settings, "ldm")}


def _in_both_stages(settings: Settings, stage: Stage) -> dict[str, Changes]:
    """Return the smallest micro-batch, or twice that, with as many volumes per update; and checkpointing on or off."""
    plan, section = settings.training_of(stage), f"{stage}.training"
    size, is_on = 1 if plan.batch_size > 1 else 2, plan.checkpoints_blocks
    steps = max(1, plan.samples_per_rank // size)
    micro_batch = {f"{section}.batch_size": size, f"{section}.gradient_accumulation_steps": steps}
    return {
        f"batch_size={size}, accumulated {steps}": micro_batch,
        "no checkpointing" if is_on else "checkpointing": {f"{section}.use_gradient_checkpointing": not is_on},
    }


def preset_texts(ask: Ask) -> dict[Path, str]:
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
            lines += _wrapped(f"Stage {number}: {need(as_it_is.result())}. With one change:", entries)
        path = CONFIGS / f"{name}.yaml"
        header = "".join(f"{line}\n" for line in lines)
        texts[path] = HEADER.sub(header, path.read_text(encoding="utf-8"), count=1)
    return texts


def need(found: Prediction) -> str:
    """Return what a stage needs, as a header says it."""
    host = f" + {gib(found.host_bytes)} of the host" if found.host_bytes else ""
    return f"{gib(found.required_bytes)} GiB{host}, {_hours(found)} h"


def _wrapped(before: str, entries: list[str]) -> list[str]:
    text = f"{before} {'; '.join(entry.replace(' ', KEPT) for entry in entries)}."
    lines = textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)
    return [line.replace(KEPT, " ") for line in lines]
