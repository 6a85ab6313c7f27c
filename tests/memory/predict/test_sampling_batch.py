import pytest

from diffusion.sampling import num_predictions
from memory.predict.records import Done, Work
from memory.predict.run import (
    USED_SHARE,
    _all_previews,
    _denoising_bytes,
    _shortened,
    sampling_batch,
)
from settings import Settings
from training.validation.skill import NUM_LEVELS


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
