"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def exact_arithmetic() -> Iterator[Callable[[], None]]:
    """Turn TF32 off and choose deterministic kernels, so that fp32 is fp32 and the same step gives the same bits.

    Call what it returns after building a step, because the settings of a step choose these things for the process.
    """
    import torch

    convolutions: Any = torch.backends.cudnn
    exact = {(convolutions, "allow_tf32"): False, (torch.backends.cuda.matmul, "allow_tf32"): False}
    exact |= {(convolutions, "deterministic"): True, (convolutions, "benchmark"): False}
    before = {place: getattr(*place) for place in exact}

    def choose(values: dict[Any, bool]) -> None:
        for (where, name), value in values.items():
            setattr(where, name, value)

    choose(exact)
    yield lambda: choose(exact)
    choose(before)
