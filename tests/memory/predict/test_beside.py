"""What is predicted besides the training step: conditions, sampling, validation and volumes as large as 512 cubed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from diffusion.sampling import num_predictions
from memory.kernels.operators import Done, Work
from memory.predict.emulation import emulated, tracked
from memory.predict.prediction import GIB
from memory.predict.step import (
    ENCODING,
    USED_SHARE,
    _all_previews,
    _denoising_bytes,
    _shortened,
    encoded_volume,
    other_programs,
    predict_step,
    sampling_batch,
)
from memory.predict.tracker import MemoryTracker
from models.volume_codec import VolumeCodec, frozen_codec
from runtime.processes import Process
from settings import Settings, load_settings
from training.validation.skill import NUM_LEVELS

CONDITIONS = {
    "label_map": {"source": "maps", "num_classes": 5},
    "volume": {"encoding": "autoencoder", "source": "other"},
    "tabular": {"table": "t.csv", "continuous": ["age"]},
}


def predicted(values, conditioning, cache="disk"):
    values = copy.deepcopy(values)
    values["ldm"]["conditioning"] = conditioning
    values["ldm"]["latents"] = {"cache": cache}
    return predict_step(Settings.model_validate(values), "ldm", whole_run=False)


@pytest.mark.parametrize("cache", ["disk", "none"])
def test_conditions_count_as_inputs_and_as_weights_of_the_first_convolution(tiny_values, cache):
    without, found = (predicted(tiny_values, conditioning, cache) for conditioning in ({}, CONDITIONS))
    # Five label values, three latent channels and what is known, on a grid of 8 x 8 x 8, and the code of one number.
    joined, batch, channels = 5 + 3 + 1, 2, 16
    assert found.breakdown["inputs"] - without.breakdown["inputs"] == 4 * batch * (joined * 8**3 + 2)
    width = 4 * channels
    weights = channels * joined * 27 + (2 * width + width) + (width * width + width)
    assert found.breakdown["parameters"] - without.breakdown["parameters"] == 4 * weights
    assert found.peak_allocated_bytes > without.peak_allocated_bytes


@pytest.mark.parametrize(("cache", "encodings"), [("disk", 1 + 4), ("none", 4)])
def test_the_time_of_encoding_knows_the_variants_of_condition_volumes(tiny_values, cache, encodings):
    volume = {"encoding": "autoencoder", "source": "target", "degrade": {"hole": [4, 4, 4]}}
    values = {**tiny_values["ldm"], "latents": {"cache": cache}, "conditioning": {"volume": volume}}
    settings = Settings.model_validate({**tiny_values, "ldm": values})
    programs = other_programs(settings, "ldm", cuda=False)
    once, found = programs[ENCODING], encoded_volume(settings, programs)
    assert found is not None
    assert sum(part.nbytes for part in found.values()) == encodings * sum(w.nbytes for w in once.work.values())


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_as_many_samples_as_the_free_memory_has_room_for(tiny_values, guidance):
    tiny_values["ldm"] |= {
        "conditioning": {"type": "class", "num_classes": 2},
        "sampling": {"guidance_scale": guidance},
    }
    settings = Settings.model_validate(tiny_values)
    needed = [_denoising_bytes(settings, False, number) for number in (3, 4, 6)]
    # In proportion to the samples, so that the needs of six follow from those of three and four.
    assert needed[2] - needed[1] == pytest.approx(2 * (needed[1] - needed[0]), rel=0.02)
    room = round(needed[2] * 1.02 / USED_SHARE)
    assert sampling_batch(settings, False, room, most=16) == 6
    assert sampling_batch(settings, False, room, most=3) == 3
    assert sampling_batch(settings, False, 0, most=16) == 1


def test_guidance_takes_twice_the_memory(tiny_values):
    tiny_values["ldm"] |= {"conditioning": {"type": "class", "num_classes": 2}}
    plain = Settings.model_validate(tiny_values)
    guided = plain.with_overrides({"ldm.sampling.guidance_scale": 2.0})
    assert _denoising_bytes(guided, False, 2) == pytest.approx(_denoising_bytes(plain, False, 4), rel=0.05)


@pytest.mark.parametrize("batch_size", [2, 3])
@pytest.mark.parametrize(
    ("sampler", "steps", "timesteps", "passes"), [("rflow", 1, 1, 1), ("rflow", 5, 9, 5), ("heun", 5, 9, 9)]
)
def test_previews_take_the_passes_and_decodings_of_all_samples(
    tiny_values, sampler, steps, timesteps, passes, batch_size
):
    tiny_values["ldm"]["training"]["batch_size"] = batch_size
    tiny_values["ldm"] |= {
        "scheduler": {"type": "rflow", "num_train_timesteps": timesteps},
        "sampling": {"sampler": sampler, "num_inference_steps": steps},
    }
    settings = Settings.model_validate(tiny_values)
    # A pass is one operation, a decoding a thousand.
    taken = sum(num_predictions(_shortened(settings).ldm))
    assert sum(num_predictions(settings.ldm)) == passes
    operations = (NUM_LEVELS, batch_size * taken + 1000, 1000)
    losses, drawn, decoded = (Done({("convolution", (1,), "float32"): Work(flops=n)}) for n in operations)
    (total,) = _all_previews(settings, losses, drawn, decoded).values()
    assert total.flops == pytest.approx(4 * passes + 4000, abs=2)


CUBE = ("data.voxel_size=[512,512,512]", "data.patch_size=[128,128,128]", "autoencoder.training.slab_rows=0")


@pytest.fixture(name="settings", scope="module")
def large_settings() -> Settings:
    return load_settings("configs/maisi.yaml", [*CUBE, "device.type=cpu", "device.amp_dtype=bfloat16"])


def track(settings: Settings, budget: int, run: Callable[[VolumeCodec], object]) -> MemoryTracker:
    with emulated(cuda=True) as mode, tracked(mode, True) as tracker, torch.no_grad():
        codec = frozen_codec(settings, Process(torch.device("cpu")), load_weights=False, budget_bytes=budget)
        run(codec)
    return tracker


def test_decoding_takes_an_8_gib_card_and_little_more_work_than_one_that_holds_everything(settings):
    def decode(codec: VolumeCodec) -> None:
        codec.decode(torch.zeros(settings.latent_shape))

    streamed, whole = track(settings, 0, decode), track(settings, 1 << 50, decode)
    assert whole.peak["device"] > 90 * GIB
    assert streamed.peak["device"] < 6.5 * GIB
    assert streamed.peak["host"] == 52 * GIB, "the upsampled volume, what comes of it, and the level below"
    for name in ("flops", "nbytes"):
        mine, theirs = (sum(getattr(part, name) for part in each.work.values()) for each in (streamed, whole))
        assert mine < 1.5 * theirs


def test_encoding_takes_an_8_gib_card(settings):
    def encode(codec: VolumeCodec) -> None:
        codec.encode(torch.zeros(1, 512, 512, 512))

    streamed = track(settings, 0, encode)
    assert streamed.peak["device"] < 6.5 * GIB
    assert streamed.peak["host"] == 32 * GIB
