"""The prediction knows conditions: their memory, the further input channels, and two predictions with guidance."""

from __future__ import annotations

import copy

import pytest

from memory.predict.step import predict_step
from settings import Settings

CONDITIONS = {
    "labels": {"source": "maps", "num_classes": 5},
    "volume": {"encoding": "autoencoder", "source": "other"},
    "numbers": {"table": "t.csv", "continuous": ["age"]},
}


def predicted(values, conditioning, cache="disk"):
    values = copy.deepcopy(values)
    values["ldm"]["conditioning"] = conditioning
    values["ldm"]["latents"] = {"cache": cache}
    return predict_step(Settings.model_validate(values), "ldm", whole_run=False)


@pytest.mark.parametrize("cache", ["disk", "none"])
def test_conditions_count_as_inputs_and_as_weights_of_the_first_convolution(tiny_values, cache):
    without, found = (predicted(tiny_values, conditioning, cache) for conditioning in ({}, CONDITIONS))
    # Five label values, three latent channels and what is known, on a grid of 8 x 8 x 8, and the code of one number.
    joined, batch, channels = 5 + 3 + 1, 2, 16
    assert found.breakdown["inputs"] - without.breakdown["inputs"] == 4 * batch * (joined * 8**3 + 2)
    width = 4 * channels
    weights = channels * joined * 27 + (2 * width + width) + (width * width + width)
    assert found.breakdown["parameters"] - without.breakdown["parameters"] == 4 * weights
    assert found.peak_allocated_bytes > without.peak_allocated_bytes
