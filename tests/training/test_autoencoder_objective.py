"""The stage-1 objective against one written out by hand: every term, weight, share and sign, in one plain graph."""

from __future__ import annotations

import copy

import pytest
import torch
from monai.networks.nets import AutoencoderKL
from torch import Tensor, nn

from data.batches import Batch
from losses.perceptual import StructuralDistance
from settings import Settings
from tests.models.autoencoders import stock_like
from tests.training.steps import CPU, make_batches
from training.autoencoder_step import AutoencoderStep

KL_WEIGHT, EDGE_WEIGHT, PERCEPTUAL_WEIGHT, ADVERSARIAL_WEIGHT = 0.03, 0.4, 0.7, 0.2
STEP = 5


def make_step(values, **training) -> AutoencoderStep:
    values = copy.deepcopy(values)
    weights = {
        "kl_weight": KL_WEIGHT,
        "perceptual_weight": PERCEPTUAL_WEIGHT,
        "adversarial_weight": ADVERSARIAL_WEIGHT,
        "adversarial_start_step": STEP,
        "use_perceptual_loss": True,
        "perceptual": {"network": "structural"},
    }
    values["autoencoder"]["training"].update(weights | training)
    step = AutoencoderStep(Settings.model_validate(values), CPU)
    with torch.no_grad():
        # A latent far from its prior, so that each of the KL's terms counts.
        step.autoencoder.quant_conv_mu.conv.bias += 0.5
        step.autoencoder.quant_conv_log_sigma.conv.bias -= 1.0
    return step


def stock(step: AutoencoderStep) -> AutoencoderKL:
    """MONAI's own network with the step's weights."""
    network = stock_like(step.settings.autoencoder)
    network.load_state_dict(step.autoencoder.state_dict())
    return network


def expected_gradients(
    step: AutoencoderStep, batches: list[Batch], kind: str
) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """Gradients and terms of the whole update at once: all volumes as one batch, two losses, two calls of autograd."""
    assert step.discriminator is not None
    network, discriminator = stock(step), copy.deepcopy(step.discriminator)
    images = torch.cat([batch.image for batch in batches])
    positions = [place for batch in batches for place in batch.positions]
    mean, sigma = network.encode(images)
    noise = step.noise.normal("latent", positions, mean.shape[1:])
    reconstruction = network.decode(mean + sigma * noise)
    difference = reconstruction - images
    steps = [
        difference.narrow(a, 1, difference.shape[a] - 1) - difference.narrow(a, 0, difference.shape[a] - 1)
        for a in (2, 3, 4)
    ]
    variance = sigma**2
    terms = {
        "reconstruction": difference.abs().mean() if kind == "l1" else (difference**2).mean(),
        "edges": sum((s.abs().mean() if kind == "l1" else (s**2).mean() for s in steps), torch.zeros(())),
        "kl": -0.5 * (1 + variance.log() - mean**2 - variance).sum() / images.numel(),
        "perceptual": StructuralDistance()(reconstruction, images, STEP),
        "adversarial": ((discriminator(reconstruction)[-1] - 1) ** 2).mean(),
    }
    generator_loss = (
        terms["reconstruction"]
        + EDGE_WEIGHT * terms["edges"]
        + KL_WEIGHT * terms["kl"]
        + PERCEPTUAL_WEIGHT * terms["perceptual"]
        + ADVERSARIAL_WEIGHT * terms["adversarial"]
    )
    of_generator = torch.autograd.grad(generator_loss, list(network.parameters()))
    terms["discriminator_fake"] = (discriminator(reconstruction.detach())[-1] ** 2).mean()
    terms["discriminator_real"] = ((discriminator(images)[-1] - 1) ** 2).mean()
    both = (terms["discriminator_fake"] + terms["discriminator_real"]) / 2
    of_discriminator = torch.autograd.grad(both, list(discriminator.parameters()))
    return {"autoencoder": list(of_generator), "discriminator": list(of_discriminator)}, terms


