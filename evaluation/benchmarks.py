"""Our step beside stock MONAI, with our knobs added one at a time, and a 3d_ldm-style loop: peak memory and operations.

Each is tracked on fake tensors, as it would run on a GPU.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from monai.losses.adversarial_loss import PatchAdversarialLoss
from torch import Tensor
from torch.nn import functional as F

from memory.predict import Predictor
from memory.predict.prediction import GIB
from models import build_autoencoder, build_discriminator
from settings import Settings

REFERENCE = "3d_ldm-style loop, fp32"
Row = dict[str, Any]


def measure_peaks(grids: Sequence[tuple[int, ...]], progress: Callable[[str], None]) -> list[Row]:
    """Return peak bytes and FLOPs by grid and variant."""
    rows = []
    for grid in grids:
        settings = base_settings(grid)
        with Predictor() as predictor, fresh_processes() as processes:
            asked: dict[str, Future[Any]] = {REFERENCE: processes.submit(track_reference, settings)}
            for variant in VARIANTS:
                changed = settings.with_overrides(variant.changes)
                asked[variant.name] = (
                    processes.submit(_track_matrix, changed)
                    if variant.has_matrix
                    else predictor.submit(changed, "autoencoder")
                )
            for name, future in asked.items():
                answer = future.result()
                values = answer if isinstance(answer, dict) else answer.to_json()
                figures = {key: values[key] for key in ("peak_allocated_bytes", "host_bytes")}
                is_ours = any(variant.is_ours for variant in VARIANTS if variant.name == name)
                total = values["flops"]["total"]
                rows.append({"grid": list(grid), "variant": name, "is_ours": is_ours, **figures, "flops": total})
                progress(f"{name}, {_grid(rows[-1])}")
    return rows


def fresh_processes() -> ProcessPoolExecutor:
    """Return processes for what no config can express: a prediction installs autocast rules that stay."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)


def _track_matrix(settings: Settings) -> Row:
    """Track the step that training makes, with MONAI's default attention."""
    from memory.predict.step import build_step, tracked_step

    def build(*question: Any) -> Any:
        step = build_step(*question)
        use_matrix_attention(step.networks_on_device["autoencoder"])
        return step

    with tracked_step(settings, "autoencoder", build=build) as (_, tracker):
        return _tracked(tracker)


def track_reference(settings: Settings) -> Row:
    """Track one step of the 3d_ldm-style loop; a first step makes the optimizers' states."""
    from memory.predict.emulation import measure_peak

    def run(tracker: Any) -> None:
        loop = ReferenceLoop(settings)
        for network in (loop.autoencoder, loop.discriminator):
            tracker.adopt([*network.parameters(), *network.buffers()], "parameters")
        images = torch.zeros(1, 1, *settings.training_grid)
        loop.step(images)
        tracker.reset()
        loop.step(images)

    return _tracked(measure_peak(run))


def _tracked(tracker: Any) -> Row:
    total = tracker.flops.total() - tracker.flops["attention"]  # which is in the others, too
    return {"peak_allocated_bytes": tracker.peak["device"], "host_bytes": 0, "flops": {"total": total}}


def document_text(rows: Sequence[Row]) -> str:
    """Return benchmarks.md."""
    by_variant: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], {})[_grid(row)] = row
    heads = list(by_variant[STOCK])
    shown = heads[min(2, len(heads) - 1)]
    stock = by_variant[STOCK][shown]
    lines = [
        "# Benchmarks",
        "",
        "Written by `python scripts/benchmark.py`; `docs/benchmarks.json` has the figures that its `--json` writes. "
        "Memory is predicted, tensor by tensor, for a GPU; no GPU was used. All rows but the 3d_ldm-style loop make "
        "the same step and optimise the same objective: L1 + KL + 0.01 times the least-squares adversarial loss of the "
        "raw logits for the autoencoder, the mean of the two least-squares losses for the discriminator. The tutorial "
        "that the loop follows optimises the same terms with MONAI's LeakyReLU between logits and squares, and the "
        "discriminator's loss times 0.01. Neither side has a perceptual term.",
        "",
        "## Peak memory of one training step, GiB",
        "",
        "Under bf16 autocast, except the first row. Autoencoder [16, 32, 64] with attention at the lowest level, "
        f"discriminator, both Adam optimizers, batch 1; tensors only. Compute is relative to {STOCK} at {shown}.",
        "",
        f"| | {' | '.join(heads)} | compute |",
        "|---|" + "---:|" * (len(heads) + 1),
    ]
    for name, by_grid in by_variant.items():
        cells = [f"{row['peak_allocated_bytes'] / GIB:.2f}" for row in by_grid.values()]
        bold = f"**{name}**" if by_grid[shown]["is_ours"] else name
        lines.append(f"| {' | '.join([bold, *cells])} | {by_grid[shown]['flops'] / stock['flops']:.2f}x |")
    ranked = sorted((by_grid[shown] for by_grid in by_variant.values()), key=lambda row: row["peak_allocated_bytes"])
    ours, rival = (next(row for row in ranked if row["is_ours"] == is_ours) for is_ours in (True, False))
    factors = [f"{row['peak_allocated_bytes'] / ours['peak_allocated_bytes']:.1f}" for row in (rival, stock)]
    verdict = (
        f"At {shown} our leanest step needs {factors[0]} times less than the leanest of the others "
        f"({rival['variant']}) and {factors[1]} times less than {STOCK}."
    )
    return "\n".join([*lines, "", verdict]) + "\n"


