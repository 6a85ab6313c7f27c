"""Adam with its two moments in 8 bits, which need a quarter of the memory.

Written here because an update must be skipped on the device when a value is not finite, without asking the host, and
must run on the CPU and on the tensors without values of a memory prediction. With torch 2.13, Adam8bit of bitsandbytes
0.50 runs on the CPU but reads values on the host, which a prediction does not have; that of torchao 0.18 compiles its
update first, which takes a C++ compiler and, for a network of two layers, minutes on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SMALLEST = 1024
"""Parameters with fewer values, such as norms and biases, keep moments in float32."""

# Values of a block: kernels with fewer share one, and what has more is no kernel of a convolution.
_SMALLEST_BLOCK, _LARGEST_BLOCK = 27, 512
# Values at a time, which limits temporary tensors.
_MOST_VALUES = 2**20
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
# No gradients make the mean divided by the root of the square larger (Cauchy-Schwarz), but rounded moments might be.
_MOST_RATES = (1 - _BETA1) / math.sqrt((1 - _BETA2) * (1 - _BETA1**2 / _BETA2))
# Steps of a sequence modulo 2^32 that fills [0, 1) evenly, for blocks, values in a block, and updates.
_DITHER = (2654435769, 1779033703, 3144134277)


class _Coding:
    """Numbers as integers up to `most`: the root of their share of the largest number in the block, rounded.

    Roots give small numbers more of the integers. Rounding up or down is decided by a dither, so that a moving average
    keeps moving by the right amount, although each of its changes is smaller than the step between two integers.
    """

    def __init__(self, dtype: torch.dtype, most: int, power: int, keeps_from_zero: bool = False) -> None:
        self.dtype, self.most, self.power, self.keeps_from_zero = dtype, most, power, keeps_from_zero

    def encode(self, values: Tensor, dither: Tensor) -> tuple[Tensor, Tensor]:
        """Return the integers and the scale of each row."""
        scale = values.abs().amax(dim=1, keepdim=True)
        share = values.abs() / scale.clamp_min(torch.finfo(values.dtype).tiny)
        below = (share.pow(1 / self.power) * self.most).floor().clamp_max(self.most - 1)
        low, high = self._value(below), self._value(below + 1)
        codes = below + ((share - low) / (high - low) > dither)
        if self.keeps_from_zero:
            codes = torch.maximum(codes, share > 0)
        return (codes * values.sign()).to(self.dtype), scale.squeeze(1)

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the numbers."""
        signed = codes.to(scale.dtype)
        return self._value(signed.abs()) * signed.sign() * scale[:, None]

    def _value(self, codes: Tensor) -> Tensor:
        return (codes / self.most).pow(self.power)


_MEAN = _Coding(torch.int8, 127, 2)
# A mean divided by the root of a square that became 0 would be an update thousands of times too large.
_SQUARE = _Coding(torch.uint8, 255, 4, keeps_from_zero=True)


