"""Random numbers derived from (seed, purpose, position), so that a resumed run needs no saved generator state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def derive_seed(seed: int, purpose: str, position: int) -> int:
    """Return a 63-bit seed for one purpose at one position."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class SampleNoise:
    """Noise that depends on the sample alone, so batch size and number of ranks do not change it."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device
        self.generator = torch.Generator(device=device)

    def normal(self, purpose: str, positions: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return standard normal noise of `shape` for each sample position."""
        return self._filled(Tensor.normal_, purpose, positions, shape)

    def uniform(self, purpose: str, positions: Sequence[int], shape: Sequence[int] = ()) -> Tensor:
        """Return uniform numbers in [0, 1), one or as many as `shape` says, for each sample position."""
        return self._filled(Tensor.uniform_, purpose, positions, shape)

    def _filled(self, fill: Any, purpose: str, positions: Sequence[int], shape: Sequence[int]) -> Tensor:
        numbers = torch.empty((len(positions), *shape), device=self.device)
        for sample, position in zip(numbers, positions, strict=True):
            fill(sample, generator=self.generator.manual_seed(derive_seed(self.seed, purpose, position)))
        return numbers