def _grid(row: Row) -> str:
    return "x".join(map(str, row["grid"]))


@dataclass(frozen=True)
class Variant:
    """One way to make the same step; `has_matrix` replaces SDPA by MONAI's default attention, the N x N matrix."""

    name: str
    is_ours: bool
    changes: dict[str, Any]
    has_matrix: bool = False


STOCK, STOCK_CHECKPOINTED = "stock MONAI, SDPA", "stock MONAI, SDPA, use_checkpoint"
_TRAINING = "autoencoder.training"
_STOCK = {"autoencoder.implementation": "monai", f"{_TRAINING}.use_gradient_checkpointing": False}
_LEAN = {**_STOCK, "autoencoder.implementation": "lean"}
_CHECKPOINTED = {f"{_TRAINING}.use_gradient_checkpointing": True}
_SLABS = {**_LEAN, **_CHECKPOINTED, f"{_TRAINING}.slab_rows": 8}
_OFFLOAD = {f"{_TRAINING}.use_gradient_checkpointing_offload": True, f"{_TRAINING}.use_nested_checkpointing": False}

VARIANTS = (
    Variant("stock MONAI, default attention", False, _STOCK, has_matrix=True),
    Variant(STOCK, False, _STOCK),
    Variant(STOCK_CHECKPOINTED, False, {**_STOCK, **_CHECKPOINTED}),
    Variant("ours, lean blocks", True, _LEAN),
    Variant("ours, checkpointing", True, {**_LEAN, **_CHECKPOINTED}),
    Variant("ours, nested, slabs of 8", True, _SLABS),
    Variant("ours, offload, slabs of 8", True, {**_SLABS, **_OFFLOAD}),
)


def base_settings(grid: tuple[int, ...]) -> Settings:
    """Return the step that all variants make: combination A of the memory guide, on a given grid."""
    training = {
        "batch_size": 1,
        "gradient_accumulation_steps": 1,
        "use_perceptual_loss": False,
        "optimizer": "adam",
        "adversarial_start_step": 0,
        "discriminator": {"num_layers_d": 2, "num_channels": 16},
    }
    autoencoder = {"num_channels": (16, 32, 64), "norm_num_groups": 8, "attention_levels": [False, False, True]}
    return Settings.model_validate(
        {
            "name": "benchmark",
            "data": {"voxel_size": grid},
            "autoencoder": {**autoencoder, "training": training},
            "device": {"mixed_precision": True},
        }
    )


def use_matrix_attention(network: Any) -> None:
    """Switch the attention blocks of a stock network to MONAI's default, which stores the N x N matrix."""
    blocks = [module for module in network.modules() if hasattr(module, "use_flash_attention")]
    assert blocks, "there is no attention to switch"
    for block in blocks:
        block.use_flash_attention = False


ADVERSARIAL_WEIGHT, KL_WEIGHT, LEARNING_RATE = 0.01, 1e-7, 1e-4


class ReferenceLoop:
    """A loop written like MONAI's 3d_ldm tutorial: stock networks, fp32, plain Adam, no accumulation.

    What it shares with the tutorial: L1, KL as a sum with a weight of 1e-7, MONAI's adversarial loss, the discriminator
    not frozen in the generator's step, no clipping. The perceptual term, which needs weights from the network, is left
    out of both sides of a comparison.
    """

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        stock = {"autoencoder.implementation": "monai", "autoencoder.training.use_gradient_checkpointing": False}
        self.autoencoder = build_autoencoder(settings.with_overrides(stock).autoencoder)
        use_matrix_attention(self.autoencoder)
        self.discriminator = build_discriminator(settings.autoencoder)
        # Fused, because the other forms read the step counter, which has no value in a fake tensor.
        self.generator_optimizer, self.discriminator_optimizer = (
            torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, fused=True)
            for network in (self.autoencoder, self.discriminator)
        )
        self.adversarial = PatchAdversarialLoss(criterion="least_squares", no_activation_leastsq=False)

    def step(self, images: Tensor) -> None:
        """Make one update of both networks."""
        self.generator_optimizer.zero_grad(set_to_none=True)
        reconstruction, mean, sigma = self.autoencoder(images, None)
        reconstruction_loss = F.l1_loss(reconstruction, images)
        variance = sigma.square()
        kl = 0.5 * torch.sum(mean.square() + variance - torch.log(variance) - 1, dim=[1, 2, 3, 4])
        loss = reconstruction_loss + KL_WEIGHT * kl.sum() / kl.shape[0]
        logits = self.discriminator(reconstruction.contiguous().float())[-1]
        loss = loss + ADVERSARIAL_WEIGHT * self.adversarial(logits, target_is_real=True, for_discriminator=False)
        loss.backward()
        self.generator_optimizer.step()
        self.discriminator_optimizer.zero_grad(set_to_none=True)
        fake = self.discriminator(reconstruction.contiguous().detach())[-1]
        real = self.discriminator(images.contiguous().detach())[-1]
        loss = self.adversarial(fake, target_is_real=False, for_discriminator=True)
        loss = 0.5 * (loss + self.adversarial(real, target_is_real=True, for_discriminator=True))
        (ADVERSARIAL_WEIGHT * loss).backward()
        self.discriminator_optimizer.step()
