"""LPIPS over slices equals the package over the same slices; MedicalNet equals the published network written out."""

import pytest
import torch
from torch.nn import functional

from losses.networks import (
    SHORTEST_SIDE,
    LpipsSlices,
    MedicalNetDistance,
    drawn_slices,
    import_torchvision,
    unit_length,
)
from settings.autoencoder import PerceptualSettings


def volumes(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target = torch.rand(*shape, generator=generator) * 2 - 1
    reconstruction = (target + 0.3 * torch.randn(*shape, generator=generator)).requires_grad_()
    return reconstruction, target


def build(trunk_files, trunk="squeeze", **changes) -> LpipsSlices:
    given = {"network": f"lpips-{trunk}", "weights": str(trunk_files[trunk]), **changes}
    return LpipsSlices(PerceptualSettings.model_validate(given), seed=3)


def stock_lpips(trunk: str, path):
    """lpips.LPIPS as its package builds it, with the trunk of a torchvision file."""
    import_torchvision()
    import lpips

    network = lpips.LPIPS(net=trunk, pnet_rand=True, verbose=False, model_path=None, pretrained=False)
    heads = f"{lpips.__path__[0]}/weights/v0.1/{trunk}.pth"
    network.load_state_dict(torch.load(heads, map_location="cpu", weights_only=True), strict=False)
    plain = torch.load(path, weights_only=True)
    own = network.net.state_dict()
    network.net.load_state_dict({key: plain["features." + key.split(".", 1)[1]] for key in own})
    return network.requires_grad_(False).eval()


def stock_mean(network, reconstruction, target, drawn) -> torch.Tensor:
    values = []
    for axis, positions in enumerate(drawn):
        for position in positions:
            for volume in range(len(target)):
                for channel in range(target.shape[1]):
                    pair = (x[volume, channel].select(axis, position)[None, None] for x in (reconstruction, target))
                    values.append(network(*pair).squeeze())
    return torch.stack(values).mean()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("trunk", "grid"), [("squeeze", (24, 20, 28)), ("alex", (33, 31, 34))])
def test_loss_and_gradient_equal_stock_lpips_over_the_same_slices(trunk_files, trunk, grid):
    """Strictly in fp64; in fp32 rounding flips single ReLUs and maxima, so that stock LPIPS is itself that far off."""
    drawn = drawn_slices(grid, 0.1, 3, 11)
    for dtype, rtol in ((torch.float32, 1e-2), (torch.float64, 1e-9)):
        reconstruction, target = (x.detach().to(dtype).requires_grad_() for x in volumes(1, 2, *grid))
        expected = stock_mean(stock_lpips(trunk, trunk_files[trunk]).to(dtype), reconstruction, target, drawn)
        (expected_gradient,) = torch.autograd.grad(expected, reconstruction)
        for chunk_size in (3, 1000):
            term = build(trunk_files, trunk, slice_fraction=0.1, chunk_size=chunk_size).to(dtype)
            loss = term(reconstruction, target.detach(), 11)
            (gradient,) = torch.autograd.grad(loss, reconstruction)
            torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
            atol = rtol * expected_gradient.abs().max().item()
            torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=atol)


def test_batch_of_four_equals_four_accumulated_batches_of_one(trunk_files):
    reconstruction, target = volumes(4, 2, 20, 24, 18)
    term = build(trunk_files)
    (together,) = torch.autograd.grad(term(reconstruction, target, 5), reconstruction)
    parts = [term(reconstruction[i : i + 1], target[i : i + 1], 5) / 4 for i in range(4)]
    (apart,) = torch.autograd.grad(sum(parts), reconstruction)
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-6 * together.abs().max().item())


def test_draw_depends_on_seed_and_step_and_nothing_else():
    draw = drawn_slices((256, 256, 64), 0.2, seed=1, step=7)
    torch.manual_seed(99)
    assert drawn_slices((256, 256, 64), 0.2, seed=1, step=7) == draw
    assert drawn_slices((256, 256, 64), 0.2, seed=1, step=8) != draw
    assert drawn_slices((256, 256, 64), 0.2, seed=2, step=7) != draw
    assert [len(positions) for positions in draw] == [51, 51, 13]


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize("fraction", [0.01, 0.5, 1.0])
def test_draw_is_distinct_in_range_and_reaches_every_slice(size, fraction):
    seen = set()
    for step in range(1500):
        (positions,) = drawn_slices((size,), fraction, 0, step)
        assert len(set(positions)) == len(positions) == max(1, round(fraction * size))
        assert all(0 <= position < size for position in positions)
        seen |= set(positions)
    assert seen == set(range(size))


