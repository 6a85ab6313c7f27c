"""How many predictions a sample takes, which its predicted time follows from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from diffusion.normalisation import Normalisation
from diffusion.sampling import VolumeSampler, num_predictions
from settings import Settings


class Counting(torch.nn.Module):
    """Predicts zeros, and notes how many latents it got."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def forward(self, noisy: Tensor, times: Tensor, class_labels: Tensor) -> Tensor:
        """Return zeros."""
        self.sizes.append(len(noisy))
        return torch.zeros_like(noisy)


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m", "heun"])
@pytest.mark.parametrize("scale", [3.0, 1.0, 0.0])
def test_predictions_are_counted_as_the_network_makes_them(tiny_values, sampler, scale):
    tiny_values["ldm"] |= {
        "conditioning": {"type": "class", "num_classes": 3},
        "scheduler": {"type": "rflow" if sampler == "heun" else "ddpm"},
        "sampling": {
            "sampler": sampler,
            "num_inference_steps": 7,
            "guidance_scale": scale,
        },
    }
    settings = Settings.model_validate(tiny_values)
    network = Counting()
    codec = SimpleNamespace(precision=SimpleNamespace(device=torch.device("cpu")), decode=lambda latent: latent)
    normalisation = Normalisation.uniform(settings.latent_shape[0])
    next(VolumeSampler(network, codec, settings, normalisation).draw([0]))  # type: ignore[arg-type]
    assert num_predictions(settings.ldm) == network.sizes
