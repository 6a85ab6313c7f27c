"""Normalisation of latents: by one scale, by channel and by position, through training, decoding and files."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from data import prepare_volumes
from diffusion.frozen_autoencoder import freeze
from diffusion.latent_batches import LatentBatch
from diffusion.latents import Latents, prepare_latents, pretrained_unet
from diffusion.normalisation import Normalisation, Statistics, principal_components
from diffusion.sampling import draw_volumes, sample_latents
from diffusion.volume_codec import VolumeCodec
from evaluation.ldm_validation import held_out_losses
from models import build_autoencoder
from models.weight_files import load_weights, save_weights
from runtime.precision import Precision
from runtime.processes import Process
from runtime.randomness import SampleNoise
from settings import CheckpointError, Settings
from training.ldm_step import LatentDiffusionStep

CPU = Process(torch.device("cpu"))
SHAPE = (3, 2, 4, 3)
KINDS = ("channel", "position")
ONES = torch.ones(3, 1, 1, 1)
FIVE_COMPONENTS = {"noise_directions": torch.ones(5, *SHAPE), "noise_deviations": torch.ones(5)}


def moments(number: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return means and sigmas whose channels differ in mean and size, with a pattern common to all latents."""
    generator = torch.Generator().manual_seed(seed)
    pattern = 3 * torch.randn(SHAPE, generator=generator)
    spread = torch.tensor([0.1, 1.0, 7.0]).view(3, 1, 1, 1)
    mean = pattern + spread * torch.randn(number, *SHAPE, generator=generator) + 10 * spread
    return mean, 0.5 * spread * torch.rand(number, *SHAPE, generator=generator)


def settings_of(kind: str, components: int = 0, texture: str = "white") -> Settings:
    """Return settings whose latents have the shape of these tests."""
    grid = {"voxel_size": [2 * axis for axis in SHAPE[1:]]}
    autoencoder: dict[str, Any] = {
        "latent_channels": SHAPE[0],
        "num_channels": [8, 8],
        "attention_levels": [False, False],
    }
    autoencoder |= {"latent_channels": SHAPE[0], "training": {"adversarial_weight": 0.0}}
    scheduler = {"noise_components": components, "noise_texture": texture}
    ldm = {"latents": {"normalise": kind, "pad": True}, "scheduler": scheduler}
    settings = Settings.model_validate({"data": grid, "autoencoder": autoencoder, "ldm": ldm})
    assert settings.latent_shape == SHAPE
    return settings


