"""What all norm operators take: a norm whose statistics are known."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """Mean and 1 / sqrt(variance + eps) of each group, (batch, groups); weight and bias; whether SiLU follows."""

    mean: Tensor
    rstd: Tensor
    weight: Tensor
    bias: Tensor
    silu: bool

    @property
    def groups(self) -> int:
        """Return the number of groups of channels."""
        return self.mean.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the statistics and parameters."""
        return self[:4]
