"""FID and KID in the two protocols in use for volumes: on slices with RadImageNet's network, or with MedicalNet's.

`radimagenet-2.5d` is what MAISI reports: the middle 40 % of the slices along each axis through RadImageNet's ResNet-50,
one FID for each of the three planes, and their mean. `medicalnet-3d` is what WDM reports: whole volumes through
MedicalNet's ResNet-50. Both compare Gaussians fitted to the features (Heusel et al. 2017), in double precision.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from losses.networks import dilated_resnet, import_torchvision
from losses.weights import read_state_dict
from runtime.cli import ProgressBar
from runtime.files import counted
from settings import ConfigError

FILES = {
    "radimagenet-2.5d": "RadImageNet-ResNet50_notop.pth, which github.com/Warvito/radimagenet-models converted",
    "medicalnet-3d": "resnet_50_23dataset.pth from github.com/Tencent/MedicalNet",
}
"""By protocol: the file with its weights, and where it is published."""

# Of RadImageNet's three channels, blue, green and red; a volume is given to all three.
CHANNEL_MEANS = (0.406, 0.456, 0.485)
MIDDLE = 0.4
SLICES_AT_ONCE = 32
NUM_RESAMPLES = 50

Features = list[Tensor]
"""Of one volume: a matrix (slices, features) for each plane, or one of a single row."""


def radimagenet_resnet50() -> nn.Module:
    """Build torchvision's ResNet-50 as Keras has it: convolutions with a bias, strides in the first of each block."""
    network = import_torchvision().models.resnet50(weights=None)
    network.fc = nn.Identity()
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.bias = nn.Parameter(torch.zeros(module.out_channels))
        elif isinstance(module, nn.BatchNorm2d):
            module.eps = 1.001e-5
        elif hasattr(module, "conv3"):
            module.conv1.stride, module.conv2.stride = module.conv2.stride, (1, 1)
    return network


class FeatureNetwork:
    """The network of one protocol, with weights from a file; raise `ConfigError` for a missing file or other weights.

    `digest` is the SHA-256 of the file: figures can be compared only if it is the same.
    """

    def __init__(self, protocol: str, weights: str | None, device: torch.device) -> None:
        path = Path(weights or "").expanduser()
        remedy = f"allowed: {FILES[protocol]}; fetch it, and name its place"
        if not path.is_file():
            found = "no file was given" if weights is None else f"there is no file {path}"
            raise ConfigError(f"--fid-weights: {found}; {remedy}")
        state = read_state_dict(path, "--fid-weights")
        network = radimagenet_resnet50() if protocol == "radimagenet-2.5d" else dilated_resnet(50)
        expected = network.state_dict()
        # Files from old versions of torch lack the batch counts, which eval mode does not use.
        state = {name: value for name, value in expected.items() if name.endswith("num_batches_tracked")} | state
        wrong = [name for name, value in expected.items() if name not in state or state[name].shape != value.shape]
        wrong += [name for name, value in state.items() if name not in expected or not bool(value.isfinite().all())]
        if wrong:
            raise ConfigError(
                f"--fid-weights: {path} does not hold the weights of {protocol} ({wrong[0]} is missing, unknown, not "
                f"finite or has another shape); {remedy}"
            )
        network.load_state_dict(state)
        with path.open("rb") as file:
            self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.protocol, self.network, self.device = protocol, network.to(device).eval(), device

    def features(self, volumes: Sequence[Tensor], description: str) -> list[Features]:
        """Return the features of one-channel volumes (1, x, y, z) with values in [0, 1]."""
        if any(len(volume) != 1 for volume in volumes):
            found = f"--fid: the volumes have {len(volumes[0])} channels"
            raise ConfigError(f"{found}; allowed: 1, which is what its networks take; evaluate without --fid")
        of = self._of_slices if self.protocol == "radimagenet-2.5d" else lambda volume: [self._run(volume[None])]
        with torch.inference_mode():
            bar = ProgressBar(volumes, desc=f"features of {description}", unit="volume")
            return [of(volume.float()) for volume in bar]

    def _of_slices(self, volume: Tensor) -> Features:
        """Return the features of the planes xy, yz and zx, whose slices lie along z, x and y."""
        means = torch.tensor(CHANNEL_MEANS).view(3, 1, 1)
        planes = []
        for axis in (3, 1, 2):
            size = volume.shape[axis]
            start, stop = int((1 - MIDDLE) / 2 * size), int((1 + MIDDLE) / 2 * size)
            if start == stop:
                found = f"--fid: the volumes have {size} voxels along an axis, and no slice in their middle 40 %"
                raise ConfigError(f"{found}; allowed: at least 3; choose medicalnet-3d")
            middle = volume.movedim(axis, 0)[start:stop]
            low, high = middle.min(), middle.max()
            slices = ((middle - low) / (high - low + 1e-10)).expand(-1, 3, -1, -1) - means
            planes.append(torch.cat([self._run(part) for part in slices.split(SLICES_AT_ONCE)]))
        return planes

    def _run(self, images: Tensor) -> Tensor:
        return self.network(images.to(self.device)).cpu().double()


