"""Conditions: concatenated to the latent, hidden with their own probability, guided, and absent without a trace."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from diffusion.conditioning import (
    ConditionBatch,
    empty_condition,
    error_weights,
    hidden,
    some_hidden,
)
from diffusion.latents import LatentBatch
from diffusion.sampling import guided
from runtime.randomness import SampleNoise
from settings import CheckpointError
from settings.conditioning import ConditioningSettings
from tests.training.steps import CPU, assert_same_gradients, gradients, ldm_step

LABELS: dict[str, Any] = {"label_map": {"source": "maps", "num_classes": 4}}
NUMBERS: dict[str, Any] = {"tabular": {"table": "t", "continuous": ["age"], "categorical": ["sex"]}}
HOLES: dict[str, Any] = {"volume": {"encoding": "autoencoder", "source": "target", "degrade": {"hole": [4, 4, 4]}}}
BOTH: dict[str, Any] = {"type": "class", "num_classes": 3, "dropout": 0.5, **LABELS}


def shares(number: int, *grid: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand((number, 4, *grid), generator=generator).softmax(dim=1)


def hole_batch(shape: tuple[int, ...], number: int = 3) -> LatentBatch:
    """Latents with a hole in all but the last, which has an empty mask."""
    generator = torch.Generator().manual_seed(3)
    volume = torch.randn((number, shape[0] + 1, *shape[1:]), generator=generator)
    volume[:, -1] = 1
    volume[:-1, -1, 1:3, 1:3, 1:3] = 0
    volume[:-1, -1, 3, 1:3, 1:3] = 0.25
    mean = torch.randn((number, *shape), generator=generator)
    return LatentBatch(mean, tuple(range(number)), ConditionBatch({"volume": volume}))


def test_errors_count_by_what_is_unknown_and_all_that_is_known_counts_half_as_much(tiny_values):
    step = ldm_step(tiny_values, conditioning=HOLES | {"dropout": 0})
    effects = torch.tensor([0.5, 1.0, 1.5]).view(3, 1, 1, 1)
    batch = hole_batch(step.settings.latent_shape)
    weights = error_weights(batch.condition, effects)
    torch.testing.assert_close(weights[:2].mean(dim=(1, 2, 3, 4)), torch.ones(2))
    torch.testing.assert_close(weights / weights[:, 1:2], effects.expand_as(weights))
    known, part, hole = weights[0, 1, 0, 0, 0], weights[0, 1, 3, 1, 1], weights[0, 1, 1, 1, 1]
    torch.testing.assert_close(known, torch.tensor(1 / 3))
    torch.testing.assert_close(part - known, 0.75 * (hole - known))
    of_hidden = error_weights(hidden(batch.condition, step.settings.ldm.conditioning), effects)
    torch.testing.assert_close(of_hidden, effects.expand_as(weights))
    in_hole = error_weights(batch.condition, effects, of_known=0.0)
    assert in_hole[0, 0, 0, 0, 0] == in_hole[2].max() == 0
    # A network that says nothing has the weighted square of its target as its loss.
    torch.nn.init.zeros_(step.unet.out[2].conv.weight)
    torch.nn.init.zeros_(step.unet.out[2].conv.bias)
    step._voxel_effects = effects
    loss = step.backward([batch], 0)["diffusion"]
    clean = step.clean_latents(batch)
    noise = step.noise.normal("diffusion", batch.positions, clean.shape[1:])
    target = step.noise_process.target(clean, noise, step.noise_process.times(step._spread(batch.positions)))
    torch.testing.assert_close(loss, (weights * target.square()).mean())


@pytest.mark.parametrize("batch_size", [1, 2])
def test_accumulated_micro_batches_with_conditions_have_the_gradients_of_one(tiny_values, batch_size):
    found = []
    for size in (4, batch_size):
        step = ldm_step(tiny_values, conditioning=BOTH | NUMBERS)
        shape = step.settings.latent_shape
        mean = torch.randn((4, *shape), generator=torch.Generator().manual_seed(3))
        maps = shares(4, *shape[1:])
        batches = [
            LatentBatch(
                *(mean[part], tuple(range(4))[part]),
                ConditionBatch(
                    {
                        "class_label": torch.tensor([0, 1, 2, 0])[part],
                        "label map": maps[part],
                        "tabular": torch.linspace(-1, 1, 72).view(4, 18)[part],
                    }
                ),
            )
            for part in (slice(start, start + size) for start in range(0, 4, size))
        ]
        step.backward(batches, 2)
        found.append(gradients(step))
    assert_same_gradients(found[0], found[1], 1e-5)


def test_each_condition_and_each_number_is_hidden_with_the_same_probability_and_often_together():
    s = ConditioningSettings.model_validate(BOTH | NUMBERS)
    number, noise = 4000, SampleNoise(1, CPU.device)
    given = {
        "class_label": torch.zeros(number, dtype=torch.long),
        "label map": torch.full((number, 4, 1, 1, 1), 0.25),
        "tabular": torch.ones(number, 18),
    }
    found = some_hidden(ConditionBatch(given), s, lambda purpose: noise.uniform(purpose, range(number))).parts
    zeros = [found["label map"].flatten(1) == 0, found["tabular"][:, :2] == 0, found["tabular"][:, 2:] == 0]
    assert all(torch.equal(part.all(dim=1), part.any(dim=1)) for part in zeros)
    is_hidden = [found["class_label"] == 3, *(part.all(dim=1) for part in zeros)]
    for one, other in itertools.combinations(is_hidden, 2):
        assert 0.47 < one.double().mean() < 0.53
        assert 0.47 < other.double().mean() < 0.53
        # Half of the samples draw once for all: 0.5 * 0.5 + 0.5 * 0.5 * 0.5 of all.
        assert 0.34 < (one & other).double().mean() < 0.41


def test_numbers_add_their_embedding_and_nothing_else(tiny_values):
    plain, step = ldm_step(tiny_values), ldm_step(tiny_values, conditioning=NUMBERS)
    new = step.unet.state_dict().keys() - plain.unet.state_dict().keys()
    assert new == {f"number_embedding.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")}
    grid = step.settings.latent_shape[1:]
    noisy, times, numbers = torch.randn(2, 3, *grid), torch.tensor([3, 500]), torch.randn(2, 18)
    step.unet.load_state_dict(plain.unet.state_dict(), strict=False)
    layers = step.unet.number_embedding
    assert layers is not None
    with torch.no_grad():
        given, other = (step.unet(noisy, times, numbers=part) for part in (numbers, 2 * numbers))
        layers[2].weight.zero_()  # type: ignore[index]
        layers[2].bias.zero_()  # type: ignore[index]
        torch.testing.assert_close(step.unet(noisy, times, numbers=numbers), plain.unet(noisy, times))
    assert (given - other).abs().max() > 1e-4


def test_guidance_compares_with_all_conditions_hidden(tiny_values):
    step = ldm_step(tiny_values, conditioning=BOTH, sampling={"guidance_scale": 3.0})
    step.unet.eval()
    torch.manual_seed(0)
    grid = step.settings.latent_shape[1:]
    noisy, times = torch.randn(2, 3, *grid), torch.tensor([500, 500])
    maps = shares(2, *grid)
    classes, no_class = torch.tensor([0, 2]), torch.tensor([3, 3])
    given = ConditionBatch({"class_label": classes, "label map": maps})
    with torch.no_grad():
        found = guided(step.unet, step.settings.ldm, given)(noisy, times)
        with_all = step.unet(torch.cat([noisy, maps], dim=1), times, class_labels=classes)
        without = step.unet(torch.cat([noisy, torch.zeros(2, 4, *grid)], dim=1), times, class_labels=no_class)
    # Batches of two and of four may be summed in another order, and guidance multiplies what that changes.
    torch.testing.assert_close(found, without + 3 * (with_all - without), rtol=1e-4, atol=1e-4)
    assert (with_all - without).abs().max() > 1e-4


def test_a_hidden_condition_says_nothing_in_the_shape_of_a_given_one(tiny_values):
    """Else guidance would compare two predictions that both know, for example, the age."""
    settings = ldm_step(tiny_values, conditioning=BOTH | NUMBERS).settings
    classes, maps = torch.tensor([1, 2]), shares(2, *settings.latent_shape[1:])
    given = {"class_label": classes, "label map": maps, "tabular": torch.ones(2, 18)}
    nothing = hidden(ConditionBatch(given), settings.ldm.conditioning).parts
    for name, empty in empty_condition(settings, 2).parts.items():
        assert nothing[name].shape == empty.shape
        assert not nothing[name].any() or name == "class_label"
    assert nothing["class_label"].tolist() == [3, 3]


def test_resuming_with_other_partners_is_refused(tiny_values):
    step = ldm_step(tiny_values, conditioning=LABELS)
    step._partners = "these"
    state = step.state_dict()
    step.load_state_dict(state)
    step._partners = "others"
    with pytest.raises(CheckpointError, match="made with other conditions: the volumes' partners changed"):
        step.load_state_dict(state)
