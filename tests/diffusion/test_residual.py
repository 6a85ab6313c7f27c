"""Predicting how latents differ from a first guess is the same task, from a better start."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from data import prepare_volumes
from diffusion.conditioning import Condition, check_conditions, hidden
from diffusion.conditioning.joined_scale import LABEL_MAP
from diffusion.latent_batches import LatentBatch
from diffusion.latents import prepare_latents
from diffusion.noise_process import NoiseProcess, predict
from diffusion.sampling import guided
from diffusion.volume_codec import frozen_codec
from runtime.processes import Process
from settings import Settings, load_settings
from settings.ldm import LdmSettings
from tests.conditional_run import AS_IN_PRESETS, conditional_config
from training.ldm_step import LatentDiffusionStep

CPU = torch.device("cpu")
PROCESSES: list[dict[str, Any]] = [{"prediction": "v"}, {"prediction": "epsilon"}, {"type": "rflow"}]
GUESSED: dict[str, Any] = {
    "residual": True,
    "normalise": "position",
    "volume": {"encoding": "autoencoder", "source": "target", "degrade": {"hole": [4, 4, 4], "first_guess": True}},
}
LABELS: dict[str, Any] = {"source": "maps", "num_classes": 3, "regression": True}


class Exact(torch.nn.Module):
    """Predicts without error how a latent differs from a guess, and remembers what it was given."""

    def __init__(self, process: NoiseProcess, difference: Tensor, noise: Tensor) -> None:
        super().__init__()
        self.process, self.difference, self.noise = process, difference, noise
        self.given = torch.empty(0)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        self.given = noisy
        return self.process.target(self.difference, self.noise, times)


@pytest.mark.parametrize("scheduler", PROCESSES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_an_exact_prediction_of_the_difference_is_one_of_the_latent(scheduler, batch_size):
    s = LdmSettings.model_validate({"conditioning": GUESSED, "scheduler": scheduler})
    process = NoiseProcess(s.scheduler, CPU)
    torch.manual_seed(0)
    clean, noise = torch.randn(2, batch_size, 4, 4, 8, 4)
    joined = torch.randn(batch_size, 5, 4, 8, 4)
    times = process.times(torch.linspace(0.2, 0.9, batch_size))
    difference = clean - joined[:, :4]
    network = Exact(process, difference, noise)
    found = predict(network, process.add_noise(clean, noise, times), times, Condition(joined=joined), s, process)
    torch.testing.assert_close(found, process.target(clean, noise, times))
    torch.testing.assert_close(network.given[:, :4], process.add_noise(difference, noise, times))
    assert torch.equal(network.given[:, 4:], joined)


def test_a_hidden_condition_and_one_without_a_guess_leave_the_prediction_to_the_network():
    s = LdmSettings.model_validate({"conditioning": GUESSED, "scheduler": {"prediction": "v"}})
    process = NoiseProcess(s.scheduler, CPU)
    torch.manual_seed(0)
    noisy, joined, times = torch.randn(2, 4, 4, 4, 4), torch.randn(2, 5, 4, 4, 4), torch.tensor([700, 30])
    network = torch.nn.Module()
    network.forward = lambda given, times: 3 * given[:, :4]
    nothing = hidden(Condition(joined=joined), s.conditioning)
    assert torch.equal(predict(network, noisy, times, nothing, s, process), 3 * noisy)
    for change in ({"residual": False}, {"normalise": "scale"}):
        plain = s.model_copy(update={"conditioning": s.conditioning.model_copy(update=change)})
        assert plain.conditioning.guess_channels(4) is None
        assert torch.equal(predict(network, noisy, times, Condition(joined=joined), plain, process), 3 * noisy)
    times = torch.tensor([700, 700])
    sampling = s.sampling.model_copy(update={"guidance_scale": 2.5})
    found = guided(network, s.model_copy(update={"sampling": sampling}), Condition(joined=joined), process)
    with_condition = predict(network, noisy, times, Condition(joined=joined), s, process)
    torch.testing.assert_close(found(noisy, times), 3 * noisy + 2.5 * (with_condition - 3 * noisy))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, slice(0, 4)),
        ({"labels": LABELS}, slice(7, 11)),
        ({"labels": LABELS, "volume": {}}, slice(3, 7)),
        ({"labels": LABELS | {"regression": False}, "volume": {}}, None),
        ({"volume": GUESSED["volume"] | {"encoding": "resample"}}, None),
        ({"volume": GUESSED["volume"] | {"degrade": {"hole": [4, 4, 4]}}}, None),
        ({"volume": GUESSED["volume"] | {"degrade": {"downsample": [1, 2, 1]}}}, slice(0, 4)),
        ({"volume": {"encoding": "autoencoder", "source": "other"}}, None),
    ],
)
def test_the_guess_is_the_degraded_volume_or_else_that_of_the_label_map(changes, expected):
    s = LdmSettings.model_validate({"conditioning": GUESSED | changes})
    assert s.conditioning.guess_channels(4) == expected


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("scheduler", PROCESSES)
def test_training_on_latents_around_a_guess_is_training_on_their_differences(tiny_values, scheduler, batch_size):
    values = copy.deepcopy(tiny_values)
    values["ldm"] |= {"conditioning": copy.deepcopy(GUESSED)}
    values["ldm"]["conditioning"]["volume"]["dropout"] = 0.0
    values["ldm"]["scheduler"] = values["ldm"].get("scheduler", {}) | scheduler
    values["ldm"]["sampling"] = {"sampler": "dpmpp_2m"}
    settings = Settings.model_validate(values)
    shape, latent_channels = settings.latent_shape, settings.autoencoder.latent_channels
    generator = torch.Generator().manual_seed(0)
    mean, guess = torch.randn(2, batch_size, *shape, generator=generator)
    known = torch.ones(batch_size, 1, *shape[1:])
    joined = torch.cat([guess, known], dim=1)
    batch = LatentBatch(
        mean, torch.zeros_like(mean), tuple(range(batch_size)), None, ("x",) * batch_size, Condition(joined=joined)
    )
    found = []
    for residual, change in ((True, {}), (False, {"mean": mean - guess})):
        changed = settings.with_overrides({"ldm.conditioning.residual": residual})
        torch.manual_seed(0)
        step = LatentDiffusionStep(changed, Process(CPU), load_weights=False)
        torch.nn.init.normal_(step.unet.out[2].conv.weight, std=0.1, generator=torch.Generator().manual_seed(1))
        terms = step.backward([replace(batch, **change)], 0)
        found.append((terms["diffusion"], step.unet.conv_in.conv.weight.grad))
    assert found[0][1].abs().max() > 0
    assert found[0][1].shape[1] == 2 * latent_channels + 1
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("normalise", ["scale", "channel", "position"])
def test_the_guess_of_a_label_map_lies_where_normalised_latents_do(tmp_path, monkeypatch, normalise):
    monkeypatch.chdir(tmp_path)
    config = conditional_config(tmp_path, AS_IN_PRESETS)
    settings = load_settings(config, [f"ldm.latents.normalise={normalise}", "ldm.latents.cache=memory"])
    volumes = prepare_volumes(settings.data, settings.seed, 1)
    pairs = check_conditions(settings, volumes)
    latents = prepare_latents(frozen_codec(settings, CPU), volumes, settings, Process(CPU), pairs)
    assert latents.read is not None
    assert latents.conditions is not None
    regression = latents.conditions.scale.regression
    assert regression is not None
    places = range(len(volumes.train))
    maps = [latents.conditions.joined[LABEL_MAP](place, 0) for place in places]
    guess = torch.stack([regression.guess(regression.weights(one)) for one in maps]).mean(dim=0)
    real = torch.stack([latents.normalisation.apply(latents.read(place)[0]) for place in places]).mean(dim=0)
    torch.testing.assert_close(guess, real, atol=1e-3, rtol=1e-3)
    # Each training volume has the guess of a regression on the others, around the same mean.
    joined = latents.conditions.of([file.name for file in volumes.train]).joined
    assert joined is not None
    assert (joined[:, -len(real) :].mean(dim=0) - real).square().mean() < 0.5