class EightBitAdam(Optimizer):
    """Adam whose moments are kept in 8 bits with a float32 scale for each block, which is one kernel of a convolution.

    Gradients of one kernel are of one size; those of kernels that follow each other in memory may not be. On recorded
    gradients of a small autoencoder, updates differ from those of float32 by 1.7 % with a scale for each kernel of
    27 values, and by 2.8 % with a scale for every 256 values.

    `found_inf`, a number on the device, makes the next update change nothing if it is not 0, as in torch's fused Adam.
    """

    found_inf: Tensor | None = None

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        assert closure is None, "the loss is not evaluated again"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states; torch converts all of them to the type of their parameter, which is undone here."""
        super().load_state_dict(state_dict)
        for states in self.state.values():
            for name, dtype in (("mean", _MEAN.dtype), ("square", _SQUARE.dtype), ("step", torch.int64)):
                if name in states:
                    states[name] = states[name].to(dtype)

    def _update(self, parameter: nn.Parameter, gradient: Tensor, rate: float) -> None:
        states = self.state[parameter] or self._begin(parameter)
        moves = torch.ones_like(states["step"]) if self.found_inf is None else (self.found_inf == 0).to(torch.int64)
        states["step"] += moves
        # A copy if the parameter is not contiguous, because blocks do not depend on the memory layout.
        values, gradients = parameter.view(-1) if parameter.is_contiguous() else parameter.flatten(), gradient.flatten()
        if "exp_avg" in states:
            mean, square = states["exp_avg"], states["exp_avg_sq"]
            _adam(values, gradients, mean, square, states["step"], rate, moves)
        else:
            self._update_blocks(values, gradients, states, rate, moves)
        if not parameter.is_contiguous():
            parameter.copy_(values.view(parameter.shape))

    def _update_blocks(
        self, values: Tensor, gradients: Tensor, states: dict[str, Tensor], rate: float, moves: Tensor
    ) -> None:
        # As the checkpoint has it in a resumed run.
        block = states["mean"].shape[1]
        for first in range(0, len(states["mean"]), _MOST_VALUES // block):
            rows = slice(first, first + _MOST_VALUES // block)
            part = slice(rows.start * block, rows.stop * block)
            kept = [states[name][rows] for name in ("mean", "mean_scale", "square", "square_scale")]
            mean, square = _MEAN.decode(kept[0], kept[1]).flatten(), _SQUARE.decode(kept[2], kept[3]).flatten()
            count = len(gradients[part])
            _adam(values[part], gradients[part], mean[:count], square[:count], states["step"], rate, moves)
            dither = _dither(first, kept[0].shape, states["step"])
            found = (
                *_MEAN.encode(mean.view(-1, block), dither),
                *_SQUARE.encode(square.view(-1, block), 1 - dither),
            )
            for before, after in zip(kept, found, strict=True):
                before.copy_(torch.where(moves > 0, after, before))

    def _begin(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return states of zeros, and keep them."""
        states = self.state[parameter]
        states["step"] = torch.zeros((), dtype=torch.int64, device=parameter.device)
        if parameter.numel() < SMALLEST:
            for name in ("exp_avg", "exp_avg_sq"):
                states[name] = parameter.new_zeros(parameter.numel())
            return states
        block = block_of(parameter)
        blocks = math.ceil(parameter.numel() / block)
        for name, coding in (("mean", _MEAN), ("square", _SQUARE)):
            states[name] = torch.zeros(blocks, block, dtype=coding.dtype, device=parameter.device)
            states[f"{name}_scale"] = parameter.new_zeros(blocks)
        return states


def block_of(parameter: Tensor) -> int:
    """Return how many values share a scale: those of one kernel, or of several small ones."""
    kernel = math.prod(parameter.shape[2:])
    kernel = kernel if kernel <= _LARGEST_BLOCK else 1
    return kernel * math.ceil(_SMALLEST_BLOCK / kernel)


def _adam(
    values: Tensor,
    gradients: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    rate: float,
    moves: Tensor,
) -> None:
    """Make Adam's update of values and moments in place, unless `moves` is 0."""
    new_mean = torch.lerp(mean, gradients, 1 - _BETA1)
    new_square = _BETA2 * square + (1 - _BETA2) * gradients.square()
    # In float64, because after the first steps both are differences of nearly equal numbers.
    of_mean, of_square = (1 - beta ** step.double() for beta in (_BETA1, _BETA2))
    corrected = (new_square / of_square).sqrt_().add_(_EPSILON)
    quotient = (new_mean / of_mean).div_(corrected).clamp_(-_MOST_RATES, _MOST_RATES)
    moved = values - rate * quotient
    for before, after in ((values, moved), (mean, new_mean), (square, new_square)):
        before.copy_(torch.where(moves > 0, after, before))


def _dither(first: int, shape: torch.Size, step: Tensor) -> Tensor:
    """Return a number in [0, 1) for each value of some blocks, evenly spread over the updates."""
    by_row, by_column, by_step = _DITHER
    row = torch.arange(first, first + shape[0], device=step.device)[:, None] * by_row
    column = torch.arange(shape[1], device=step.device) * by_column
    return ((row + column + step * by_step) & 0xFFFFFFFF).float() * 2.0**-32