def gradient_vector(network: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


@pytest.mark.parametrize(("batch_size", "accumulation", "kind"), [(2, 3, "l1"), (1, 4, "l2"), (3, 1, "l1")])
def test_gradients_and_terms_are_those_of_the_objective_written_out(tiny_values, batch_size, accumulation, kind):
    step = make_step(tiny_values, reconstruction_loss=kind, edge_weight=EDGE_WEIGHT)
    batches = make_batches(step, batch_size, batch_size * accumulation)
    expected, expected_terms = expected_gradients(step, batches, kind)
    terms = step.backward(batches, STEP)
    assert terms.keys() == expected_terms.keys()
    for name, value in expected_terms.items():
        torch.testing.assert_close(terms[name], value.detach(), rtol=1e-4, atol=1e-6, msg=name)
    for name, network in step.networks.items():
        vector, found = torch.cat([g.flatten() for g in expected[name]]), gradient_vector(network)
        assert (found - vector).norm() < 1e-4 * vector.norm(), name


def test_before_its_start_the_discriminator_has_no_part_in_the_gradients(tiny_values):
    without, late = make_step(tiny_values, adversarial_weight=0.0), make_step(tiny_values)
    late.autoencoder.load_state_dict(without.autoencoder.state_dict())
    for step in (without, late):
        step.backward(make_batches(step, 1, 2), STEP - 1)
    assert torch.equal(gradient_vector(without.autoencoder), gradient_vector(late.autoencoder))
    assert late.is_adversarial(STEP)
    assert not late.is_adversarial(STEP - 1)


def test_the_perceptual_term_is_told_the_step(tiny_values):
    step = make_step(tiny_values)
    told: list[int] = []
    assert step.perceptual is not None
    step.perceptual.register_forward_pre_hook(lambda module, arguments: told.append(arguments[2]))
    for number in (0, 7):
        step.backward(make_batches(step, 1, 2), number)
    assert told == [0, 0, 7, 7]


def test_each_network_learns_at_its_own_rate_and_is_averaged(tiny_values):
    rates = {"learning_rate": 2e-3, "discriminator_learning_rate": 5e-4, "warmup_steps": 0}
    step = make_step(tiny_values, **rates, optimizer="adam", ema_decay=0.9, max_steps=20)
    assert step.average is not None
    averages = [average.clone() for average in step.average.averages]
    before = {name: [p.detach().clone() for p in network.parameters()] for name, network in step.networks.items()}
    step(make_batches(step, 1, 2), STEP)
    for name, rate in (("autoencoder", 2e-3), ("discriminator", 5e-4)):
        pairs = zip(step.networks[name].parameters(), before[name], strict=True)
        # The first step of Adam moves every weight by the learning rate.
        assert max(float((p.detach() - b).abs().max()) for p, b in pairs) == pytest.approx(rate, rel=0.01), name
    kept = (1 + STEP) / (10 + STEP)
    for found, old, new in zip(step.average.averages, averages, step.autoencoder.parameters(), strict=True):
        torch.testing.assert_close(found, kept * old + (1 - kept) * new.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("amp_dtype", ["bfloat16", "float16"])
def test_mixed_precision_runs_in_the_type_asked_for_and_scales_what_must_be_scaled(tiny_values, amp_dtype):
    tiny_values["device"] = {"type": "cpu", "mixed_precision": True, "amp_dtype": amp_dtype}
    step = make_step(tiny_values, adversarial_weight=0.0)
    seen: set[torch.dtype] = set()
    blocks = step.autoencoder.decoder.blocks
    blocks[0].register_forward_hook(lambda module, arguments, output: seen.add(output.dtype))
    batches = make_batches(step, 1, 1)
    with torch.backends.mkldnn.flags(enabled=False):  # its 16-bit weight gradients read memory they never wrote
        step.backward(batches, 0)
    assert seen == {getattr(torch, amp_dtype)}
    scale = step.precision.scaler.get_scale() if amp_dtype == "float16" else 1.0
    assert scale == (65536.0 if amp_dtype == "float16" else 1.0)
    full = copy.deepcopy(tiny_values)
    full["device"] = {"type": "cpu", "mixed_precision": False}
    exact = make_step(full, adversarial_weight=0.0)
    exact.autoencoder.load_state_dict(step.autoencoder.state_dict())
    exact.backward(batches, 0)
    found, expected = gradient_vector(step.autoencoder) / scale, gradient_vector(exact.autoencoder)
    assert (found - expected).norm() < 0.1 * expected.norm()
