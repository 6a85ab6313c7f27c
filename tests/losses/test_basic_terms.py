import pytest
import torch
from torch.distributions import Normal
from torch.distributions import kl_divergence as reference_kl

from losses.terms import (
    adversarial_loss,
    edge_loss,
    kl_divergence,
    reconstruction_loss,
)


def latent(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mu = torch.randn(batch, 3, 4, 5, 6, generator=generator)
    return mu, torch.rand(batch, 3, 4, 5, 6, generator=generator) + 0.1


def test_kl_is_the_textbook_divergence_per_voxel():
    mu, sigma = latent()
    expected = reference_kl(Normal(mu, sigma), Normal(0.0, 1.0)).sum() / 2 / 1000
    torch.testing.assert_close(kl_divergence(mu, sigma, 1000), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_kl_is_finite_at_the_ends_of_the_encoders_range(dtype):
    mu = torch.full((1, 1, 2, 2, 2), 300.0, dtype=dtype, requires_grad=True)
    for value in (0.0, 3e-7, 1.0, 2e4):
        sigma = torch.full((1, 1, 2, 2, 2), value, dtype=dtype, requires_grad=True)
        loss = kl_divergence(mu, sigma, 64)
        gradients = torch.autograd.grad(loss, (mu, sigma))
        assert loss.dtype == torch.float32
        assert torch.isfinite(loss)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize(("kind", "expected"), [("l1", 1.5), ("l2", 2.5)])
def test_reconstruction_is_a_mean_over_voxels_in_fp32(kind, expected):
    target = torch.zeros(2, 1, 2, 2, 2, dtype=torch.bfloat16)
    reconstruction = torch.tensor([1.0, -2.0], dtype=torch.bfloat16).reshape(2, 1, 1, 1, 1).expand_as(target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = reconstruction_loss(reconstruction, target, kind)
    assert loss.dtype == torch.float32
    assert loss.item() == expected
    with pytest.raises(AssertionError, match="shapes differ"):
        reconstruction_loss(target, target[:1], kind)


@pytest.mark.parametrize(("kind", "expected"), [("l1", 0.3 + 0.5 + 0.2), ("l2", 0.3**2 + 0.5**2 + 0.2**2)])
def test_edges_are_errors_of_neighbouring_differences_summed_over_the_axes(kind, expected):
    depth, height, width = torch.meshgrid(*[torch.arange(4.0)] * 3, indexing="ij")
    ramp = (0.3 * depth - 0.5 * height + 0.2 * width).expand(2, 1, 4, 4, 4)
    target = torch.rand(2, 1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(edge_loss(target + ramp + 7, target, kind), torch.tensor(expected), rtol=1e-4, atol=0)


def test_edges_of_a_volume_of_one_slice_leave_that_axis_out():
    target = torch.zeros(1, 1, 1, 3, 3)
    assert edge_loss(target + 2, target, "l2") == 0
    assert edge_loss(torch.arange(3.0).expand(1, 1, 1, 3, 3), target, "l1") == 1


def test_adversarial_terms_are_least_squares_on_raw_logits_in_fp32():
    logits = torch.tensor([-3.0, 0.0, 1.0, 2.0])
    for is_real, expected in ((True, 18 / 4), (False, 14 / 4)):
        assert adversarial_loss(logits, is_real).item() == pytest.approx(expected)
        assert torch.isfinite(adversarial_loss(torch.full((4,), 1000.0, dtype=torch.float16), is_real))


@pytest.mark.parametrize(
    ("kind", "expected"), [("l1", (3 * 0.5 * 10 + 1 * 0.5) / 4), ("l2", (3 * 0.25 * 10 + 0.25) / 4)]
)
def test_errors_of_occupied_voxels_count_more_and_micro_batches_still_add_up(kind, expected):
    target = torch.tensor([-1.0, -0.7, 0.0, 1.0]).view(1, 1, 1, 2, 2)  # occupied: all but the first
    found = reconstruction_loss(target + 0.5, target, kind, occupied_weight=10.0, threshold=0.1)
    assert float(found) == pytest.approx(expected)
    assert float(reconstruction_loss(target + 0.5, target, kind, 10.0, 0.6)) < expected
    other = torch.full_like(target, -1.0)
    both = reconstruction_loss(torch.cat([target, other]) + 0.5, torch.cat([target, other]), kind, 10.0, 0.1)
    alone = reconstruction_loss(other + 0.5, other, kind, 10.0, 0.1)
    assert float(both) == pytest.approx((float(found) + float(alone)) / 2)


def test_background_of_a_signed_channel_counts_once():
    target = torch.full((2, 2, 4, 4, 4), -1.0)
    target[:, 1] = 0.25  # a velocity of 0
    target[1, 1, 0, 0, :2] = torch.tensor([-1.0, 1.0])
    expected = 0.5 * (1 + 9 * 2 / target.numel())
    assert float(reconstruction_loss(target + 0.5, target, "l1", 10.0, 0.1)) == pytest.approx(expected)
