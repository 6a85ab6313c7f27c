"""Write the table of presets with their predicted peaks into README.md, or check that it is current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from settings import ConfigError, Settings, load_settings
from settings.command_line import parser, run

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- presets: begin (scripts/preset_table.py) -->", "<!-- presets: end -->"
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
    result = parser(__doc__ or "", ["python scripts/preset_table.py", "python scripts/preset_table.py --check"])
    result.add_argument("--check", action="store_true", help="write nothing; exit 2 when the table is not current")
    result.add_argument("--readme", default=str(ROOT / "README.md"), metavar="FILE", help="default: README.md")
    return result.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    """Predict every preset and put the table between the markers."""
    path = Path(options.readme)
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ConfigError(f"{path}: the markers of the table are missing; write the two lines {BEGIN} and {END}")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    current = f"{head}{BEGIN}\n{preset_table()}\n{END}{tail}"
    if options.check:
        if current != text:
            raise ConfigError(f"{path}: the table of presets is not current; run python scripts/preset_table.py")
        return 0
    path.write_text(current, encoding="utf-8")
    print(f"{path}: table of presets written")
    return 0


def preset_table() -> str:
    """Return the table of all presets as Markdown, smallest stage 1 first."""
    from memory import Prediction, Predictor
    from memory.ladder import NUM_WORKERS
    from memory.rungs import build_rungs

    presets = {path.stem: load_settings(path) for path in sorted((ROOT / "configs").glob("*.yaml"))}
    with Predictor(NUM_WORKERS) as predictor:
        asked = {}
        for name, settings in presets.items():
            ladder = [rung for rung in build_rungs(settings, "autoencoder", "lossless-first") if rung.same_mathematics]
            floor = predictor.submit(ladder[-1].settings, "autoencoder")
            stages = [predictor.submit(settings, stage) for stage in ("autoencoder", "ldm")]
            asked[name] = (stages[0], stages[1], floor, len(ladder) - 1)
        rows: list[tuple[Settings, Prediction, Prediction, Prediction, int]] = [
            (presets[name], first.result(), second.result(), floor.result(), left)
            for name, (first, second, floor, left) in asked.items()
        ]
    rows.sort(key=lambda row: row[1].required_bytes)
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(_row(*row))} |" for row in rows]
    return "\n".join(lines)


def _row(settings: Settings, first, second, floor, rungs_left: int) -> list[str]:
    training = settings.autoencoder.training
    return [
        f"`{settings.name}`",
        "x".join(map(str, settings.training_grid)),
        ", ".join(map(str, settings.autoencoder.num_channels)),
        f"{training.batch_size} x {training.gradient_accumulation_steps}",
        _gib(first.required_bytes),
        _gib(second.required_bytes),
        _knobs(settings),
        str(rungs_left),
        _gib(floor.required_bytes),
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
