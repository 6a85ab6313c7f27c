"""Perceptual terms with trained networks: 2.5D LPIPS over slices of all three axes, and MedicalNet on whole volumes."""

import importlib
import math
import random
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from losses.perceptual import FrozenTerm, Index
from losses.weights import find_weights, take_weights
from settings.autoencoder import PerceptualSettings

# The shortest side that each trunk accepts. Thinner slices are enlarged to it along that side.
SHORTEST_SIDE = {"lpips-squeeze": 17, "lpips-alex": 31, "lpips-vgg": 16}
MEDICALNET = "medicalnet-resnet10"
# The smallest standard deviation that a target is divided by, for constant backgrounds. Intensities span 2.
SMALLEST_STD = 0.01
# torchvision's operators, if they had to be declared; they exist only as long as the library object.
_declarations: list[torch.library.Library] = []


class LpipsSlices(FrozenTerm):
    """The mean LPIPS (Zhang et al. 2018) over slices that are drawn anew for each step, for all volumes of a batch.

    Volumes are in [-1, 1], the range that LPIPS expects. Each channel is compared on its own as a grey image, because
    the channels of a medical volume are not red, green and blue.
    """

    def __init__(self, s: PerceptualSettings, seed: int, load_weights: bool = True) -> None:
        super().__init__()
        self.network: Any = _load_lpips(s) if load_weights else _empty_lpips(s)
        self.shortest_side = SHORTEST_SIDE[s.network]
        self.seed, self.slice_fraction, self.chunk_size = seed, s.slice_fraction, s.chunk_size
        self.freeze()

    def chunks(self, shape: Sequence[int], step: int) -> list[list[Index]]:
        """Return the slices of a step."""
        volumes, channels, *grid = shape
        chunks = []
        for axis, positions in enumerate(drawn_slices(grid, self.slice_fraction, self.seed, step)):
            slices: list[Index] = [
                (volume, channel, *(position if other == axis else slice(None) for other in range(3)))
                for position in positions
                for volume in range(volumes)
                for channel in range(channels)
            ]
            chunks += [slices[start : start + self.chunk_size] for start in range(0, len(slices), self.chunk_size)]
        return chunks

    def distance(self, pieces: Tensor, wanted: Tensor) -> Tensor:
        """Return LPIPS of each pair of grey images."""
        with torch.no_grad():
            wanted_features = [unit_length(feature) for feature in self._features(wanted)]
        result = pieces.new_zeros(len(pieces))
        layers = zip(self._features(pieces), wanted_features, self.network.lins, strict=True)
        for feature, wanted_feature, head in layers:
            difference = unit_length(feature) - wanted_feature
            result = result + head(difference.square()).mean(dim=(1, 2, 3))
        return result

    def _features(self, images: Tensor) -> Sequence[Tensor]:
        images = images.unsqueeze(1)
        size = [max(side, self.shortest_side) for side in images.shape[2:]]
        if size != list(images.shape[2:]):
            images = F.interpolate(images, size=size, mode="bilinear", align_corners=False)
        return self.network.net(self.network.scaling_layer(images))


def drawn_slices(grid: Sequence[int], fraction: float, seed: int, step: int) -> list[list[int]]:
    """Return the slices of each axis that a step compares, which depend only on the grid, the seed and the step.

    Slices are equally spaced from a random start (systematic sampling): each is equally likely, and neighbours, which
    are nearly alike, are not drawn together.
    """
    draw = random.Random(f"{seed} {step}")
    result = []
    for size in grid:
        count = max(1, round(fraction * size))
        start = draw.random()
        # Rounding can put the last one past the end.
        result.append([min(math.floor((start + i) * size / count), size - 1) for i in range(count)])
    return result


def unit_length(feature: Tensor, eps: float = 1e-10) -> Tensor:
    """Scale the feature vector of each pixel to length 1, as the lpips package does, but with a finite gradient at 0.

    The package's gradient is NaN there, because it differentiates a square root at 0. Here it is 1 / eps, which the
    ReLU in front of every feature turns into 0.
    """
    return feature / (torch.linalg.vector_norm(feature, dim=1, keepdim=True) + eps)


