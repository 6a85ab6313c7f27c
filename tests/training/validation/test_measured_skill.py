"""Skill as training measures it: 1 for the linear denoiser itself, 0 for the truth, the same however it is computed."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data.volumes import DataSplit, VolumeFile
from diffusion.conditioning import ConditionStore
from diffusion.conditioning.kind import Prepared
from diffusion.latents import Latents, voxel_effects
from diffusion.noise_process import NoiseProcess
from diffusion.normalisation import Normalisation
from models import build_unet
from models.volume_codec import frozen_codec
from settings import CheckpointError, Settings
from tests.support.tiny_config import TINY
from tests.training.steps import CPU
from training.validation.skill import MEAN_SHARES, NUM_LEVELS, Skill, skill_in_words

NUM_TRAIN, NUM_HELD_OUT = 12, 5
NUM_PATTERNS = 3
BATCH_SIZE = "ldm.training.batch_size"

SCHEDULERS: dict[str, dict[str, Any]] = {
    "v, cosine": {"prediction": "v", "schedule": "cosine"},
    "v, scaled linear": {"prediction": "v", "schedule": "scaled_linear_beta"},
    "epsilon, cosine": {"prediction": "epsilon", "schedule": "cosine"},
    "epsilon, scaled linear": {"prediction": "epsilon", "schedule": "scaled_linear_beta"},
    "flow": {"type": "rflow"},
}


def settings_of(scheduler: dict[str, Any] | None = None, changes: dict[str, Any] | None = None) -> Settings:
    values = copy.deepcopy(TINY)
    values["ldm"]["scheduler"] = scheduler or SCHEDULERS["v, cosine"]
    if values["ldm"]["scheduler"].get("type") == "rflow":
        values["ldm"]["sampling"]["sampler"] = "rflow"
    return Settings.model_validate(values).with_overrides(changes or {})


def weights_of(number: int, seed: int = 0) -> Tensor:
    """How much of each pattern each latent has."""
    return torch.randn(number, NUM_PATTERNS, generator=torch.Generator().manual_seed(seed))


def examples(shape: tuple[int, ...], number: int = NUM_TRAIN + NUM_HELD_OUT) -> Tensor:
    """Latents (N, ...) that are a few patterns and a little noise."""
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randn(NUM_PATTERNS, math.prod(shape), generator=generator)
    rest = 0.2 * torch.randn(number, math.prod(shape), generator=generator)
    return (2 + weights_of(number) @ patterns + rest).view(number, *shape)


def skill_of(
    settings: Settings,
    values: Tensor,
    num_train: int = NUM_TRAIN,
    conditions: ConditionStore | None = None,
    effects: Tensor | None = None,
) -> Skill:
    files = tuple(VolumeFile(Path(f"{place}.npy"), f"{place}.npy", place % 2) for place in range(len(values)))
    split = DataSplit(files[:num_train], files[num_train:])
    normalisation = Normalisation(torch.full((3, 1, 1, 1), 0.5), torch.full((3, 1, 1, 1), 2.0))
    facts = ((1.0, 1.0, 1.0), (0.0,), (1.0,), "")
    latents = Latents(
        *(split, settings.data, lambda index, _: values[index], normalisation, values[0], *facts, False),
        conditions=conditions or ConditionStore(),
        voxel_effects=effects,
    )
    codec = frozen_codec(settings, CPU, load_weights=False)
    return Skill(latents, codec, normalisation, settings, CPU)


class Estimator(nn.Module):
    """A network whose prediction implies the clean latent that `estimate` returns for a noisy one and its time."""

    def __init__(self, settings: Settings, estimate: Any) -> None:
        super().__init__()
        self.process, self.estimate = NoiseProcess(settings.ldm.scheduler, CPU.device), estimate

    def forward(self, x: Tensor, timesteps: Tensor) -> Tensor:
        signal, level = self.process.coefficients(timesteps)
        clean = self.estimate(x, timesteps[0], float(signal.flatten()[0]), float(level.flatten()[0]))
        return self.process.target(clean, (x[:, : clean.shape[1]] - signal * clean) / level, timesteps)


def best_estimates(skill: Skill) -> Any:
    """The linear denoiser with the settings that suit each level best, chosen by trying all on the held-out latents."""
    denoiser, hidden = skill.denoiser, skill.held_out
    assert denoiser is not None
    [batch] = skill.latents.validation_batches(skill.encode, CPU, NUM_HELD_OUT)
    clean, best = hidden.clean(batch), {}
    for place, time in enumerate(hidden.times):
        signal, level = (float(part) for part in hidden.noise_process.coefficients(time))
        length = math.hypot(signal, level)
        errors = denoiser.errors(clean, hidden.noise(place, batch), signal / length, level / length)
        best[float(time)] = int(errors.argmin())

    def estimate(noisy: Tensor, time: Tensor, signal: float, level: float) -> Tensor:
        length = math.hypot(signal, level)
        noisy, signal, level = noisy / length, signal / length, level / length
        choices, number = denoiser.choices, best[float(time)]
        if number < len(choices):
            return denoiser.denoise(noisy.flatten(1), signal, level, choices[number : number + 1]).view(noisy.shape)
        return denoiser.stationary.denoise(noisy, signal, level, MEAN_SHARES[number - len(choices)])

    return estimate


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_the_linear_denoiser_has_skill_one_at_every_level_and_the_truth_has_none(scheduler):
    settings = settings_of(scheduler)
    values = examples(settings.latent_shape)
    skill = skill_of(settings, values)
    signals, levels = skill.held_out.noise_process.coefficients(skill.held_out.times)
    shares = (levels**2 / (signals**2 + levels**2)).flatten().tolist()
    assert shares == pytest.approx([math.sin((place + 0.5) * math.pi / 16) ** 2 for place in range(8)], abs=2e-3)
    found = skill(Estimator(settings, best_estimates(skill)))
    of_levels = [value for name, value in found.items() if name.startswith("val_skill_")]
    assert of_levels == pytest.approx([1.0] * NUM_LEVELS, rel=1e-3)
    assert found["val_skill"] == pytest.approx(1.0, rel=1e-3)
    clean = (values[NUM_TRAIN:] - 2) * 0.5
    skill = skill_of(settings.with_overrides({BATCH_SIZE: NUM_HELD_OUT}), values)
    truth = skill(Estimator(settings, lambda noisy, *_: clean))
    assert truth["val_skill"] < 1e-3
    assert truth["val_diffusion"] < 1e-3
    mean = skill(Estimator(settings, lambda noisy, *_: torch.zeros_like(noisy)))
    assert mean["val_skill_0.01"] > mean["val_skill_0.99"] > 1


def test_levels_that_a_schedule_never_reaches_are_left_out():
    """Fifty steps with the betas of a thousand end with a third of noise."""
    settings = settings_of({"prediction": "v", "schedule": "scaled_linear_beta", "num_train_timesteps": 50})
    skill = skill_of(settings, examples(settings.latent_shape))
    assert len(set(skill.held_out.times.tolist())) == len(skill.held_out.times) == 4
    found = skill(Estimator(settings, lambda noisy, *_: torch.zeros_like(noisy)))
    names = [name for name in found if name.startswith("val_skill_")]
    assert names == ["val_skill_0.01", "val_skill_0.08", "val_skill_0.22", "val_skill_0.40"]


def test_batches_change_nothing_with_sizes_that_the_network_has_to_pad():
    settings = settings_of(changes={"data.voxel_size": [14, 16, 18], BATCH_SIZE: 20})
    assert any(size % settings.ldm.unet.downsampling for size in settings.latent_shape[1:])
    values = examples(settings.latent_shape, NUM_TRAIN + 19)
    network = build_unet(settings.ldm, 3).eval()
    for parameter in network.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    sizes: list[int] = []
    network.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    found = skill_of(settings, values)(network)
    assert sizes == [16] * 8 + [3] * 8
    assert skill_of(settings.with_overrides({BATCH_SIZE: 1}), values)(network) == pytest.approx(found, rel=1e-4)
    assert set(sizes[16:]) == {1}


@pytest.mark.parametrize("number", [1, 4])
def test_training_volumes_that_do_not_differ_have_no_covariance_and_so_no_skill(number):
    settings = settings_of()
    one = torch.randn(settings.latent_shape, generator=torch.Generator().manual_seed(0)) / 3
    skill = skill_of(settings, one.expand(number + 2, *one.shape), num_train=number)
    assert skill.denoiser is None
    network = build_unet(settings.ldm, 3).eval()
    assert list(skill(network)) == ["val_diffusion"]
    values = examples(settings.latent_shape)
    assert skill_of(settings, values[: NUM_TRAIN + 1])(network)["val_skill"] > 1
    assert skill_of(settings, values[:NUM_TRAIN])(network) == {}, "without held-out volumes nothing is measured"


def conditions_of(**parts: Tensor) -> ConditionStore:
    """Conditions (N, ...) of all volumes by their kinds."""
    return ConditionStore(
        {kind: Prepared(lambda index, _, copy, rows=rows: rows[index]) for kind, rows in parts.items()}  # type: ignore[misc]
    )


def kinds(number: int = NUM_TRAIN + NUM_HELD_OUT) -> dict[str, dict[str, Tensor]]:
    """Each kind of condition, saying how much of each pattern a latent has."""
    known = weights_of(number)
    channels = known[:, :, None, None, None].expand(-1, -1, 8, 8, 8)
    noise = torch.randn(number, 2, 8, 8, 8, generator=torch.Generator().manual_seed(9))
    return {
        "channels": {"volume": channels},
        "numbers": {"tabular": known},
        "scan": {"scan": known},
        "numbers beside channels of noise": {"tabular": known, "volume": noise},
        "numbers beside what is the same for all": {"tabular": known, "scan": torch.full((number, 3), 1.1)},
        "classes": {"class_label": torch.arange(number) % 2},
    }


@pytest.mark.parametrize("kind", kinds())
def test_the_linear_denoiser_is_given_every_kind_of_condition_that_the_network_is_given(kind):
    settings = settings_of(changes={"ldm.conditioning": {"type": "class", "num_classes": 2}})
    values = examples(settings.latent_shape)
    values[::2] += 3
    alone, informed = (skill_of(settings, values, conditions=c) for c in (None, conditions_of(**kinds()[kind])))
    assert alone.linear_errors is not None
    assert informed.linear_errors is not None
    assert informed.linear_errors[-1] < 0.9 * alone.linear_errors[-1]


def test_the_effect_of_a_channel_is_what_its_errors_change_in_voxels():
    scale, weights = (torch.tensor(values).view(3, 1, 1, 1) for values in ([0.5, 1.0, 2.0], [1.0, 3.0, 4.0]))
    codec: Any = SimpleNamespace(decode=lambda latent: (weights * latent).sum(dim=0, keepdim=True))
    found = voxel_effects(codec, Normalisation(scale, torch.ones(3, 1, 1, 1)), torch.rand(3, 4, 4, 4))
    expected = (weights / scale).square()
    torch.testing.assert_close(found, expected / expected.mean(), rtol=1e-4, atol=0)
    codec.decode = lambda latent: torch.zeros(1, 4, 4, 4)
    with pytest.raises(CheckpointError, match="the same volume for every latent"):
        voxel_effects(codec, Normalisation(scale, torch.ones(3, 1, 1, 1)), torch.rand(3, 4, 4, 4))


def test_in_runs_that_fill_holes_only_the_hole_counts_and_the_opponent_is_given_the_rest():
    hole = {"encoding": "autoencoder", "source": "target", "degrade": {"hole": [4, 4, 4]}}
    settings = settings_of(changes={"ldm.conditioning.volume": hole})
    values = examples(settings.latent_shape)
    known = torch.ones(len(values), 1, *values.shape[2:])
    known[:, :, :3] = 0
    conditions = conditions_of(volume=torch.cat([(values - 2) / 2, known], dim=1))
    skill = skill_of(settings, values, conditions=conditions, effects=torch.ones(3, 1, 1, 1))

    def right_where(is_known: float) -> Tensor:
        """Return the skills of a network that knows the truth in one of the parts and says 0 in the other."""
        network = Estimator(settings, lambda x, *_: x[:, 3:6] * (x[:, -1:] == is_known))
        found = skill(network.eval())
        return torch.tensor([value for name, value in found.items() if name.startswith("val_skill_")])

    assert right_where(0).max() < 1e-6
    assert right_where(1).min() > 1.5
    alone = skill_of(settings_of(), values)
    assert alone.linear_errors is not None
    assert skill.linear_errors is not None
    assert skill.linear_errors[-1] < 0.5 * alone.linear_errors[-1]


def test_skill_is_said_in_words():
    for skill, words in (
        (0.8944, "skill 0.894: the network's held-out error is on average 10.6% below that of the best"),
        (0.9997, "skill 1.000: the network's held-out error is 1 times that of the best linear denoiser; the"),
        (25.2, "skill 25.200: the network's held-out error is 25.2 times that of the best linear denoiser; it"),
    ):
        assert skill_in_words(skill).startswith(words)
        assert "the best linear denoiser given the rest of the volume" in skill_in_words(skill, has_holes=True)
