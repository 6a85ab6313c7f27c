"""The quantised bottleneck: MONAI's codebook arithmetic, and an autoencoder around it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from monai.networks.layers.vector_quantizer import EMAQuantizer

from models import bottleneck as bottleneck_module
from models import build_autoencoder
from models.bottleneck import CodeStatistics, VectorQuantiser, code_use
from settings import Settings

CODES, CHANNELS, DECAY = 24, 3, 0.9
FREE = torch.zeros(())


def latents(seed: int, batch: int = 2, channels: int = CHANNELS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((batch, channels, 4, 3, 5), generator=generator, dtype=torch.float64).to(dtype)


def numbers(positions, number: int) -> torch.Tensor:
    return torch.stack([torch.rand(number, generator=torch.Generator().manual_seed(p)) for p in positions])


def learn(quantiser: VectorQuantiser, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Let the codebook see one update that consists of these micro-batches."""
    statistics = CodeStatistics(quantiser, sum(map(len, batches)), torch.device("cpu"), numbers)
    position = 0
    for latent in batches:
        statistics.add(latent, quantiser.codes(latent), range(position, position + len(latent)))
        position += len(latent)
    return statistics.finish(lambda values: values, FREE)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_codes_values_gradients_and_averages_are_those_of_monai(dtype, tolerance):
    torch.manual_seed(0)
    theirs = EMAQuantizer(3, CODES, CHANNELS, commitment_cost=1.0, decay=DECAY).to(dtype)
    ours = VectorQuantiser(CODES, CHANNELS, DECAY, restart_below=0.0).to(dtype)
    theirs.embedding.weight.data.mul_(0.5)
    theirs.ema_w.copy_(theirs.embedding.weight)
    ours.codebook.copy_(theirs.embedding.weight)
    ours.ema_sums.copy_(theirs.ema_w)
    if dtype == torch.float64:
        theirs.quantize = in_double(theirs)
    for seed in range(6):
        found, expected = latents(seed, dtype=dtype).requires_grad_(), latents(seed, dtype=dtype).requires_grad_()
        quantised, codes = ours(found)
        same, loss, same_codes = theirs(expected)
        assert torch.equal(codes, same_codes)
        torch.testing.assert_close(quantised, same, rtol=0, atol=tolerance)
        (quantised.square().sum() + (found - quantised.detach()).square().mean()).backward()
        (same.square().sum() + loss).backward()
        torch.testing.assert_close(found.grad, expected.grad, rtol=tolerance, atol=tolerance)
        learn(ours, [found.detach()])
        torch.testing.assert_close(ours.ema_sizes, theirs.ema_cluster_size, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ours.ema_sums, theirs.ema_w, rtol=tolerance, atol=tolerance)
        used = theirs.ema_cluster_size > 0
        torch.testing.assert_close(ours.codebook[used], theirs.embedding.weight[used], rtol=tolerance, atol=tolerance)


