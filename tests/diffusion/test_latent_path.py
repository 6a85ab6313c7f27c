"""The path of a latent, written out: its mean, times the scale in training, divided by it in decoding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data import prepare_volumes
from data.batches import BatchPlan, VolumeOrder
from data.loading import load_file
from diffusion.conditioning import NOTHING, ConditionBatch
from diffusion.latents import LatentBatch, Latents, prepare_latents
from diffusion.sampling import VolumeSampler
from runtime.randomness import SampleNoise
from tests.diffusion.test_noise_process import alpha_bar
from tests.training.steps import CPU, ldm_step
from training.ldm_step import LatentDiffusionStep
from training.validation.skill import NUM_LEVELS
from training.validation.stages import LdmValidation, sample_preview

SCALE = 0.25


def made_step(values, **ldm) -> LatentDiffusionStep:
    step = ldm_step(values, SCALE, **ldm)
    # Norms hide the scale of what they are given, except where it is added to something.
    nn.init.normal_(step.autoencoder.post_quant_conv.conv.bias, std=3.0, generator=torch.Generator().manual_seed(1))
    return step


def make_batch(step: LatentDiffusionStep, positions: tuple[int, ...], labels: Tensor | None = None) -> LatentBatch:
    generator = torch.Generator().manual_seed(positions[0])
    shape = (len(positions), *step.settings.latent_shape)
    mean = 2 + 3 * torch.randn(shape, generator=generator)
    return LatentBatch(mean, positions, NOTHING if labels is None else ConditionBatch({"class_label": labels}))


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_stage_two_trains_on_the_means_of_the_latents(tiny_values, cache):
    step = made_step(tiny_values, latents={"cache": cache})
    nn.init.constant_(step.autoencoder.quant_conv_log_sigma.conv.bias, 6.0)  # a sigma of about 20
    volumes = prepare_volumes(step.settings.data, step.settings.seed, 1)
    latents = prepare_latents(step.codec, volumes, step.settings, CPU)
    order = VolumeOrder(3, len(volumes.train))
    [[batch]] = latents.training_batches(BatchPlan(3, 4, 1), 0, 1)
    images = torch.stack([load_file(volumes.train[order(place)], latents.settings).image for place in batch.positions])
    with torch.no_grad():
        mean, sigma = step.autoencoder.encode(images)
    assert sigma.min() > 1
    torch.testing.assert_close(step.clean_latents(batch), SCALE * mean, rtol=1e-4, atol=1e-5)


def signal_and_level(step: LatentDiffusionStep, times: Tensor) -> tuple[Tensor, Tensor]:
    """Alpha bar from a loop over the betas, or the straight line of rectified flow."""
    s = step.settings.ldm.scheduler
    if s.type == "rflow":
        level = times / s.num_train_timesteps
        return (1 - level).view(-1, 1, 1, 1, 1), level.view(-1, 1, 1, 1, 1)
    kept = torch.tensor(alpha_bar(s), dtype=torch.float64)[times].view(-1, 1, 1, 1, 1)
    return kept.sqrt().float(), (1 - kept).sqrt().float()


def expected_pass(step: LatentDiffusionStep, batches: list[LatentBatch]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Loss, gradients and times of the update: all latents in one batch and one graph."""
    clean = SCALE * torch.cat([batch.mean for batch in batches])
    positions = [place for batch in batches for place in batch.positions]
    noise = SampleNoise(step.settings.seed, CPU.device)
    added = noise.normal("diffusion", positions, clean.shape[1:])
    times = step.noise_process.times(step._spread(positions))
    signal, level = signal_and_level(step, times)
    noisy = signal * clean + level * added
    kind = "flow" if step.settings.ldm.scheduler.type == "rflow" else step.settings.ldm.scheduler.prediction
    target = {"epsilon": added, "v": signal * added - level * clean, "flow": clean - added}[kind]
    loss = ((step.unet(noisy, times) - target) ** 2).mean()
    return loss.detach(), list(torch.autograd.grad(loss, list(step.unet.parameters()))), times


SCHEDULERS: list[dict[str, Any]] = [
    {"scheduler": {"prediction": "epsilon", "schedule": "scaled_linear_beta"}},
    {"scheduler": {"prediction": "v", "schedule": "scaled_linear_beta"}},
    {"scheduler": {"type": "rflow"}, "sampling": {"sampler": "rflow"}},
]