def import_torchvision() -> ModuleType:
    """Return torchvision, even if its compiled operators were built for another torch.

    A wheel built for CUDA next to a CPU build of torch fails with "operator torchvision::nms does not exist". The image
    networks need none of the compiled operators, so declaring the two that the import looks up is enough.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declarations.append(library)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    return importlib.import_module("torchvision")


def _empty_lpips(s: PerceptualSettings) -> Any:
    import_torchvision()
    import lpips

    with warnings.catch_warnings():
        # lpips calls torchvision with an argument that has since been renamed.
        warnings.filterwarnings("ignore", message=".*'(pretrained|weights)'.*", category=UserWarning)
        return lpips.LPIPS(net=s.network.removeprefix("lpips-"), pretrained=False, pnet_rand=True, verbose=False)


def _load_lpips(s: PerceptualSettings) -> Any:
    """Build LPIPS with the trunk from a torchvision file and the heads from the lpips package."""
    path = find_weights(s.network, s.weights)
    # The meta device skips initialisation, which would take time and draw random numbers.
    with torch.device("meta"):
        network = _empty_lpips(s)
    # torchvision's features.3.weight is net.slice2.3.weight here; the layer keeps its number.
    names = {f"net.{key}": f"features.{key.split('.', 1)[1]}" for key in network.net.state_dict()}
    import lpips

    shipped = Path(lpips.__file__).parent / "weights" / "v0.1" / f"{s.network.removeprefix('lpips-')}.pth"
    heads = torch.load(shipped, map_location="cpu", weights_only=True)
    scaling = {f"scaling_layer.{key}": value for key, value in lpips.lpips.ScalingLayer().state_dict().items()}
    # The package registers every head twice, as lin0 and as lins.0.
    copies = {key.replace("lin", "lins.", 1): value for key, value in heads.items()}
    take_weights(network, names, s.network, path, {**heads, **copies, **scaling})
    return network


class MedicalNetDistance(FrozenTerm):
    """The mean squared distance of unit-length features of MedicalNet (Chen et al. 2019) over volumes and channels.

    One channel of one volume goes through the network at a time. Both volumes are standardised with the target's mean
    and standard deviation. With its own, as in MONAI, a reconstruction with the wrong contrast would not be penalised;
    with those of the batch, the loss of a volume would depend on the other volumes.
    """

    def __init__(self, weights: str | None = None, load_weights: bool = True) -> None:
        super().__init__()
        self.network: Any = _load_medicalnet(weights) if load_weights else dilated_resnet(10)
        self.freeze()

    def distance(self, pieces: Tensor, wanted: Tensor) -> Tensor:
        """Return the distance of each pair of volumes of one channel."""
        with torch.no_grad():
            mean = wanted.mean(dim=(1, 2, 3), keepdim=True)
            std = wanted.std(dim=(1, 2, 3), keepdim=True, correction=0).clamp_min(SMALLEST_STD)
            wanted_feature = unit_length(self._feature((wanted - mean) / std))
        difference = unit_length(self._feature((pieces - mean) / std)) - wanted_feature
        return difference.square().sum(dim=1).mean(dim=(1, 2, 3))

    def _feature(self, volumes: Tensor) -> Tensor:
        network = self.network
        result = network.maxpool(network.act(network.bn1(network.conv1(volumes.unsqueeze(1)))))
        return network.layer4(network.layer3(network.layer2(network.layer1(result))))


def dilated_resnet(depth: int) -> Any:
    """Build MONAI's 3D ResNet of 10 or 50 layers with the strides and dilations that MedicalNet was trained with."""
    from monai.networks.nets import resnet10, resnet50

    build = {10: resnet10, 50: resnet50}[depth]
    network = build(spatial_dims=3, n_input_channels=1, feed_forward=False, bias_downsample=False, conv1_t_stride=2)
    # MedicalNet stops at an eighth of the resolution: its last two levels use dilation instead of strides.
    for level, dilation in ((network.layer3, 2), (network.layer4, 4)):
        for module in level.modules():
            if isinstance(module, nn.Conv3d):
                module.stride = (1, 1, 1)
                if module.kernel_size == (3, 3, 3):
                    module.dilation = module.padding = (dilation,) * 3
    return network


def _load_medicalnet(weights: str | None) -> Any:
    path = find_weights(MEDICALNET, weights)
    # The meta device skips initialisation, which would take time and draw random numbers.
    with torch.device("meta"):
        network = dilated_resnet(10)
    # Files from old versions of torch lack the batch counts, which eval mode does not use.
    keys = network.state_dict().keys()
    counts = {key: torch.zeros((), dtype=torch.long) for key in keys if key.endswith("num_batches_tracked")}
    take_weights(network, {key: key for key in keys if key not in counts}, MEDICALNET, path, counts)
    return network
