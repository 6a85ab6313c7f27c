"""The autoencoder of stage 1: the same function and parameters as MONAI's, in a fraction of the memory."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from monai.networks.blocks import Convolution
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models.bottleneck import VectorQuantiser, build_quantiser
from models.lean.blocks import Head, InputConvolution, lean_block, resamples
from models.lean.checkpointing import HostOffload, gradient_checkpoint_forward, recomputed
from models.lean.layout import CHANNELS_LAST, arranged, layout_of
from models.lean.resampling import DownsampleBlock, Strides, UpsampleBlock
from models.lean.rows import GIB, HostSpace, TrainingSpace, Volume, check_host_bytes, volume_bytes
from models.lean.slabs import LeanBlock, in_slabs, stored
from models.stock import StockAutoencoder, autoencoder_arguments
from runtime.observer import memory_observer
from runtime.precision import Precision
from settings import AutoencoderSettings

log = logging.getLogger(__name__)

SLAB_ROWS = 16
"""Rows of a slab of levels in host memory where the settings do not say."""


class LeanCoder(nn.Module):
    """Encoder or decoder: MONAI's list of blocks in their lean form, with optional checkpointing per block.

    `strides` are those of the resampling blocks, in order.
    """

    def __init__(self, blocks: nn.ModuleList, first_level: int, strides: Iterable[Strides]) -> None:
        super().__init__()
        left = iter(strides)
        self.blocks = nn.ModuleList(
            lean_block(block, next(left)) if resamples(block) else lean_block(block) for block in blocks
        )
        assert next(left, None) is None, "there are more strides than resampling blocks"
        self.first_level = first_level
        self.levels = _level_of_each(self.blocks, first_level)
        self.offloaded_levels = 0
        self._offloaded: Callable[[Tensor], Tensor] | None = None
        self.checkpointed_levels = 0
        self.slab_rows = 0
        self.host: HostSpace | None = None
        self.offload = False
        self.nested = False
        first, *_, norm, conv = self.blocks
        assert isinstance(norm, nn.GroupNorm), "the last two blocks are a norm and a convolution"
        # In tuples, so that they are not registered: their parameters already have their names in `blocks`.
        self._first, self._head = (InputConvolution(first),), (Head(norm, conv),)

    def forward(self, x: Tensor) -> Tensor:
        """Run all blocks."""
        first, *middle, _, _ = self.blocks
        keep = HostOffload() if self.offload else None
        offloaded = self._offloaded if self.host is None else None
        if offloaded is not None and not self.first_level:
            h: Volume = offloaded(x)
        else:
            h = self._begin(first, x)
        upsampling: tuple[nn.Module, Tensor] | None = None  # what `h` is computed from again, if it is
        for block, level in zip(middle, self.levels[1:-2], strict=True):
            if offloaded is not None and level < self.offloaded_levels:
                continue
            if self.host is not None:
                self.host.on_block()
            if isinstance(block, LeanBlock) and block.slab_rows and not torch.is_grad_enabled():
                h = block.consume(h)
            else:
                h = self._whole(h)
                hooks = keep if upsampling is None else recomputed(h, *upsampling)
                upsampling = None
                if (self.nested or self.offload) and isinstance(block, UpsampleBlock):
                    # Its output is the largest of all inputs. To compute that again takes one convolution of few taps,
                    # and no copy to the host and back; what it is computed from stays on the device.
                    upsampling, hooks = (block, h), None
                h = self._run(block, h, level, hooks)
        if offloaded is not None and self.first_level:
            with keep if self.checkpointed_levels and keep is not None else nullcontext():
                return offloaded(self._whole(h))
        (head,) = self._head
        h = h if head.slab_rows else self._whole(h)
        if head.training != self.training:
            head.train(self.training)
        return self._run(head, h, self.levels[-1], keep)

    def _begin(self, conv: Convolution, x: Tensor) -> Volume:
        """Return the first convolution of a volume; as rows computed on demand where the result is for the host."""
        if self.host is not None and not torch.is_grad_enabled():
            rows = self._first[0].consume(x)
            if volume_bytes(rows) > self.host.above:
                return rows
        # On a CPU, convolutions of few channels return contiguous volumes whatever they are given.
        return arranged(conv(x), layout_of(x))

    def _whole(self, h: Volume) -> Tensor:
        """Return a volume on the device, for a block that does not run in slabs."""
        if isinstance(h, Tensor):
            return h
        whole = stored(h, self.slab_rows, host=None)
        assert isinstance(whole, Tensor), "without a place on the host it is on the device"
        return whole

    def set_slab_rows(self, rows: int, num_levels: int = 1, host: HostSpace | None = None) -> None:
        """Run the blocks of the `num_levels` highest resolutions in slabs of `rows` rows; 0: whole.

        Without gradients, large volumes lie in the memory of `host`, if it is given.
        """
        self.slab_rows, self.host = rows, host
        for block, level in zip([*self.blocks[:-2], *self._head], self.levels[:-1], strict=True):
            if isinstance(block, LeanBlock):
                block.slab_rows = rows if level < num_levels else 0
                block.host = host

    def offload_levels(self, num_levels: int, rows: int, host: HostSpace, recomputes: bool) -> None:
        """Keep the volumes of the `num_levels` highest levels in the memory of `host`, in training too.

        With `recomputes`, they are not kept until backward, which computes them again.
        """
        every = zip([*self._first, *self.blocks[1:-2], *self._head], self.levels[:-1], strict=True)
        blocks = [block for block, level in every if level < num_levels]
        self.offloaded_levels = num_levels
        options: dict[str, Any] = {"rows": rows, "host": host, "recomputes": recomputes}
        self._offloaded = functools.partial(in_slabs, blocks=blocks, **options) if num_levels else None

    def _run(self, block: nn.Module, x: Volume, level: int, keep: AbstractContextManager[None] | None) -> Tensor:
        wanted = level < self.checkpointed_levels
        if isinstance(block, LeanBlock) and block.keeps_only_input:
            with keep if wanted and keep is not None else nullcontext():
                return block(x)
        return gradient_checkpoint_forward(block, x, use_gradient_checkpointing=wanted, keep=keep)


def _level_of_each(blocks: nn.ModuleList, first_level: int) -> list[int]:
    """Return the level of each block, 0 being the highest resolution; resampling belongs to its larger side."""
    level, levels = first_level, []
    for block in blocks:
        level -= isinstance(block, UpsampleBlock)
        levels.append(level)
        level += isinstance(block, DownsampleBlock)
    return levels


class LeanAutoencoder(StockAutoencoder):
    """MONAI's `AutoencoderKL` with lean blocks, checkpointing per block, offload and slabs.

    `encode`, `decode` and the state dict are the same as MONAI's. The memory settings change results only by rounding.
    `strides` gives the strides of each downsampling along the three axes; the decoder's upsampling mirrors them. MONAI
    has only strides of 2; others do not change the names and shapes of the weights. With a quantiser, `encode` returns
    the latent before quantisation and a sigma of zeros, and `decode` quantises.
    """

    fastest_layout = CHANNELS_LAST
    encoder: LeanCoder
    decoder: LeanCoder

    def __init__(self, strides: Sequence[Strides] | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.num_levels = len(arguments["channels"])
        strides = strides or ((2, 2, 2),) * (self.num_levels - 1)
        assert len(strides) == self.num_levels - 1, f"{len(strides)} strides for {self.num_levels} levels"
        self.encoder = LeanCoder(self.encoder.blocks, 0, strides)
        self.decoder = LeanCoder(self.decoder.blocks, self.num_levels - 1, reversed(strides))
        self.nested = False
        self.host: TrainingSpace | None = None

    def quantise_with(self, quantiser: VectorQuantiser) -> None:
        """Put a quantiser between encoder and decoder; the latent then has no sigma."""
        self.quantiser = quantiser
        del self.quant_conv_log_sigma  # unused parameters would stop training in several processes

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the reconstruction, the latent's mean and its sigma.

        With a quantiser: the reconstruction, the latent before quantisation, and its codes.
        """
        if self.quantiser is None:
            return super().forward(x, noise)
        with self.encoder_gradients():
            latent, _ = self.encode(x)
        quantised, codes = self.quantiser(latent)
        return self._decoded(quantised), latent, codes

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latent's mean and sigma."""
        x = arranged(self.entering(x), self.layout)
        nested = self.nested and not self.encoder.offloaded_levels  # those compute their volumes again themselves
        h = gradient_checkpoint_forward(self.encoder, x, use_gradient_checkpointing=nested)
        if self.quantiser is not None:
            latent = self.quant_conv_mu(h)
            return latent, torch.zeros_like(latent)
        mean, log_variance = self.quant_conv_mu(h), self.quant_conv_log_sigma(h)
        return mean, torch.exp(torch.clamp(log_variance, -30.0, 20.0) / 2)

    def decode(self, z: Tensor) -> Tensor:
        """Return the volume of a latent."""
        return self._decoded(z if self.quantiser is None else self.quantiser(z)[0])

    def _decoded(self, z: Tensor) -> Tensor:
        h = arranged(self.post_quant_conv(arranged(z, self.layout)), self.layout)
        return self.leaving(self.decoder(h))

    def gradient_checkpointing_enable(
        self, levels: int | str = "all", offload: bool = False, nested: bool = False
    ) -> None:
        """Recompute the blocks of the `levels` highest-resolution levels in backward instead of keeping activations.

        `offload` keeps the blocks' inputs in host memory. `nested` adds a checkpoint around the whole encoder, so its
        block inputs are recomputed too. Either also has the decoder's upsampled volumes computed again. Has an effect
        only in training mode with gradients enabled.
        """
        count = self.num_levels if levels == "all" else int(levels)
        assert 1 <= count <= self.num_levels, f"levels is {levels}; allowed: all, or 1 to {self.num_levels}"
        self._configure(count, offload, nested)
        covered = sum(level < count for coder in (self.encoder, self.decoder) for level in coder.levels[1:-1])
        log.info(
            "gradient checkpointing on: %d blocks of the encoder and the decoder, %s of %d levels%s%s",
            covered,
            count,
            self.num_levels,
            ", block inputs in host memory" if offload else "",
            ", the encoder nested" if nested else "",
        )

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations for backward again."""
        self._configure(0, offload=False, nested=False)
        log.info("gradient checkpointing off: the encoder and the decoder keep the activations of all blocks")

    def _configure(self, count: int, offload: bool, nested: bool) -> None:
        self.nested = nested
        for coder in (self.encoder, self.decoder):
            coder.checkpointed_levels, coder.offload, coder.nested = count, offload, nested

    def set_slab_rows(self, rows: int, num_levels: int = 1, host: HostSpace | None = None) -> None:
        """Run the blocks of the highest resolutions in slabs of `rows` rows along the first spatial axis; 0: whole.

        Forward and backward stay exact. Slabs too thin for a fast convolution are made thicker. Without gradients,
        large volumes lie in the memory of `host`, if it is given.
        """
        assert rows == 0 or rows >= 2, f"slab_rows is {rows}; allowed: 0 or at least 2, for a row and its halo"
        for coder in (self.encoder, self.decoder):
            coder.set_slab_rows(rows, num_levels, host)

    def offload_levels(
        self, num_levels: int, rows: int = 0, nested: bool = False, host: TrainingSpace | None = None
    ) -> None:
        """Keep volumes and gradients of the `num_levels` highest levels in host memory; the device has slabs of them.

        Forward and backward stay exact. `nested` computes those of the encoder again in backward, to save host memory.
        """
        assert num_levels < self.num_levels, f"{num_levels} of {self.num_levels} levels; the last stays on the device"
        self.host = host or TrainingSpace()
        self.encoder.offload_levels(num_levels, rows or SLAB_ROWS, self.host, nested)
        self.decoder.offload_levels(num_levels, rows or SLAB_ROWS, self.host, recomputes=False)


def build_autoencoder(settings: AutoencoderSettings) -> StockAutoencoder:
    """Build the autoencoder that the settings describe, with their memory settings applied, in its fastest layout."""
    arguments = autoencoder_arguments(settings)
    arguments |= {"upsampling": settings.upsampling, "value_range": settings.value_range}
    model: StockAutoencoder
    if settings.implementation == "lean":
        model = lean = LeanAutoencoder(settings.level_strides, **arguments)
        if (quantiser := build_quantiser(settings)) is not None:
            lean.quantise_with(quantiser)
    else:
        model = StockAutoencoder(**arguments)
    model.set_layout(model.fastest_layout)
    training = settings.training
    model.set_slab_rows(training.slab_rows)
    if training.offload_levels:
        model.offload_levels(training.offload_levels, training.slab_rows, training.nests_checkpoints)
    if training.checkpoints_blocks:
        model.gradient_checkpointing_enable(
            levels=training.checkpoint_levels,
            offload=training.use_gradient_checkpointing_offload,
            nested=training.nests_checkpoints,
        )
    return model


def offloaded_bytes(s: AutoencoderSettings, batch_size: int, grid: Sequence[int], precision: Precision) -> int:
    """Return the host memory of a training step's offloaded levels, from a step on tensors that hold no data.

    Slabs as large as the volume take the same memory on the host as thin ones.
    """
    t = s.training
    host = TrainingSpace(sys.maxsize, is_pinned=precision.device.type == "cuda")
    plain = {"use_gradient_checkpointing": False, "use_gradient_checkpointing_offload": False, "offload_levels": 0}
    with FakeTensorMode(), torch.autocast("cpu", precision.dtype or torch.bfloat16, precision.dtype is not None):
        model = build_autoencoder(s.model_copy(update={"training": t.model_copy(update=plain)}))
        assert isinstance(model, LeanAutoencoder), "only lean levels can be in host memory"
        model.offload_levels(t.offload_levels, max(grid), t.nests_checkpoints, host)
        if not t.trains_encoder:
            model.freeze_encoder()
        reconstruction, *_ = model(torch.zeros(batch_size, s.in_channels, *grid))
        reconstruction.mean().backward()
    return host.taken


def announce_offloaded(s: AutoencoderSettings, batch_size: int, grid: Sequence[int], precision: Precision) -> None:
    """Log how much host memory a step's offloaded levels take; raise `HostMemoryError` if the host has less."""
    free, needed = memory_observer().free_host_bytes(), offloaded_bytes(s, batch_size, grid, precision)
    check_host_bytes(needed, free)
    text = "memory: the %d highest levels of the autoencoder take %.1f GiB of host memory; %.1f GiB are free"
    log.info(text, s.training.offload_levels, needed / GIB, free / GIB)
