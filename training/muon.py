"""Muon: momentum whose direction is made orthogonal, for the convolutions between hidden layers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
# Of the odd polynomial whose rounds push singular values towards one (Jordan et al. 2024); five leave 0.7 to 1.2.
LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315
# Rounds between two Gram matrices computed anew. A Gram matrix that follows the rounds saves most of the work but
# gathers rounding errors, in TF32 too many over all five.
ROUNDS = (2, 3)
# Steps of the size that Adam's have at the same learning rate (Liu et al. 2025).
RMS = 0.2
FEWEST_CHANNELS = 8
STACKED_VALUES = 2**25
"""Values of kernels updated at once, which takes three times their memory; a larger kernel is updated alone."""


def is_hidden_kernel(parameter: Tensor) -> bool:
    """Return whether a parameter is the kernel of a 3D convolution from many channels to many, with several taps."""
    return parameter.dim() == 5 and min(parameter.shape[:2]) >= FEWEST_CHANNELS and parameter.shape[2:].numel() > 1


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal as a matrix of output channels by everything else; leaves weights alone if blocked.

    All directions of a kernel are learned at one pace, where a step along the gradient favours the few strong ones.
    """

    def __init__(self, kernels: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(kernels, {"lr": lr})
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all kernels that have a gradient; none if `found_inf` is 1."""
        for group in self.param_groups:
            trained = sorted((p for p in group["params"] if p.grad is not None), key=lambda p: tuple(p.shape))
            for shape, alike in groupby(trained, key=lambda p: p.shape):
                kernels, number = list(alike), max(1, STACKED_VALUES // shape.numel())
                for start in range(0, len(kernels), number):
                    self._update(kernels[start : start + number], shape, group["lr"])

    def _update(self, kernels: list[Tensor], shape: torch.Size, learning_rate: float) -> None:
        """Update kernels of one shape, stacked: a GPU takes longer to start small operators than to run them."""
        for kernel in kernels:
            if not self.state[kernel]:
                self.state[kernel]["momentum"] = torch.zeros_like(kernel)
        kept = [self.state[kernel]["momentum"] for kernel in kernels]
        momenta = torch.stack([_matrix(momentum) for momentum in kept])
        directions = torch.stack([_matrix(kernel.grad) for kernel in kernels if kernel.grad is not None])
        is_allowed = None if self.found_inf is None else self.found_inf == 0
        if is_allowed is not None:
            # With the momentum in place of a gradient that may hold anything, the momentum stays what it is.
            directions = torch.where(is_allowed, directions, momenta)
        momenta = momenta.lerp(directions, 1 - MOMENTUM)
        torch._foreach_copy_(kept, _kernels(momenta, shape))
        directions.lerp_(momenta, MOMENTUM)  # one step ahead (Nesterov)
        del momenta
        changes = orthogonal(directions)
        if is_allowed is not None:
            changes = changes * is_allowed
        size = learning_rate * RMS * math.sqrt(max(changes.shape[1:]))
        torch._foreach_sub_(kernels, _kernels(changes, shape), alpha=size)


def _matrix(kernel: Tensor) -> Tensor:
    """Return a kernel as one row for each output channel; a view of one with channels last."""
    return kernel.movedim(1, -1).flatten(1)


def _kernels(matrices: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """Return what `_matrix` made matrices of."""
    return matrices.view(-1, shape[0], *shape[2:], shape[1]).movedim(-1, 2).unbind()


def orthogonal(matrices: Tensor) -> Tensor:
    """Return matrices (count, rows, columns) with the same singular vectors and singular values near one."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonal(matrices.mT).mT
    x = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-7)
    for num_rounds in ROUNDS:
        gram = x @ x.mT
        product = factor = _factor(gram)
        for _ in range(num_rounds - 1):
            gram = factor @ gram @ factor
            factor = _factor(gram)
            product = factor @ product
        x = product @ x
    return x


def _factor(gram: Tensor) -> Tensor:
    """Return what a round multiplies matrices with, from their Gram matrix."""
    factor = torch.baddbmm(gram, gram, gram, beta=CUBIC, alpha=QUINTIC)
    factor.diagonal(dim1=1, dim2=2).add_(LINEAR)
    return factor
