"""What an exported U-Net says of the latents and the noise that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diffusion.normalisation import Normalisation
from scripts.export_checkpoint import _latents
from settings import Settings


@pytest.mark.parametrize(
    ("components", "texture", "named"),
    [
        (0, "white", []),
        (2, "white", ["noise_directions", "noise_deviations"]),
        (0, "latents", ["noise_root_0", "noise_root_1", "noise_root_2", "noise_strength"]),
        (2, "latents", ["noise_directions", "noise_deviations", "noise_root_0", "noise_strength"]),
    ],
)
def test_every_tensor_that_shapes_the_noise_is_named(tiny_values, components, texture, named):
    tiny_values["ldm"]["scheduler"] = {"noise_components": components, "noise_texture": texture}
    content = Normalisation.neutral(Settings.model_validate(tiny_values)).content
    assert set(named) <= {name for name, value in content.items() if isinstance(value, torch.Tensor)}
    text = " ".join(_latents(Path("ldm.safetensors"), content))
    assert all(name in text for name in named)
    assert ("Samplers that draw white noise do not fit it" in text) == bool(named)
