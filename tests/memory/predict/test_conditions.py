"""The prediction knows conditions: their memory, the further input channels, and two predictions with guidance."""

from __future__ import annotations

import copy

import pytest

from memory.predict.run import ENCODING, encoded_volume, other_programs
from memory.predict.step import predict_step
from settings import Settings

CONDITIONS = {
    "label_map": {"source": "maps", "num_classes": 5},
    "volume": {"encoding": "autoencoder", "source": "other"},
    "tabular": {"table": "t.csv", "continuous": ["age"]},
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


@pytest.mark.parametrize(("cache", "encodings"), [("disk", 1 + 4), ("none", 4)])
def test_the_time_of_encoding_knows_the_variants_of_condition_volumes(tiny_values, cache, encodings):
    volume = {"encoding": "autoencoder", "source": "target", "degrade": {"hole": [4, 4, 4]}}
    values = {**tiny_values["ldm"], "latents": {"cache": cache}, "conditioning": {"volume": volume}}
    settings = Settings.model_validate({**tiny_values, "ldm": values})
    programs = other_programs(settings, "ldm", cuda=False)
    once, found = programs[ENCODING], encoded_volume(settings, programs)
    assert found is not None
    assert sum(part.nbytes for part in found.values()) == encodings * sum(w.nbytes for w in once.work.values())
