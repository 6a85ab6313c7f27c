"""The stage-2 step: exact accumulation, gradients through the frozen decoder, and nothing but the U-Net moves."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from diffusion.conditioning import NOTHING, ConditionBatch
from diffusion.latents import LatentBatch, VolumeBatch
from diffusion.normalisation import Normalisation
from settings import CheckpointError
from tests.training.steps import assert_same_gradients, gradients, ldm_step
from training.ldm_step import LatentDiffusionStep


def make_batches(step: LatentDiffusionStep, batch_size: int, total: int = 4) -> list[LatentBatch]:
    generator = torch.Generator().manual_seed(3)
    mean = torch.randn((total, *step.settings.latent_shape), generator=generator)
    is_class = step.settings.ldm.conditioning.type == "class"
    condition = ConditionBatch({"class_label": torch.arange(total) % 3}) if is_class else NOTHING
    parts = [range(start, min(start + batch_size, total)) for start in range(0, total, batch_size)]
    return [LatentBatch(mean[list(part)], tuple(part), condition.rows(list(part))) for part in parts]


PIXEL_WEIGHT = 2.0
PIXEL = {"pixel_loss": {"weight": PIXEL_WEIGHT, "chunk_size": 1}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scheduler": {"prediction": "v"}},
        {"scheduler": {"type": "rflow"}, "sampling": {"sampler": "rflow"}},
        {"conditioning": {"type": "class", "num_classes": 3, "dropout": 0.5}},
        {"training": PIXEL},
    ],
)
def test_batch_4_once_has_the_gradients_of_batch_1_four_times(tiny_values, changes):
    found = []
    for batch_size in (4, 1):
        step = ldm_step(tiny_values, **changes)
        terms = step.backward(make_batches(step, batch_size), 5)
        found.append((gradients(step), terms["diffusion"]))
    assert_same_gradients(found[0][0], found[1][0], 1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=0)


def plain_gradients(step: LatentDiffusionStep, batch: LatentBatch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same objective in one graph: whole batch, nothing recomputed."""
    step.autoencoder.gradient_checkpointing_disable()
    process = step.noise_process
    clean = step.clean_latents(batch)
    noise = step.noise.normal("diffusion", batch.positions, clean.shape[1:])
    times = process.times(step._spread(batch.positions))
    noisy = process.add_noise(clean, noise, times)
    prediction = step.unet(noisy, times)
    diffusion = (prediction - process.target(clean, noise, times)).square().mean()
    predicted, _ = process.clean_and_noise(prediction, noisy, times)
    decoded, target = (step.autoencoder.decode(latent / step.normalisation.scale) for latent in (predicted, clean))
    weights = process.coefficients(times)[0].square()
    pixel = ((decoded - target.detach()).square() * weights).mean()
    (diffusion + PIXEL_WEIGHT * pixel).backward()
    return gradients(step), pixel.detach()


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("slab_rows", [0, 4])
def test_pixel_loss_in_chunks_has_the_gradients_of_the_plain_computation(tiny_values, prediction, slab_rows):
    tiny_values["autoencoder"]["training"]["slab_rows"] = slab_rows
    changes: dict[str, Any] = {"training": PIXEL, "scheduler": {"prediction": prediction}}
    lean, plain = ldm_step(tiny_values, **changes), ldm_step(tiny_values, **changes)
    [batch] = make_batches(lean, 3, total=3)
    expected, pixel = plain_gradients(plain, batch)
    terms = lean.backward([batch], 0)
    assert_same_gradients(expected, gradients(lean), 1e-5)
    torch.testing.assert_close(terms["pixel"], pixel, rtol=1e-5, atol=0)
    assert all(p.grad is None for p in lean.autoencoder.parameters())
    without = ldm_step(tiny_values, scheduler={"prediction": prediction})
    without.backward([batch], 0)
    change = sum((gradients(without)[name] - g).norm() for name, g in expected.items())
    assert change > 1e-2 * sum(g.norm() for g in expected.values())


def test_the_chunk_halves_when_memory_runs_out_and_the_gradients_stay(tiny_values, caplog):
    pixel = {"weight": 0.5, "chunk_size": 4, "adaptive_chunk": True}
    step, reference = (ldm_step(tiny_values, training={"pixel_loss": pixel}) for _ in range(2))
    [batch] = make_batches(step, 4)
    reference.backward([batch], 0)
    decode = step.autoencoder.decode

    def limited(latent: torch.Tensor) -> torch.Tensor:
        if len(latent) > 1:
            raise torch.OutOfMemoryError("as a full GPU says")
        return decode(latent)

    step.autoencoder.decode = limited  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.WARNING):
        step.backward([batch], 0)
    assert_same_gradients(gradients(reference), gradients(step), 1e-5)
    assert step.pixel_loss is not None
    assert step.pixel_loss.chunk_size == 1
    assert [record.args for record in caplog.records] == [(2,), (1,)]


def test_only_the_unet_moves(tiny_values):
    step = ldm_step(tiny_values, training=PIXEL)
    before = {name: tensor.clone() for name, tensor in step.autoencoder.state_dict().items()}
    weight = step.unet.conv_in.conv.weight.clone()
    step(make_batches(step, 4), 0)
    assert not torch.equal(weight, step.unet.conv_in.conv.weight)
    assert all(torch.equal(before[name], tensor) for name, tensor in step.autoencoder.state_dict().items())
    optimized = {id(p) for updater in step.updaters.values() for p in updater.parameters}
    assert optimized == {id(p) for p in step.unet.parameters()}


def test_a_volume_in_the_batch_gives_the_step_of_its_latent(tiny_values):
    """cache: none encodes inside the step and must train the same."""
    step, other = ldm_step(tiny_values), ldm_step(tiny_values, latents={"cache": "none"})
    images = torch.rand(2, 1, 16, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    mean = torch.stack([step.codec.encode(image) for image in images])
    step.backward([LatentBatch(mean, (4, 5))], 0)
    other.backward([VolumeBatch(images, (4, 5), ("a", "b"))], 0)
    assert_same_gradients(gradients(step), gradients(other), 1e-6)


def test_label_dropout_hides_about_its_share_of_the_labels(tiny_values):
    step = ldm_step(tiny_values, conditioning={"type": "class", "num_classes": 3, "dropout": 0.25})
    batch = LatentBatch(torch.empty(0), tuple(range(2000)), ConditionBatch({"class_label": torch.arange(2000) % 3}))
    labels = step._condition(batch).parts["class_label"]
    assert 0.2 < (labels == 3).double().mean() < 0.3
    assert torch.equal(labels[labels < 3], (torch.arange(2000) % 3)[labels < 3])


def test_neighbouring_positions_cover_all_timesteps_evenly(tiny_values):
    step = ldm_step(tiny_values)
    for start in (0, 12345):
        times = step.noise_process.times(step._spread(range(start, start + 100)))
        counts = torch.histc(times.float(), bins=10, min=0, max=1000)
        assert counts.min() >= 8
        assert counts.max() <= 12


def test_the_scale_travels_with_the_state_and_another_autoencoder_is_refused(tiny_values):
    step, other = ldm_step(tiny_values), ldm_step(tiny_values)
    step.normalisation = Normalisation.uniform(3, 0.123)
    other.load_state_dict(step.state_dict())
    assert torch.equal(other.normalisation.scale, torch.full((3, 1, 1, 1), 0.123))
    with torch.no_grad():
        next(other.autoencoder.parameters()).view(-1)[0] += 1e-3
    with pytest.raises(CheckpointError, match="autoencoder with other weights"):
        other.load_state_dict(step.state_dict())
