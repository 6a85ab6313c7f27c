"""The layout of runs/ in the working folder, or of the folder LEAN3D_RUNS: runs, generated volumes and caches.

Nothing is written beside the user's volumes, because their folder may be read-only.
"""

from __future__ import annotations

import os
from pathlib import Path

RUNS = Path(os.environ.get("LEAN3D_RUNS") or "runs")
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

used_caches: set[Path] = set()
"""The subfolders of prepared and latents that this process has opened; a run records them for scripts/clean.py."""


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
        self.caches = path / "caches.txt"

    def best_weights(self, stage: str) -> Path:
        """Return the path of a stage's weights at its best validation so far."""
        return self.path / f"{stage}_best.safetensors"

    def known_caches(self) -> set[str] | None:
        """Return the caches that the run has used, such as latents/3f0c; None if it did not record them."""
        return set(self.caches.read_text(encoding="utf-8").split()) if self.caches.is_file() else None

    def weights(self, stage: str) -> Path:
        """Return the path of a stage's finished weights."""
        return self.path / f"{stage}.safetensors"
