"""The layout of runs/ in the working folder: the runs themselves, generated volumes and caches.

Nothing is written beside the user's volumes, because their folder may be read-only.
"""

from __future__ import annotations

from pathlib import Path

RUNS = Path("runs")
PHANTOMS = RUNS / "phantoms"
"""Generated volumes."""
CHECKS = RUNS / "checks"
"""Results of checking volumes, so that unchanged files are not read again."""
PREPARED = RUNS / "prepared"
"""Volumes on the network's grid. All runs share them; the key of each subfolder covers everything they depend on."""
LATENTS = RUNS / "latents"
"""Encoded volumes. All runs share them; the key of each subfolder covers everything they depend on."""

SHARED_NAMES = ("phantoms", "checks", "latents", "prepared")
"""Names below runs/ that no run may have."""

STAGES = ("autoencoder", "ldm")


class RunFolder:
    """The paths inside runs/<name>."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.previews = path / "previews"
        self.tensorboard = path / "tensorboard"
        self.metrics = path / "metrics.jsonl"
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.evaluation = path / "evaluation.json"
        self.report = path / "report.html"

    def best_weights(self, stage: str) -> Path:
        """Return the path of a stage's weights at its best validation so far."""
        return self.path / f"{stage}_best.safetensors"

    def weights(self, stage: str) -> Path:
        """Return the path of a stage's finished weights."""
        return self.path / f"{stage}.safetensors"
