"""2.5D FID: the Fréchet distance between slices of volumes in all three planes, with feature weights from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from losses.torchvision_import import import_torchvision
from losses.weights import read_state_dict
from settings import CheckpointError

NETWORKS = ("squeezenet1_1", "alexnet", "vgg16", "resnet18", "resnet50")
PLANES = ("first axis", "second axis", "third axis")

# The networks were trained on ImageNet, normalised with these.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SMALLEST_SIDE = 64  # smaller slices would vanish in the networks' strides, so they are enlarged
_KEPT_SLICES = (0.2, 0.8)  # the outer slices of a volume are often empty
_CHUNK = 32  # slices per forward pass


def load_features(network: str, weights: str | Path) -> Callable[[Tensor], Tensor]:
    """Return a function from grey slices (N, H, W) in [0, 1] to the network's pooled features (N, F).

    `network` is a torchvision model; `weights` is a file with its state dict, with or without the classifier. Raise
    `CheckpointError` if the file does not contain that network.
    """
    path = Path(weights).expanduser()
    if not path.is_file():
        raise CheckpointError(f"--fid-weights: there is no file {path}; put the torchvision weights of {network} there")
    model = import_torchvision().models.get_model(network, weights=None)
    state, expected = _without_classifier(read_state_dict(path)), _without_classifier(model.state_dict())
    # Published files from before torch 1.0 lack the counters of batch norms.
    needed = {name: tensor for name, tensor in expected.items() if not name.endswith("num_batches_tracked")}
    wrong = [name for name, tensor in needed.items() if name not in state or state[name].shape != tensor.shape]
    wrong += [name for name in state if name not in expected]  # a deeper network has all layers of a shallower one
    if wrong:
        raise CheckpointError(
            f"--fid-weights: {path} does not hold the weights of {network} ({wrong[0]} is missing, unknown or has "
            f"another shape); allowed networks: {', '.join(NETWORKS)}; choose the one that matches the file with "
            "--fid-network"
        )
    model.load_state_dict(state, strict=False)
    trunk = _trunk(model).eval().requires_grad_(False)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _STD))

    @torch.no_grad()
    def features(slices: Tensor) -> Tensor:
        images = _at_least(slices[:, None].float(), _SMALLEST_SIDE).expand(-1, 3, -1, -1)
        return torch.cat([trunk((part - mean) / std).mean(dim=(2, 3)) for part in images.split(_CHUNK)]).double()

    return features


def slice_features(volumes: Iterable[Tensor], features: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return, for each plane, the features of the inner slices of all volumes (C, D, H, W); only channel 0 is used."""
    found: list[list[Tensor]] = [[], [], []]
    for volume in volumes:
        for plane, collected in enumerate(found):
            slices = volume[0].cpu().movedim(plane, 0)
            first, last = (round(share * len(slices)) for share in _KEPT_SLICES)
            collected.append(features(slices[first : max(last, first + 1)]))
    return [torch.cat(collected) for collected in found]


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Return the squared Fréchet distance between Gaussians fitted to two sets of features (N, F), each N > 1."""
    assert len(first) > 1, "the first set needs at least two slices for a covariance"
    assert len(second) > 1, "the second set needs at least two slices for a covariance"
    (mean_1, cov_1), (mean_2, cov_2) = ((x.mean(dim=0), torch.cov(x.T)) for x in (first, second))
    values, vectors = torch.linalg.eigh(cov_1)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    # (cov_1 cov_2)^(1/2) has the same trace as this symmetric form, whose eigenvalues are real.
    shared = torch.linalg.eigvalsh(root @ cov_2 @ root).clamp_min(0).sqrt().sum()
    # With fewer slices than features, rounding would take equal sets a little below zero.
    return max(0.0, float((mean_1 - mean_2).square().sum() + cov_1.trace() + cov_2.trace() - 2 * shared))


def _without_classifier(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if not name.startswith(("fc.", "classifier."))}


def _trunk(model: nn.Module) -> nn.Module:
    """Return the convolutional part of a torchvision classifier."""
    features = getattr(model, "features", None)
    if isinstance(features, nn.Module):
        return features
    parts = [part for name, part in model.named_children() if name not in ("avgpool", "fc")]
    return nn.Sequential(*parts)


def _at_least(slices: Tensor, side: int) -> Tensor:
    factor = side / min(slices.shape[2:])
    if factor <= 1:
        return slices
    return F.interpolate(slices, scale_factor=factor, mode="bilinear", align_corners=False)