@pytest.mark.parametrize(
    ("changes", "amp_dtype"), [*((changes, "float32") for changes in SCHEDULERS), (SCHEDULERS[1], "bfloat16")]
)
def test_the_update_trains_on_scaled_latents_noised_and_targeted_by_the_formulas(tiny_values, changes, amp_dtype):
    is_mixed = amp_dtype == "bfloat16"
    tiny_values["device"] = {"type": "cpu", "mixed_precision": is_mixed, "amp_dtype": amp_dtype if is_mixed else "auto"}
    step = made_step(tiny_values, **changes)
    batches = [make_batch(step, (20, 21)), make_batch(step, (22, 23)), make_batch(step, (24, 25))]
    loss, expected, times = expected_pass(step, batches)
    assert len(set(times.tolist())) == 6
    with torch.backends.mkldnn.flags(enabled=not is_mixed):  # its 16-bit weight gradients read memory they never wrote
        terms = step.backward(batches, 4)
    torch.testing.assert_close(terms["diffusion"], loss, rtol=0.02 if is_mixed else 1e-4, atol=0)
    vector = torch.cat([g.flatten() for g in expected])
    found = torch.cat([p.grad.flatten() for p in step.unet.parameters()])
    lowest, highest = (1e-4, 0.1) if is_mixed else (0.0, 1e-4)
    assert lowest * vector.norm() <= (found - vector).norm() < highest * vector.norm()


class KnowsTheAnswer(nn.Module):
    """A U-Net that predicts exactly the noise that leads to one clean, scaled latent."""

    def __init__(self, step: LatentDiffusionStep, clean: Tensor) -> None:
        super().__init__()
        self.process, self.clean = step.noise_process, clean

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        signal, level = self.process.coefficients(times)
        return self.process.target(self.clean.expand_as(noisy), (noisy - signal * self.clean) / level, times)


@pytest.mark.parametrize("changes", SCHEDULERS, ids=["epsilon", "v", "rflow"])
def test_a_network_that_knows_the_latent_gives_back_the_volume_it_was_encoded_from(tiny_values, changes):
    """The round trip of both stages: encode, scale as in training, draw, unscale as in sampling, decode."""
    step = made_step(tiny_values, **changes)
    image = torch.rand(1, 16, 16, 16, generator=torch.Generator().manual_seed(2)) * 2 - 1
    mean = step.codec.encode(image)
    clean = step.clean_latents(LatentBatch(mean[None], (0,)))
    network = KnowsTheAnswer(step, clean)
    [found] = VolumeSampler(network, step.codec, step.settings, step.normalisation, 9).draw([4])
    torch.testing.assert_close(found, step.codec.decode(mean), rtol=1e-3, atol=1e-3)


@pytest.fixture
def encoded(tiny_values) -> tuple[LatentDiffusionStep, Latents]:
    """A step with averaged weights of its own, and the latents of phantoms."""
    step = made_step(tiny_values, training={"ema_decay": 0.9}, **SCHEDULERS[1])
    volumes = prepare_volumes(step.settings.data, step.settings.seed, 1)
    latents = prepare_latents(step.codec, volumes, step.settings, CPU)
    step.normalisation = latents.normalisation
    assert step.average is not None
    for average in step.average.averages:
        average.mul_(0.9)
    return step, latents


def test_the_held_out_loss_is_of_scaled_means_with_the_averaged_weights(encoded):
    step, latents = encoded
    assert step.average is not None
    assert latents.read is not None
    averaged = copy.deepcopy(step.unet).eval()
    with torch.no_grad():
        for parameter, average in zip(averaged.parameters(), step.average.averages, strict=True):
            parameter.copy_(average)
    validation, noise = LdmValidation(step, latents), SampleNoise(step.settings.seed, CPU.device)
    losses, errors = [], []
    for place in range(len(latents.volumes.val)):
        mean = latents.read(len(latents.volumes.train) + place, 0)
        clean = latents.normalisation.apply(mean)
        for level, time in enumerate(validation.skill.held_out.times):
            added, times = noise.normal(f"validation {level}", [place], mean.shape), time[None]
            signal, noise_level = signal_and_level(step, times)
            noisy = signal * clean + noise_level * added
            with torch.no_grad():
                prediction = averaged(noisy, times)
            losses.append((prediction - signal * added + noise_level * clean).square().mean().item())
            errors.append((signal * noisy - noise_level * prediction - clean).square().mean().item())
    metrics, preview = validation()
    assert metrics["val_diffusion"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    linear = validation.skill.linear_errors
    assert linear is not None
    by_level = torch.tensor(errors, dtype=torch.float64).view(-1, NUM_LEVELS).mean(dim=0) / linear
    assert metrics["val_skill"] == pytest.approx(by_level.mean().item(), rel=1e-4)
    assert [value for name, value in metrics.items() if name.startswith("val_skill_")] == pytest.approx(
        by_level.tolist(), rel=1e-4
    )
    assert preview is not None
    assert step.unet.training


def test_preview_samples_are_those_that_a_user_will_draw(encoded):
    step, latents = encoded
    shown = sample_preview(step, latents)
    seed = step.settings.seed
    volumes = VolumeSampler(step.unet, step.codec, step.settings, step.normalisation, seed).draw([0, 1])
    for place, volume in enumerate(volumes):
        voxels = torch.as_tensor(shown.volumes[f"sample_{place}"].voxels).float()
        expected = ((volume[0] + 1) / 2).clamp(0, 1) * 255
        assert (voxels.reshape(expected.shape) - expected).abs().max() <= 1