def caution(samples: Sequence[Features], reference: Sequence[Features]) -> str | None:
    """Return what to think of distances of so few volumes; None if their features determine a covariance."""
    rows, width = min(sum(len(one[0]) for one in some) for some in (samples, reference)), samples[0][0].shape[1]
    if rows > width:
        return None
    return (
        f"--fid: {counted(rows, 'row')} cannot determine the covariance of {width:,} features, so FID is too high; "
        "compare it with the anchors of the same table only, not with published figures"
    )


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Return the Frechet distance between Gaussians fitted to the rows of two float64 matrices.

    With S = A'A, the trace of the root of the product of two covariances is the sum of the singular values of AB'. That
    needs no root of a matrix, which is inexact where there are fewer rows than features.
    """
    (mean_a, root_a), (mean_b, root_b) = _fitted(a), _fitted(b)
    overlap = torch.linalg.svdvals(root_a @ root_b.T).sum()
    distance = (mean_a - mean_b).square().sum() + root_a.square().sum() + root_b.square().sum() - 2 * overlap
    return float(distance)


def _fitted(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean, and a matrix A with at most as many rows as features whose A'A is the covariance."""
    mean = rows.mean(dim=0)
    root = (rows - mean) / math.sqrt(len(rows) - 1)
    return mean, root if len(rows) <= rows.shape[1] else torch.linalg.qr(root, mode="r").R


def kernel_distance(a: Tensor, b: Tensor) -> float:
    """Return KID (Binkowski et al. 2018), the unbiased squared MMD with the kernel (x'y / d + 1)^3."""

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.T / x.shape[1] + 1) ** 3

    def between_rows(x: Tensor) -> Tensor:
        values = kernel(x, x)
        return (values.sum() - values.trace()) / (len(x) * (len(x) - 1))

    return float(between_rows(a) + between_rows(b) - 2 * kernel(a, b).mean())


def fid_and_kid(samples: Sequence[Features], reference: Sequence[Features], seed: int = 0) -> dict[str, Any]:
    """Return FID and KID of two sets, means over the planes, with 95 % intervals over the choice of volumes.

    The intervals are 1.96 standard deviations wide on each side, from resampled volumes: slices of one volume are not
    independent. Resampling repeats volumes, which raises FID, so its percentiles would lie too high.
    """
    generator = torch.Generator().manual_seed(seed)

    def measured(a: Sequence[Features], b: Sequence[Features]) -> list[tuple[float, float]]:
        matrices = [
            (torch.cat(x), torch.cat(y)) for x, y in zip(zip(*a, strict=True), zip(*b, strict=True), strict=True)
        ]
        return [(frechet_distance(x, y), kernel_distance(x, y)) for x, y in matrices]

    def drawn(features: Sequence[Features]) -> list[Features]:
        return [features[i] for i in torch.randint(len(features), [len(features)], generator=generator)]

    planes = measured(samples, reference)
    values = [statistics.fmean(column) for column in zip(*planes, strict=True)]
    resampled = [measured(drawn(samples), drawn(reference)) for _ in range(NUM_RESAMPLES)]
    result: dict[str, Any] = {"fid_of_planes": [fid for fid, _ in planes]} if len(planes) > 1 else {}
    for place, (name, value) in enumerate(zip(("fid", "kid"), values, strict=True)):
        margin = 1.96 * statistics.stdev(statistics.fmean(plane[place] for plane in one) for one in resampled)
        result |= {name: value, f"{name}_interval": [value - margin, value + margin]}
    return result