@pytest.mark.parametrize("trunk", ["squeeze", "alex", "vgg"])
def test_shortest_side_is_the_least_the_trunk_takes(trunk_files, trunk):
    term = build(trunk_files, trunk)
    side = SHORTEST_SIDE[f"lpips-{trunk}"]
    images = torch.zeros(1, side, side)
    assert torch.isfinite(term.distance(images, images)).all()
    with pytest.raises(RuntimeError):
        term.network.net(torch.zeros(1, 3, side - 1, 64))
    thin = torch.zeros(1, side - 1, 4)
    assert torch.isfinite(term.distance(thin, thin)).all()


def test_unit_length_equals_the_package_and_has_a_gradient_at_zero():
    import_torchvision()
    import lpips

    feature = torch.randn(2, 5, 3, 3, generator=torch.Generator().manual_seed(0))
    feature[0, :, 1, 1] = 0
    torch.testing.assert_close(unit_length(feature), lpips.normalize_tensor(feature), rtol=0, atol=4e-7)
    for function, is_finite in ((unit_length, True), (lpips.normalize_tensor, False)):
        leaf = feature.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf).sum(), leaf)
        assert torch.isfinite(gradient).all().item() is is_finite


def test_network_is_frozen_stays_in_eval_and_draws_no_random_numbers(trunk_files):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    term = build(trunk_files)
    term(*volumes(1, 1, 20, 20, 20), 0)
    torch.testing.assert_close(torch.rand(1), expected, rtol=0, atol=0)
    term.train()
    assert not any(module.training for module in term.modules())
    assert not any(parameter.requires_grad for parameter in term.parameters())
    assert not any(parameter.is_meta for parameter in [*term.parameters(), *term.buffers()])


def test_fp16_gradients_survive_because_the_scale_is_applied_before_the_cast(trunk_files):
    reconstruction, target = volumes(1, 1, 40, 40, 40)
    half = reconstruction.detach().half().requires_grad_()
    term = build(trunk_files)
    (gradient,) = torch.autograd.grad(term(half, target.half(), 0) * 2.0**16, half)
    exact = half.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad(term(exact, target.half().float(), 0) * 2.0**16, exact)
    assert gradient.dtype == torch.float16
    torch.testing.assert_close(gradient.float(), expected, rtol=2e-3, atol=1e-6)


def published_features(state: dict[str, torch.Tensor], volume: torch.Tensor) -> torch.Tensor:
    """MedicalNet's ResNet-10 written out: strides 2, 2, 1, 2, 1, 1 and dilations 1, 1, 2, 4 in the four levels."""

    def norm(x, name):
        statistics = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        return functional.batch_norm(x, *statistics, state[f"{name}.weight"], state[f"{name}.bias"])

    x = functional.conv3d(volume, state["conv1.weight"], stride=2, padding=3)
    x = functional.max_pool3d(norm(x, "bn1").relu(), 3, stride=2, padding=1)
    for level, stride, dilation in ((1, 1, 1), (2, 2, 1), (3, 1, 2), (4, 1, 4)):
        block = f"layer{level}.0"
        y = functional.conv3d(x, state[f"{block}.conv1.weight"], stride=stride, padding=dilation, dilation=dilation)
        y = norm(y, f"{block}.bn1").relu()
        y = functional.conv3d(y, state[f"{block}.conv2.weight"], padding=dilation, dilation=dilation)
        y = norm(y, f"{block}.bn2")
        if level > 1:
            x = functional.conv3d(x, state[f"{block}.downsample.0.weight"], stride=stride)
            x = norm(x, f"{block}.downsample.1")
        x = (x + y).relu()
    return x


def test_distance_is_between_unit_features_of_volumes_standardised_like_the_target(medicalnet_file):
    term = MedicalNetDistance(weights=str(medicalnet_file))
    wrapped = torch.load(medicalnet_file, weights_only=True)["state_dict"]
    state = {key.removeprefix("module."): value for key, value in wrapped.items()}
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(2, 2, 24, 20, 16, generator=generator) * torch.tensor([1.0, 0.3]).view(2, 1, 1, 1, 1)
    volume = 0.6 * target + 0.2 + 0.05 * torch.randn(target.shape, generator=generator)
    distances = []
    for x, y in zip(volume.flatten(0, 1), target.flatten(0, 1), strict=True):
        features = [published_features(state, ((v - y.mean()) / y.std(correction=0))[None, None])[0] for v in (x, y)]
        ours, theirs = (feature / feature.square().sum(0, keepdim=True).sqrt() for feature in features)
        distances.append((ours - theirs).square().sum(0).mean())
    torch.testing.assert_close(term(volume, target, 0), torch.stack(distances).mean(), rtol=1e-3, atol=0)
