"""Conditions as the network takes them: around their mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffusion.conditioning.joined_scale import LABEL_MAP, VOLUME, JoinedScale, joined_scale
from runtime.processes import Process
from settings import Settings

CPU = Process(torch.device("cpu"))
GENERATOR = torch.Generator().manual_seed(3)


def with_conditions(tiny_values, **conditioning) -> Settings:
    tiny_values["ldm"]["conditioning"] = conditioning
    return Settings.model_validate(tiny_values)


def shares_of(number: int, grid: tuple[int, ...], classes: int = 3) -> Tensor:
    return torch.rand(number, classes, *grid, generator=GENERATOR).softmax(dim=1)


def test_label_maps_are_joined_around_their_mean_with_a_channel_that_says_they_are_given(tiny_values):
    settings = with_conditions(tiny_values, normalise="position", labels={"num_classes": 3, "source": "maps"})
    maps = shares_of(6, settings.latent_shape[1:])
    scale = joined_scale({LABEL_MAP: lambda number, _: maps[number]}, 5, settings, CPU)
    found = torch.stack([scale.apply(LABEL_MAP, one) for one in maps])
    assert (found[:, 0] == 1).all()
    torch.testing.assert_close(found[:5, 1:].mean(dim=0), torch.zeros_like(found[0, 1:]), atol=1e-5, rtol=0)
    # These shares vary by less than 0.2, so they are multiplied by 5.
    torch.testing.assert_close(found[5, 1:], (maps[5] - maps[:5].mean(dim=0))[1:] * 5, atol=1e-5, rtol=1e-5)


def test_volumes_are_joined_around_the_mean_of_what_is_known_and_zero_where_nothing_is(tiny_values):
    volume = {"encoding": "resample", "source": "target", "degrade": {"hole": [2, 2, 2]}}
    settings = with_conditions(tiny_values, normalise="position", volume=volume)
    values = 7 + 3 * torch.randn(6, 1, *settings.latent_shape[1:], generator=GENERATOR)
    known = torch.ones_like(values)
    for number in range(6):
        known[number, :, number % 3] = 0
    values[known == 0] = -1000
    joined = torch.cat([values, known], dim=1)
    scale = joined_scale({VOLUME: lambda number, _: joined[number]}, 6, settings, CPU)
    found = torch.stack([scale.apply(VOLUME, one) for one in joined])
    assert torch.equal(found[:, 1:], known)
    assert (found[:, :1][known == 0] == 0).all()
    torch.testing.assert_close(found[:, :1].sum(dim=0), torch.zeros_like(found[0, :1]), atol=1e-4, rtol=0)
    assert found[:, :1][known == 1].std().item() == pytest.approx(1, abs=0.05)


def test_what_is_stored_gives_the_same_channels_and_damage_is_refused(tiny_values):
    labels = {"num_classes": 3, "source": "maps"}
    settings = with_conditions(tiny_values, normalise="position", labels=labels)
    maps = shares_of(6, settings.latent_shape[1:])
    scale = joined_scale({LABEL_MAP: lambda number, _: maps[number]}, 6, settings, CPU)
    again = JoinedScale.stored(scale.content, settings)
    joined = scale.apply(LABEL_MAP, maps[0])
    assert len(joined) == settings.ldm.conditioning.num_joined(settings.autoencoder.latent_channels)
    assert torch.equal(joined, again.apply(LABEL_MAP, maps[0]))
    for name, value in scale.content.items():
        worse = torch.nan if name == "volume_scale" else torch.full((1, 2), 0.5)
        with pytest.raises(ValueError, match=r"not a|shape|missing"):
            JoinedScale.stored(scale.content | {name: worse}, settings)
        assert isinstance(value, float | Tensor)


def test_without_the_key_conditions_stay_as_they_were(tiny_values):
    settings = with_conditions(tiny_values, labels={"num_classes": 3, "source": "maps"})
    maps = shares_of(4, settings.latent_shape[1:])
    scale = joined_scale({LABEL_MAP: lambda number, _: maps[number]}, 4, settings, CPU)
    assert torch.equal(scale.apply(LABEL_MAP, maps[1]), maps[1])
    assert scale.content == {"volume_scale": 1.0}
    assert JoinedScale.stored({}, settings) == scale