def normalisation_of(
    mean: torch.Tensor, sigma: torch.Tensor, kind: str, components: int = 0, texture: str = "white"
) -> Normalisation:
    statistics = Statistics(settings_of(kind, components, texture), len(mean))
    for index, pair in enumerate(zip(mean, sigma, strict=True)):
        statistics.add(index, pair)
    return statistics.normalisation(0.5, CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_latents_have_mean_zero_and_variance_one_in_each_channel(kind):
    mean, sigma = moments(50)
    normalisation = normalisation_of(mean, sigma, kind)
    normalised = normalisation.apply(mean)
    assert normalised.mean(dim=(0, 2, 3, 4)).abs().max() < 1e-5
    variance = normalised.square() + (sigma * normalisation.scale).square()
    torch.testing.assert_close(variance.mean(dim=(0, 2, 3, 4)), torch.ones(3), rtol=1e-5, atol=1e-5)
    by_position = normalised.mean(dim=0).abs().max()
    assert by_position < 1e-5 if kind == "position" else by_position > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_undoing_gives_back_the_latent(kind):
    mean, sigma = moments(5)
    normalisation = normalisation_of(mean, sigma, kind)
    torch.testing.assert_close(normalisation.undo(normalisation.apply(mean)), mean, rtol=1e-5, atol=1e-5)


def test_one_scale_is_a_product_and_nothing_else():
    latents = moments(2)[0]
    normalisation = Normalisation(0.3)
    assert torch.equal(normalisation.apply(latents), latents * 0.3)
    assert torch.equal(normalisation.undo(latents), latents / 0.3)


def test_a_channel_without_variance_is_refused():
    mean, sigma = moments(4)
    mean[:, 1], sigma[:, 1] = 2.0, 0.0
    with pytest.raises(CheckpointError, match="variance of the autoencoder's latents is"):
        normalisation_of(mean, sigma, "channel")


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_channel_is_refused_when_rounding_leaves_it_some_variance(kind):
    mean, sigma = moments(100)
    mean[:, 1], sigma[:, 1] = 1.7, 0.0
    with pytest.raises(CheckpointError, match=r"in channel 1, counted from 0.*set ldm\.latents\.normalise: scale, or"):
        normalisation_of(mean, sigma, kind)


@pytest.mark.parametrize("texture", ["white", "latents"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_file_gives_back_the_normalisation_and_the_weights_alone(kind, texture, tmp_path):
    normalisation = normalisation_of(*moments(5), kind, 4, texture)
    weights = {"conv.weight": torch.rand(2, 2)}
    save_weights(tmp_path / "ldm.safetensors", weights, {"stage": "ldm", **normalisation.content})
    state, metadata = load_weights(tmp_path / "ldm.safetensors")
    assert state.keys() == weights.keys()
    assert metadata["stage"] == "ldm"
    found = Normalisation.stored(metadata, settings_of(kind, 4, texture))
    assert found.content.keys() == normalisation.content.keys()
    noise = torch.randn(2, *SHAPE)
    assert torch.equal(found.shaped(noise), normalisation.shaped(noise))
    for name, values in normalisation.content.items():
        assert torch.equal(torch.as_tensor(values), torch.as_tensor(found.content[name]))


@pytest.mark.parametrize(
    ("content", "kind", "components", "reason"),
    [
        ({}, "scale", 0, "not a finite number above 0"),
        ({"latent_scale": True}, "scale", 0, "not a finite number above 0"),
        ({"latent_scale": float("nan")}, "scale", 0, "not a finite number above 0"),
        ({"latent_scale": 1.0}, "channel", 0, "latent_scale is not a tensor"),
        ({"latent_scale": ONES}, "channel", 0, "latent_mean is not a tensor"),
        ({"latent_scale": 0 * ONES, "latent_mean": ONES}, "channel", 0, "not above 0"),
        ({"latent_scale": ONES, "latent_mean": ONES}, "position", 0, r"latent_mean is not a tensor of \(3, 2, 4, 3\)"),
        ({"latent_scale": 1.0}, "scale", 4, "noise_directions is not a tensor"),
        ({"latent_scale": 1.0, **FIVE_COMPONENTS}, "scale", 4, r"noise_directions is not a tensor of \(4, "),
        ({"latent_scale": 1.0, **FIVE_COMPONENTS}, "scale", 5, "noise_strength is not a tensor"),
    ],
)
def test_what_is_not_a_normalisation_of_the_kind_is_refused(content, kind, components, reason):
    with pytest.raises(ValueError, match=reason):
        Normalisation.stored(content, settings_of(kind, components, "latents" if components == 5 else "white"))


def test_shaped_noise_varies_like_the_latents_in_their_principal_components_and_like_white_noise_elsewhere():
    generator = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(72, 72, generator=generator))[0]
    wanted = torch.cat([torch.tensor([30.0, 12.0, 5.0]), torch.full((69,), 0.2)])
    latents = (torch.randn(200, 72, generator=generator) * wanted) @ basis.T
    shape = principal_components((latents - latents.mean(dim=0)).view(200, *SHAPE), 8)
    # The rest of the latents varies less than white noise, so these three are all.
    torch.testing.assert_close(shape.deviations, wanted[:3], rtol=0.15, atol=0.0)
    directions = shape.directions.flatten(1)
    torch.testing.assert_close(directions @ directions.T, torch.eye(3), rtol=0, atol=1e-5)
    assert (directions @ basis[:, :3]).abs().diagonal().min() > 0.98
    white = torch.eye(72).view(72, *SHAPE)
    found = shape(white).flatten(1)  # the symmetric matrix that shapes noise
    expected = torch.eye(72) + directions.T @ ((shape.deviations - 1)[:, None] * directions)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    values = torch.linalg.eigvalsh(found)
    torch.testing.assert_close(values[-3:].flip(0), shape.deviations, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values[:-3], torch.ones(69), rtol=1e-4, atol=1e-4)


def test_principal_components_are_those_of_evenly_chosen_examples(monkeypatch):
    monkeypatch.setattr("diffusion.normalisation.MOST_EXAMPLES", 4)
    mean, sigma = moments(10)
    found = normalisation_of(mean, sigma, "position", 3).noise_shape
    assert found is not None
    few = normalisation_of(mean, sigma, "position").apply(mean[[0, 2, 5, 7]])
    expected = principal_components(few - few.mean(dim=0), 3)
    torch.testing.assert_close(found.deviations, expected.deviations)
    assert len(found.directions) == 3


def test_a_pretrained_unet_that_knows_positions_needs_their_grid(tmp_path):
    before = settings_of("position", 2)
    values = before.model_dump(mode="json")
    values["ldm"]["pretrained"] = str(tmp_path / "ldm.safetensors")
    content = normalisation_of(*moments(5), "position", 2).content
    metadata = {"stage": "ldm", "settings": before.model_dump(mode="json"), **content}
    save_weights(tmp_path / "ldm.safetensors", {"conv.weight": torch.rand(2, 2)}, metadata)
    found = pretrained_unet(Settings.model_validate(values))
    assert found is not None
    values["data"]["voxel_size"] = [4, 8, 8]
    message = r"of \(2, 4, 3\), and these are of \(2, 4, 4\); set data\.voxel_size to \[4, 8, 6\]"
    with pytest.raises(CheckpointError, match=message):
        pretrained_unet(Settings.model_validate(values))


def test_one_volume_has_no_components_and_white_noise():
    normalisation = normalisation_of(*moments(1), "channel", 3)
    noise = torch.randn(2, *SHAPE)
    assert torch.equal(normalisation.shaped(noise), noise)
    assert len(Normalisation.stored(normalisation.content, settings_of("channel", 3)).content["noise_directions"]) == 0  # type: ignore[arg-type]


def prepared(values, cache: str = "memory") -> tuple[LatentDiffusionStep, Latents]:
    """Return a step and the latents of phantoms, with an autoencoder whose decoder does not forget its input's mean."""
    values = copy.deepcopy(values)
    values["ldm"]["latents"] = {"cache": cache, "normalise": "position"}
    values["ldm"]["scheduler"] = {"noise_components": 3, "noise_texture": "latents"}
    values["ldm"]["training"]["pixel_loss"] = {"weight": 0.5}
    settings = Settings.model_validate(values)
    torch.manual_seed(0)
    autoencoder = freeze(build_autoencoder(settings.autoencoder))
    codec = VolumeCodec(autoencoder, settings.autoencoder, Precision(settings.device, CPU.device))
    latents = prepare_latents(codec, prepare_volumes(settings.data, settings.seed, 1), settings, CPU)
    return LatentDiffusionStep(settings, CPU, codec=codec, latents=latents), latents


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_normalisation_is_of_the_training_volumes_and_the_same_for_every_cache(tiny_values):
    step, latents = prepared(tiny_values)
    assert latents.read is not None
    pairs = [latents.read(index) for index in range(len(latents.volumes.train))]
    statistics = Statistics(step.settings, len(pairs))
    for index, pair in enumerate(pairs):
        statistics.add(index, pair)
    expected = statistics.normalisation(1.0, CPU).content
    for cache in ("memory", "none", "disk", "disk"):  # at the second time the latents are found
        _, others = prepared(tiny_values, cache)
        for name, values in others.normalisation.content.items():
            assert torch.equal(torch.as_tensor(values), torch.as_tensor(expected[name]))


class KnowsTheAnswer(torch.nn.Module):
    """Predicts the noise that leads to one latent."""

    def __init__(self, step: LatentDiffusionStep, clean: torch.Tensor) -> None:
        super().__init__()
        self.process, self.clean = step.noise_process, clean

    def forward(self, noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        signal, level = self.process.coefficients(times)
        return (noisy - signal * self.clean) / level


def test_a_latent_drawn_in_training_is_decoded_to_its_volume_in_sampling(tiny_values):
    step, latents = prepared(tiny_values)
    assert latents.read is not None
    mean, sigma = latents.read(0)
    clean = step.draw_clean(LatentBatch(mean[None], 0 * sigma[None], (0,), None, ("a",)))
    assert (clean[0] - mean).norm() > 0.1 * mean.norm()
    [found] = draw_volumes(KnowsTheAnswer(step, clean), step.codec, step.settings, step.normalisation, 9, [4])
    torch.testing.assert_close(found, step.codec.decode(mean), rtol=1e-3, atol=1e-3)


def test_the_pixel_loss_and_its_gradient_are_those_of_the_decoded_latents(tiny_values):
    step, _ = prepared(tiny_values)
    scale, mean = step.normalisation.scale, step.normalisation.mean
    assert step.pixel_loss is not None
    assert mean is not None
    generator = torch.Generator().manual_seed(3)
    clean, predicted = (torch.randn(2, *step.settings.latent_shape, generator=generator) for _ in range(2))
    times = torch.tensor([300, 700])
    loss, gradient, _ = step._pixel_pass(predicted, clean, times, 1.0)
    leaf = predicted.clone().requires_grad_()
    signal, _ = step.noise_process.coefficients(times)
    errors = step.autoencoder.decode(leaf / scale + mean) - step.autoencoder.decode(clean / scale + mean)
    expected = (errors.square().flatten(1).mean(dim=1) * signal.flatten().square()).mean()
    (0.5 * expected).backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-4, atol=1e-7)


def test_the_held_out_loss_is_of_normalised_latents(tiny_values):
    step, latents = prepared(tiny_values)
    [batch, *_] = latents.validation_batches(step.codec.encode, CPU)
    found = held_out_losses(step, batch)
    normalised = LatentBatch(step.normalisation.apply(batch.mean), batch.sigma, batch.positions, None, batch.files)
    step.normalisation = Normalisation(1.0, None, step.normalisation.noise_shape)
    torch.testing.assert_close(found, held_out_losses(step, normalised), rtol=1e-5, atol=1e-6)


def test_the_normalisation_travels_with_the_state_of_the_step(tiny_values):
    step, _ = prepared(tiny_values)
    state = copy.deepcopy(step.state_dict())
    other = LatentDiffusionStep(step.settings, CPU, codec=step.codec)
    assert not torch.equal(torch.as_tensor(other.normalisation.scale), torch.as_tensor(step.normalisation.scale))
    other.load_state_dict(state)
    for name, values in step.normalisation.content.items():
        assert torch.equal(torch.as_tensor(values), torch.as_tensor(other.normalisation.content[name]))
        assert torch.equal(torch.as_tensor(values), torch.as_tensor(other.metadata[name]))


def test_training_and_sampling_use_the_shaped_noise(tiny_values, monkeypatch):
    step, latents = prepared(tiny_values)
    assert latents.read is not None
    mean, sigma = latents.read(0)
    batch = LatentBatch(mean[None], sigma[None], (0,), None, ("a",))
    seen = []

    def target(clean: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        seen.append(noise)
        return noise

    monkeypatch.setattr(step.noise_process, "target", target)
    step.backward([batch], 0)
    white = step.noise.normal("diffusion", (0,), mean.shape)
    expected = step.normalisation.shaped(white)
    assert (expected - white).norm() > 0.01 * white.norm()
    torch.testing.assert_close(seen[0], expected)

    noise, given = SampleNoise(3, CPU.device), []

    def predict(noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        given.append(noisy)
        return torch.zeros_like(noisy)

    shaped = step.normalisation.shaped
    arguments = (predict, step.noise_process, noise, [2], mean.shape, 2, "ddpm")
    found = [sample_latents(*arguments, shaped=change) for change in (shaped, lambda white: white)]
    torch.testing.assert_close(given[0], shaped(noise.normal("sample", [2], mean.shape)))
    # Everything is linear in the noise here, so the noise of the step between is shaped as well.
    torch.testing.assert_close(found[0], shaped(found[1]), rtol=1e-4, atol=1e-4)
