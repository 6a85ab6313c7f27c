"""Conditions as the network takes them: around their mean, with a first guess from a regression on label maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diffusion.conditioning import regression as regression_module
from diffusion.conditioning.joined_scale import LABEL_MAP, VOLUME, JoinedScale, joined_scale
from diffusion.conditioning.regression import (
    NAMES,
    STILL,
    LabelRegression,
    features,
    fit,
    moved,
    moves_of,
    regress,
)
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
    labels = {"num_classes": 3, "source": "maps", "regression": True}
    settings = with_conditions(tiny_values, normalise="position", labels=labels)
    maps = shares_of(6, settings.latent_shape[1:])
    latents = torch.randn(6, *settings.latent_shape, generator=GENERATOR)
    plain = joined_scale({LABEL_MAP: lambda number, _: maps[number]}, 6, settings, CPU)
    regression, _ = regress(maps.__getitem__, range(6), latents)
    weights = torch.stack([regression.weights(one) for one in maps])
    assert weights.std() > 0.01
    torch.testing.assert_close(weights.mean(dim=0), torch.zeros(weights.shape[1]), atol=1e-4, rtol=0)
    scale = JoinedScale(plain.volume_scale, plain.centres, regression)
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


def test_a_regression_finds_a_linear_relation_and_guesses_latents_of_new_maps():
    maps = shares_of(60, (6, 5, 4))
    relation = torch.randn(3, len(features(maps[0])), generator=GENERATOR)
    patterns = torch.randn(3, 2, 6, 5, 4, generator=GENERATOR)
    seen = torch.stack([features(one) for one in maps])
    # Few patterns of the maps, so that 50 maps tell all of the relation.
    seen = (
        seen.mean(dim=0)
        + torch.linalg.svd(seen - seen.mean(dim=0), full_matrices=False)[2][:4]
        .T.mm(torch.randn(4, 60, generator=GENERATOR))
        .T
    )
    latents = torch.einsum("nk,kcdhw->ncdhw", seen @ relation.T, patterns) + 5
    regression, left_out = fit(seen[:50], latents[:50])
    assert len(regression.offset) == left_out.shape[1] == 3
    weights = seen[50:] @ regression.inputs.T + regression.offset
    guessed = torch.stack([regression.guess(one) for one in weights])
    true = latents[50:] - latents[:50].mean(dim=0)
    assert (guessed - true).square().mean() < 0.2 * true.square().mean()


def test_what_a_training_volume_gets_comes_from_the_others_alone(monkeypatch):
    monkeypatch.setattr(regression_module, "PENALTIES", (0.5,))
    maps = torch.randn(9, 20, generator=GENERATOR, dtype=torch.float64)
    latents = torch.randn(9, 1, 3, 3, 3, generator=GENERATOR)
    regression, left_out = fit(maps, latents)
    penalty = 0.5 * (maps - maps.mean(dim=0)).square().sum(dim=1).mean()
    for number in range(9):
        others = [n for n in range(9) if n != number]
        inputs, targets = maps[others], latents[others].flatten(1).double()
        centred = inputs - inputs.mean(dim=0)
        inverse = torch.linalg.inv(centred @ centred.T + penalty * torch.eye(8, dtype=torch.float64))
        expected = (maps[number] - inputs.mean(dim=0)) @ centred.T @ inverse @ (targets - targets.mean(dim=0))
        found = regression.guess(left_out[number]).flatten().double()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_regression_of_equal_maps_guesses_nothing():
    regression, left_out = fit(torch.ones(5, 8), torch.randn(5, 1, 2, 2, 2, generator=GENERATOR))
    assert isinstance(regression, LabelRegression)
    assert regression.guess(regression.weights(torch.ones(2, 2, 2, 2))).abs().max() < 1e-4
    assert left_out.isfinite().all()


def test_what_moved_maps_give_a_training_volume_comes_from_the_others_alone(monkeypatch):
    monkeypatch.setattr(regression_module, "PENALTIES", (0.5,))
    maps = shares_of(7, (12, 3, 2)).double()
    latents = torch.randn(7, 1, 12, 3, 2, generator=GENERATOR).double()
    moves = moves_of((12, 3, 2))
    assert moves == [(0, 0, 0), (1, 0, 0), (-1, 0, 0)]
    seen = torch.stack([torch.stack([features(moved(one, move)) for move in moves]) for one in maps])
    regression, left_out = fit(seen, latents, moves)
    rows = seen.flatten(0, 1)
    penalty = 0.5 * (rows - rows.mean(dim=0)).square().sum(dim=1).mean()
    still = regression.inputs.double() @ (seen[:, 0].mean(dim=0) - rows.mean(dim=0))
    patterns = regression.patterns.flatten(1)
    targets = torch.stack([moved(latents, move).flatten(1) @ patterns.T for move in moves], dim=1)
    for number in range(7):
        others = [n for n in range(7) if n != number]
        inputs, wanted = seen[others].flatten(0, 1), targets[others].flatten(0, 1)
        centred = inputs - inputs.mean(dim=0)
        inverse = torch.linalg.inv(centred @ centred.T + penalty * torch.eye(18, dtype=torch.float64))
        expected = (seen[number, 0] - inputs.mean(dim=0)) @ centred.T @ inverse @ (wanted - wanted.mean(dim=0))
        torch.testing.assert_close(left_out[number].double(), expected - still, atol=1e-5, rtol=1e-5)


def test_a_regression_follows_what_moves_with_a_structure_from_few_volumes():
    grid = (12, 12, 12)
    axes = torch.stack(torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij"))

    def case(number: int) -> tuple[Tensor, Tensor]:
        centre = 4 + 4 * torch.rand(3, generator=torch.Generator().manual_seed(number))
        inside = ((axes - centre[:, None, None, None]).square().sum(dim=0) < 9).float()
        return torch.stack([1 - inside, inside]), (axes[0] - centre[0]).cos()[None]

    maps, latents = (torch.stack(parts) for parts in zip(*map(case, range(24)), strict=True))
    errors = []
    for moves in ([STILL], moves_of(grid)):
        seen = torch.stack([torch.stack([features(moved(one, move)) for move in moves]) for one in maps[:12]])
        regression, _ = fit(seen, latents[:12], moves)
        guessed = torch.stack([regression.guess(regression.weights(one)) for one in maps[12:]])
        errors.append((guessed - latents[12:] + latents[:12].mean(dim=0)).square().mean().item())
    assert errors[1] < 0.9 * errors[0], errors


def test_a_regression_that_was_stored_before_is_read_with_coarser_maps():
    maps, shape = shares_of(2, (16, 16, 16)), (1, 16, 16, 16)
    inputs = torch.randn(2, 2 * 8**3, generator=GENERATOR)
    content = dict(zip(NAMES, (inputs, torch.zeros(2), torch.zeros(2, *shape)), strict=True))
    former = LabelRegression.stored(content, 3, shape)
    expected = inputs @ torch.nn.functional.avg_pool3d(maps[0, 1:], 2).flatten()
    torch.testing.assert_close(former.weights(maps[0]), expected, atol=1e-4, rtol=1e-4)
    assert len(features(maps[0])) == 2 * 16**3
    assert len(features(torch.zeros(200, 16, 16, 16))) == 199 * 8**3
