"""Where a run keeps its files."""

from __future__ import annotations

from pathlib import Path

RUNS = Path("runs")


class RunFolder:
    """Paths inside runs/<name>."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.previews = path / "previews"
        self.tensorboard = path / "tensorboard"
        self.metrics = path / "metrics.jsonl"
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.report = path / "report.html"

    def weights(self, stage: str) -> Path:
        """Return where the finished weights of a stage go."""
        return self.path / f"{stage}.safetensors"
