"""The first guess of what is in a hole: exact under its Gaussian model, and never from the volume itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from diffusion.conditioning import hole_guess
from diffusion.conditioning.hole_guess import DOUBT, FEWEST_TO_SPLIT, HoleGuess, coarse_grid, fit, fit_to_volumes
from diffusion.conditioning.volumes import hole_mask
from runtime.processes import Process

CPU = Process(torch.device("cpu"))
GRID = (6, 5, 4)


def volumes(number: int, channels: int = 1, grid: tuple[int, ...] = GRID, seed: int = 0) -> Tensor:
    """Return volumes in the network's range that share a smooth pattern of changing strength."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.meshgrid(*(torch.linspace(-1, 1, n) for n in grid), indexing="ij")
    patterns = torch.stack([axes[0], axes[1] * axes[2], axes[0] ** 2 - axes[2]])
    weights = torch.randn(number, channels, len(patterns), generator=generator)
    noise = torch.randn(number, channels, *grid, generator=generator)
    return (0.25 * torch.einsum("nck,kdhw->ncdhw", weights, patterns) + 0.05 * noise - 0.2).clamp(-1, 1)


def dense(model: HoleGuess) -> Tensor:
    """Return the covariance as a matrix in double precision, from the noise that has it."""
    shape = model.space.noise_shape
    assert shape is not None
    mean = model.space.mean
    assert mean is not None
    units = torch.eye(mean.numel()).view(-1, *mean.shape)
    root = torch.stack([shape(unit[None])[0].flatten() for unit in units]).double()
    return root.T @ root


@pytest.mark.parametrize("channels", [1, 2])
def test_the_guess_is_what_the_gaussian_expects_given_the_rest(channels):
    examples = volumes(9, channels)
    model = fit(examples)
    covariance = dense(model)
    image = volumes(1, channels, seed=1)[0]
    unknown = torch.zeros(GRID, dtype=torch.bool)
    unknown[1:4, 2:, 1:3] = True
    known = (~unknown).expand(channels, *GRID).flatten()
    value = model.space.apply(image).flatten().double()
    inner = covariance[known][:, known] + DOUBT * torch.eye(int(known.sum()), dtype=torch.float64)
    expected = covariance[~known][:, known] @ torch.linalg.solve(inner, value[known])
    found = model.space.apply(model.fill(image, unknown)).flatten().double()
    torch.testing.assert_close(found[known], value[known])
    # Conjugate gradients end at a residual of 1e-3.
    torch.testing.assert_close(found[~known], expected, atol=5e-3, rtol=5e-3)
    assert expected.abs().mean() > 0.1


def test_the_equations_of_few_smooth_volumes_are_solved_to_the_end(monkeypatch):
    coarse = torch.randn(6, 1, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    smooth = 0.4 * F.interpolate(coarse, size=(24, 24, 24), mode="trilinear", align_corners=True)
    *train, image = smooth.clamp(-1, 1)
    model = fit(torch.stack(train))
    unknown = hole_mask((24, 24, 24), (6, 6, 6), 0, "x", 0)
    found = model.fill(image, unknown)
    monkeypatch.setattr(hole_guess, "LARGEST_RESIDUAL", 1e-5)
    monkeypatch.setattr(hole_guess, "MOST_ITERATIONS", 1000)
    torch.testing.assert_close(found, model.fill(image, unknown), atol=3e-3, rtol=0)


def test_what_a_volume_holds_in_the_hole_has_no_influence_and_the_rest_stays():
    model = fit(volumes(9))
    image = volumes(1, seed=2)[0]
    unknown = hole_mask(GRID, (3, 2, 2), 0, "x", 0)
    first = model.fill(image, unknown)
    second = model.fill(image.masked_fill(unknown, torch.nan), unknown)
    assert torch.equal(first, second)
    assert torch.equal(first[:, ~unknown], image[:, ~unknown])
    assert first.abs().max() <= 1
    everything = torch.ones(GRID, dtype=torch.bool)
    torch.testing.assert_close(model.fill(image, everything), model.space.mean)
    assert torch.equal(model.fill(image, ~everything), image)


def test_on_a_finer_grid_the_guess_is_closer_to_new_volumes_than_their_mean():
    grid = (40, 16, 34)
    assert coarse_grid(grid) == (20, 16, 17)
    assert coarse_grid((32, 33, 512)) == (32, 17, 32)
    train, new = volumes(24, grid=grid), volumes(6, grid=grid, seed=3)
    guesses = fit_to_volumes(train.__getitem__, len(train), (1, *grid), CPU)
    assert guesses.model is not None
    errors = torch.zeros(2)
    for place, image in enumerate(new):
        unknown = hole_mask(grid, (12, 6, 10), 0, str(place), 0)
        found = guesses.model.fill(image, unknown)
        errors += torch.stack([(one - image)[:, unknown].abs().mean() for one in (found, train.mean(dim=0))])
    assert errors[0] < 0.6 * errors[1]


def test_no_volume_is_guessed_by_a_model_that_was_fitted_to_it():
    train = volumes(7)
    before = fit_to_volumes(train.__getitem__, 7, (1, *GRID), CPU)
    changed = train.clone()
    changed[3] = -changed[3]
    after = fit_to_volumes(changed.__getitem__, 7, (1, *GRID), CPU)
    same = [one == other for one, other in zip(before.digests(8), after.digests(8), strict=True)]
    assert same == [False, True, False, True, False, True, False, False]
    assert len(set(before.digests(8))) == 3


class Second(Process):
    """A second process, which gets what the first one found."""

    def from_first(self, value: object) -> object:
        """Return the first process's value."""
        assert value is None, "this process has nothing to say"
        return "the first one's"


def test_all_processes_have_the_model_of_the_first():
    train = volumes(6)
    found = fit_to_volumes(train.__getitem__, len(train), (1, *GRID), Second(torch.device("cpu"), rank=1))
    assert found == "the first one's"


@pytest.mark.parametrize("number", [1, 2, FEWEST_TO_SPLIT, 5])
def test_few_volumes_and_constant_ones_give_finite_guesses(number):
    for train in (volumes(number), torch.full((number, 1, *GRID), -1.0)):
        guesses = fit_to_volumes(train.__getitem__, number, (1, *GRID), CPU)
        for place in range(number):
            model = guesses.of(place)
            assert model is not None
            filled = model.fill(train[place], hole_mask(GRID, (2, 2, 2), 0, "x", 0))
            assert filled.isfinite().all()


@pytest.mark.parametrize("constant", [0.1, -1.0])
def test_a_channel_that_was_constant_in_training_does_not_spoil_the_others(constant):
    train, image = volumes(9, 2), volumes(1, 2, seed=1)[0]
    # The mean of equal values differs from them by rounding, which must not count as variance.
    train[:, 1], image[1] = constant, 0.5
    unknown = hole_mask(GRID, (3, 2, 2), 0, "x", 0)
    alone = fit(train[:, :1].contiguous()).fill(image[:1], unknown)
    torch.testing.assert_close(fit(train).fill(image, unknown)[:1], alone, atol=0.02, rtol=0)


def test_what_is_stored_fills_alike_and_damage_is_refused():
    model = fit(volumes(9, 2))
    again = HoleGuess.stored(dict(model.content), 2, GRID)
    assert again.digest == model.digest
    for name in model.content:
        with pytest.raises(ValueError, match="what is in holes: "):
            HoleGuess.stored({**model.content, name: torch.full((1, 2), torch.nan)}, 2, GRID)
    with pytest.raises(ValueError, match="what is in holes: "):
        HoleGuess.stored(dict(model.content), 1, GRID)
