"""Time of one forward and backward of the autoencoder beside stock MONAI, knob by knob."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from models.autoencoder import build_autoencoder
from settings import AutoencoderSettings

VARIANTS: dict[str, dict[str, Any]] = {
    "stock": {"implementation": "monai", "use_gradient_checkpointing": False},
    "lean": {"use_gradient_checkpointing": False},
    "checkpointing": {"use_gradient_checkpointing": True},
    "slabs": {"use_gradient_checkpointing": True, "slab_rows": 16, "use_nested_checkpointing": False},
    "slabs, nested": {"use_gradient_checkpointing": True, "slab_rows": 16},
}
"""The training knobs of each variant, and the implementation where it is not lean."""


def build_variant(settings: AutoencoderSettings, knobs: Mapping[str, Any]) -> nn.Module:
    """Build the autoencoder of `settings` with other memory knobs."""
    knobs = dict(knobs)
    implementation = knobs.pop("implementation", "lean")
    training = settings.training.model_copy(update=knobs)
    return build_autoencoder(settings.model_copy(update={"implementation": implementation, "training": training}))


def step_times(
    settings: AutoencoderSettings,
    grid: Sequence[int] = (96, 96, 32),
    repeats: int = 5,
    device: str = "cpu",
    variants: Mapping[str, Mapping[str, Any]] = VARIANTS,
) -> dict[str, float]:
    """Return the median seconds of each variant in fp32, after one round that is not counted.

    The variants take turns in every round, so that whatever else slows the machine down slows all of them.
    """
    x = torch.randn(1, settings.in_channels, *grid, device=device)
    models = {name: build_variant(settings, knobs).to(device) for name, knobs in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(repeats + 1):
        for name, model in models.items():
            times[name].append(_time(lambda model=model: _step(model, x), device))  # type: ignore[misc]
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    reconstruction, mean, sigma = model(x)
    ((reconstruction - x).abs().mean() + 1e-6 * (mean.square().mean() + sigma.mean())).backward()


def _time(function: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start
