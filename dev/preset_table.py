"""Write the presets' predicted peaks into README.md and into their own headers, or check that both are current."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import parser, run
from settings import ConfigError, Settings, load_settings
from storage.reading import read_text, reason

if TYPE_CHECKING:
    from memory.predict import Prediction

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- presets: begin (dev/preset_table.py) -->", "<!-- presets: end -->"
HEADER = re.compile(r"^# Predicted peak: .*$", re.MULTILINE)
COLUMNS = (
    "preset",
    "grid",
    "channels",
    "batch x accumulation",
    "stage 1 needs",
    "stage 2 needs",
    "memory knobs on",
    "rungs left",
    "as far as the same mathematics goes",
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    result = parser(__doc__ or "", ["python dev/preset_table.py", "python dev/preset_table.py --check"])
    result.add_argument("--check", action="store_true", help="write nothing; exit 2 when anything is not current")
    result.add_argument("--readme", default=str(ROOT / "README.md"), metavar="FILE", help="default: README.md")
    return result.parse_args(arguments)


@dataclass(frozen=True)
class Preset:
    """A preset with the predictions of both stages, and of the last rung that keeps the mathematics of stage 1."""

    settings: Settings
    first: Prediction
    second: Prediction
    floor: Prediction
    rungs_left: int


def main(options: argparse.Namespace) -> int:
    """Predict every preset, put the table between the markers and the peaks into the headers."""
    readme = Path(options.readme)
    try:
        text = read_text(readme)
    except OSError as error:
        raise ConfigError(f"--readme: {readme} cannot be read ({reason(error)}); give a Markdown file") from None
    if BEGIN not in text or END not in text:
        raise ConfigError(f"{readme}: the markers of the table are missing; write the two lines {BEGIN} and {END}")
    presets = predict_presets()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    current = {readme: f"{head}{BEGIN}\n{preset_table(presets)}\n{END}{tail}"}
    for preset in presets:
        config = ROOT / "configs" / f"{preset.settings.name}.yaml"
        current[config] = HEADER.sub(header(preset), config.read_text(encoding="utf-8"), count=1)
    stale = [path for path, wanted in current.items() if path.read_text(encoding="utf-8") != wanted]
    if options.check and stale:
        names = ", ".join(path.name for path in stale)
        raise ConfigError(f"{names}: the predicted peaks are not current; run python dev/preset_table.py")
    for path in stale:
        path.write_text(current[path], encoding="utf-8")
        print(f"{path}: predicted peaks written")
    return 0


def predict_presets() -> list[Preset]:
    """Predict all presets, smallest stage 1 first."""
    from memory.ladder.rungs import build_rungs
    from memory.ladder.walk import NUM_WORKERS
    from memory.predict import Predictor

    presets = {path.stem: load_settings(path) for path in sorted((ROOT / "configs").glob("*.yaml"))}
    with Predictor(NUM_WORKERS) as predictor:
        asked = {}
        for name, settings in presets.items():
            ladder = [rung for rung in build_rungs(settings, "autoencoder", "lossless-first") if rung.same_mathematics]
            floor = predictor.submit(ladder[-1].settings, "autoencoder")
            stages = [predictor.submit(settings, stage) for stage in ("autoencoder", "ldm")]
            asked[name] = (stages[0], stages[1], floor, len(ladder) - 1)
        found = [
            Preset(presets[name], first.result(), second.result(), floor.result(), left)
            for name, (first, second, floor, left) in asked.items()
        ]
    return sorted(found, key=lambda preset: preset.first.required_bytes)


def header(preset: Preset) -> str:
    """Return the line of a preset's header that states its predicted peaks."""
    first, second = _gib(preset.first.required_bytes), _gib(preset.second.required_bytes)
    return f"# Predicted peak: {first} in stage 1, {second} in stage 2 (written by dev/preset_table.py)"


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
        _knobs(settings),
        str(preset.rungs_left),
        _gib(preset.floor.required_bytes),
    ]


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
