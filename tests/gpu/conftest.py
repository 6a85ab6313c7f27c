"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def exact_arithmetic() -> Iterator[Callable[[], None]]:
    """Turn TF32 off and choose deterministic kernels, so that fp32 is fp32 and the same step gives the same bits.

    Call what it returns after building a step, because the settings of a step choose these things for the process.
    """
    import torch

    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32, convolutions.deterministic, convolutions.benchmark

    def choose(tf32: bool, products_tf32: bool, deterministic: bool, benchmark: bool) -> None:
        convolutions.allow_tf32, products.allow_tf32 = tf32, products_tf32
        convolutions.deterministic, convolutions.benchmark = deterministic, benchmark

    def apply() -> None:
        choose(False, False, True, False)

    apply()
    yield apply
    choose(*before)