def in_double(theirs: EMAQuantizer) -> Any:
    """Return MONAI's `quantize` without its cast of the latents to float32."""

    def quantize(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = inputs.permute(theirs.flatten_permutation).reshape(-1, CHANNELS)
        codes = torch.cdist(flat, theirs.embedding.weight).argmin(dim=1)
        encodings = torch.nn.functional.one_hot(codes, CODES).to(inputs.dtype)
        return flat, encodings, codes.view(inputs.shape[0], *inputs.shape[2:])

    return quantize


@pytest.mark.parametrize("offset", [0.0, 100.0, -3e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_nearest_ones_also_far_from_zero_and_under_autocast(offset, dtype, monkeypatch):
    monkeypatch.setattr(bottleneck_module, "_MOST_DISTANCES", 7 * 512)  # so that they are compared in parts
    generator = torch.Generator().manual_seed(0)
    quantiser = VectorQuantiser(512, CHANNELS, DECAY, 0.0)
    quantiser.codebook.copy_(offset + torch.randn(512, CHANNELS, generator=generator))
    # A code that is never used lies far away.
    quantiser.codebook[0] = 1e8
    latent = (offset + torch.randn((2, CHANNELS, 8, 8, 8), generator=generator)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        codes = quantiser.codes(latent).flatten()
    vectors = latent.movedim(1, -1).reshape(-1, CHANNELS).double()
    distances = (vectors[:, None] - quantiser.codebook.double()).square().sum(dim=2)
    # Equal distances, as bf16 far from zero has them, leave the choice open.
    torch.testing.assert_close(distances.gather(1, codes[:, None]).squeeze(1), distances.amin(dim=1), rtol=0, atol=1e-6)
    if offset == 0:
        assert torch.equal(codes, distances.argmin(dim=1))


def test_an_update_of_several_micro_batches_is_one_step_of_the_averages():
    torch.manual_seed(0)
    whole = VectorQuantiser(CODES, CHANNELS, DECAY, restart_below=0.2)
    parted = copy.deepcopy(whole)
    for seed in range(3):
        latent = latents(seed, batch=4)
        use = learn(whole, [latent])
        torch.testing.assert_close(learn(parted, list(latent.split(1))), use)
        torch.testing.assert_close(parted.state_dict(), whole.state_dict(), rtol=1e-5, atol=1e-6)


def test_many_equal_latents_do_not_move_the_code_that_they_are():
    """As the air around a body gives them; added up in fp32, a quarter of a million of them err by 0.2 percent."""
    quantiser = VectorQuantiser(2, CHANNELS, decay=0.0, restart_below=0.0)
    equal = torch.tensor([0.1, -0.7, 0.3]).view(1, CHANNELS, 1, 1, 1).expand(1, -1, 64, 64, 64)
    [code] = quantiser.codes(equal).unique()
    learn(quantiser, [equal])
    torch.testing.assert_close(quantiser.codebook[code], equal[0, :, 0, 0, 0], rtol=1e-5, atol=0)


def test_codes_that_are_hardly_used_start_again_at_latents_of_the_update():
    torch.manual_seed(0)
    quantiser = VectorQuantiser(CODES, CHANNELS, DECAY, restart_below=0.03)
    quantiser.codebook.fill_(100.0)
    quantiser.codebook[0] = 0.0
    latent = latents(0)
    assert float(learn(quantiser, [latent])["codebook_use"]) == pytest.approx(1 / CODES)
    # By matrix products, as cdist would take them, equal vectors are apart by their rounding.
    vectors, exact = latent.movedim(1, -1).reshape(-1, CHANNELS), "donot_use_mm_for_euclid_dist"
    assert float(torch.cdist(vectors, quantiser.codebook[1:], compute_mode=exact).min(dim=0).values.max()) < 1e-5
    use = [float(learn(quantiser, [latents(seed)])["codebook_use"]) for seed in range(1, 8)]
    assert use[-1] > 0.7


def test_codes_without_a_candidate_wait_and_a_blocked_update_changes_nothing():
    torch.manual_seed(0)
    quantiser = VectorQuantiser(CODES, CHANNELS, DECAY, restart_below=0.03)
    before = copy.deepcopy(quantiser.state_dict())
    sizes = torch.zeros(CODES).index_fill(0, torch.tensor([0]), 50.0)
    candidates = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    quantiser.update(sizes, torch.ones(CODES, CHANNELS), candidates, torch.ones(()))
    torch.testing.assert_close(quantiser.state_dict(), before, rtol=0, atol=0)
    quantiser.update(sizes, torch.ones(CODES, CHANNELS), candidates, FREE)
    torch.testing.assert_close(quantiser.codebook[1:3], candidates, rtol=0, atol=0)
    # Never used, and not restarted either: far away, as MONAI leaves it.
    assert float(quantiser.codebook[3:].abs().max()) > 1e3


def test_use_and_perplexity_count_what_occurs():
    use = code_use(torch.tensor([4.0, 4.0, 0.0, 0.0]))
    assert float(use["codebook_use"]) == 0.5
    assert float(use["perplexity"]) == pytest.approx(2.0)


def test_decoding_quantises_and_quantising_twice_changes_nothing(tiny_values):
    tiny_values["autoencoder"] |= {"bottleneck": "vq", "codebook_size": CODES}
    network: Any = build_autoencoder(Settings.model_validate(tiny_values).autoencoder).eval()
    volume = latents(0, channels=1).repeat(1, 1, 2, 2, 2)[:, :, :8, :4, :8]
    with torch.no_grad():
        reconstruction, latent, codes = network(volume)
        mean, sigma = network.encode(volume)
        assert torch.equal(mean, latent)
        assert not sigma.any()
        assert torch.equal(network.decode(latent), reconstruction)
        quantised = network.quantiser.embed(codes)
        assert torch.equal(network.decode(quantised), reconstruction)
        assert not torch.equal(quantised, latent)
