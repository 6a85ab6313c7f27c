import torch
from torch.nn import functional

from losses.medicalnet import MedicalNetDistance


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
