"""Write the presets' predicted peaks into both READMEs and into their own headers, or check that all are current."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runtime.cli import parser, run
from runtime.files.reading import read_text, reason
from settings import ConfigError, Settings, load_settings

if TYPE_CHECKING:
    from memory.predict import Prediction, Predictor
    from scripts.dev.guide.knobs import Knob
    from scripts.dev.guide.stored import StoredPredictor

ROOT = Path(__file__).resolve().parents[2]
READMES = ("README.md", "README.zh-CN.md")
BEGIN, END = "<!-- presets: begin (scripts/dev/preset_table.py) -->", "<!-- presets: end -->"
HEADER = re.compile(r"^# Predicted .*?(?=^# Start: )", re.MULTILINE | re.DOTALL)
GPU = "RTX 4090"
COLUMNS = (
    "preset",
    "grid",
    "channels",
    "batch x accumulation",
    "stage 1 needs",
    "stage 2 needs",
    "validation / encoding / sampling",
    f"hours on {GPU}",
    "memory knobs on",
    "rungs left",
    "stage 1 on the last rung",
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python scripts/dev/preset_table.py", "python scripts/dev/preset_table.py --check"])
    result.add_argument("--check", action="store_true", help="write nothing; exit 2 when anything is not current")
    result.add_argument("--readme", action="append", metavar="FILE", help=f"default: {' and '.join(READMES)}")
    return result.parse_args(arguments)


@dataclass(frozen=True)
class Preset:
    """A preset with the predictions of both stages, and of the last rung that keeps the mathematics of stage 1."""

    settings: Settings
    first: Prediction
    second: Prediction
    floor: Prediction
    floor_settings: Settings
    rungs_left: int


def main(options: argparse.Namespace) -> int:
    """Predict every preset, put the table between the markers, the peaks into the headers; keep the predictions."""
    from memory.ladder.walk import NUM_WORKERS
    from scripts.dev.guide import stored
    from scripts.dev.guide.knobs import predict_knobs

    readmes = [Path(name) for name in options.readme or [ROOT / name for name in READMES]]
    texts = {readme: _read(readme) for readme in readmes}
    for readme, text in texts.items():
        if BEGIN not in text or END not in text:
            raise ConfigError(f"{readme}: the markers of the table are missing; write the two lines {BEGIN} and {END}")
    presets = predict_presets()
    predictor = stored.RecordingPredictor(NUM_WORKERS)
    with predictor:
        changed = predict_knobs([preset.settings for preset in presets], predictor)
    current = {readme: with_table(text, presets) for readme, text in texts.items()}
    for preset in presets:
        config = ROOT / "configs" / f"{preset.settings.name}.yaml"
        text = header(preset, changed[preset.settings.name])
        current[config] = HEADER.sub(text, config.read_text(encoding="utf-8"), count=1)
    current[stored.PATH] = stored.updated({"presets": answers(presets), "knobs": predictor.answers})
    stale = [path for path, text in current.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if options.check and stale:
        names = ", ".join(path.name for path in stale)
        raise ConfigError(f"{names}: the predicted peaks are not current; run python scripts/dev/preset_table.py")
    for path in stale:
        path.write_text(current[path], encoding="utf-8")
        print(f"{path}: predicted peaks written")
    return 0


def _read(readme: Path) -> str:
    try:
        return read_text(readme)
    except OSError as error:
        raise ConfigError(f"--readme: {readme} cannot be read ({reason(error)}); give a Markdown file") from None


def predict_presets(predictor: Predictor | StoredPredictor | None = None) -> list[Preset]:
    """Predict all presets, smallest stage 1 first."""
    from memory.ladder.rungs import build_rungs
    from memory.ladder.walk import NUM_WORKERS
    from memory.predict import Predictor

    presets = {path.stem: load_settings(path) for path in sorted((ROOT / "configs").glob("*.yaml"))}
    with predictor or Predictor(NUM_WORKERS) as ask:
        asked = {}
        for name, settings in presets.items():
            ladder = [rung for rung in build_rungs(settings, "autoencoder", "lossless-first") if rung.same_mathematics]
            floor = ladder[-1].settings
            first, second = ask.submit(settings, "autoencoder"), ask.submit(settings, "ldm")
            asked[name] = (first, second, ask.submit(floor, "autoencoder"), floor, len(ladder) - 1)
        found = [
            Preset(presets[name], first.result(), second.result(), answer.result(), floor, left)
            for name, (first, second, answer, floor, left) in asked.items()
        ]
    return sorted(found, key=lambda preset: preset.first.required_bytes)


def answers(presets: list[Preset]) -> dict[str, dict[str, Any]]:
    """Return every prediction of the table by its question, for docs/predictions.json."""
    from scripts.dev.guide.stored import question

    found = {}
    for preset in presets:
        found[question(preset.settings, "autoencoder")] = preset.first.to_json()
        found[question(preset.settings, "ldm")] = preset.second.to_json()
        found[question(preset.floor_settings, "autoencoder")] = preset.floor.to_json()
    return found


def with_table(text: str, presets: list[Preset]) -> str:
    """Return a README whose table is that of the presets."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{preset_table(presets)}\n{END}{tail}"


def header(preset: Preset, changed: list[tuple[Knob, Prediction]]) -> str:
    """Return the lines of a preset's header that state what it needs, and what it would need with one change."""
    from scripts.dev.guide.knobs import knob_lines

    lines = [
        f"# Predicted by scripts/dev/preset_table.py: memory with the CUDA context, least hours on an {GPU}; "
        "(x): relative compute.",
        *knob_lines(f"Stage 1: {_need(preset.first)}", "autoencoder", preset.first, changed),
        *knob_lines(f"Stage 2: {_need(preset.second)}", "ldm", preset.second, changed),
    ]
    return "".join(f"{line}\n" for line in lines)


def _need(stage: Prediction) -> str:
    from memory.kernels.gpus import check_gpu

    hours = f"{stage.hours(check_gpu(GPU)):.1f}"
    return f"{_gib(stage.required_bytes)}, {'under 0.1' if hours == '0.0' else hours} h"


def preset_table(presets: list[Preset]) -> str:
    """Return the table of the presets as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(_row(preset))} |" for preset in presets]
    return "\n".join(lines)


def _row(preset: Preset) -> list[str]:
    settings = preset.settings
    training = settings.autoencoder.training
    return [
        f"`{settings.name}`",
        "x".join(map(str, settings.training_grid)),
        ", ".join(map(str, settings.autoencoder.num_channels)),
        f"{training.batch_size} x {training.gradient_accumulation_steps}",
        _gib(preset.first.required_bytes),
        _gib(preset.second.required_bytes),
        _outside_steps(preset),
        _hours(preset),
        _knobs(settings),
        str(preset.rungs_left),
        _gib(preset.floor.required_bytes),
    ]


def _outside_steps(preset: Preset) -> str:
    """Return what validation of stage 1, encoding the latents and sampling reserve."""
    second = preset.second.run_peaks
    peaks = (preset.first.run_peaks["validation"], second["encoding the latents"], second["sampling"])
    return " / ".join(_gib(peak["reserved_bytes"]).removesuffix(" GiB") for peak in peaks) + " GiB"


def _hours(preset: Preset) -> str:
    from memory.kernels.gpus import check_gpu

    return " + ".join(f"{stage.hours(check_gpu(GPU)):.1f}" for stage in (preset.first, preset.second))


def _knobs(settings: Settings) -> str:
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


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"


if __name__ == "__main__":
    sys.exit(run(main, parse()))
