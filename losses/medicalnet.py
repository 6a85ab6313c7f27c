"""Distance between the features of MedicalNet (Chen et al. 2019), a 3D ResNet trained on medical volumes."""

from typing import Any

import torch
from torch import Tensor, nn

from losses.lpips_slices import unit_length
from losses.pieces import FrozenTerm, mean_over_volumes
from losses.weights import find_weights, take_weights

NETWORK = "medicalnet-resnet10"
# The smallest standard deviation that a target is divided by, for constant backgrounds. Intensities span 2.
SMALLEST_STD = 0.01


class MedicalNetDistance(FrozenTerm):
    """The mean squared distance of unit-length features over all volumes and channels.

    One channel of one volume goes through the network at a time. Both volumes are standardised with the target's mean
    and standard deviation. With its own, as in MONAI, a reconstruction with the wrong contrast would not be penalised;
    with those of the batch, the loss of a volume would depend on the other volumes.
    """

    def __init__(self, weights: str | None = None, load_weights: bool = True) -> None:
        super().__init__()
        self.network: Any = _load_network(weights) if load_weights else dilated_resnet(10)
        self.freeze()

    def forward(self, reconstruction: Tensor, target: Tensor, step: int) -> Tensor:
        """Return the mean distance. `step` has no effect, because the whole volume is compared."""
        return mean_over_volumes(reconstruction, target, self.distance)

    def distance(self, volumes: Tensor, wanted: Tensor) -> Tensor:
        """Return the distance of each pair of one-channel volumes (n, depth, height, width)."""
        with torch.no_grad():
            mean = wanted.mean(dim=(1, 2, 3), keepdim=True)
            std = wanted.std(dim=(1, 2, 3), keepdim=True, correction=0).clamp_min(SMALLEST_STD)
            wanted_feature = unit_length(self._feature((wanted - mean) / std))
        difference = unit_length(self._feature((volumes - mean) / std)) - wanted_feature
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


def _load_network(weights: str | None) -> Any:
    path = find_weights(NETWORK, weights)
    # The meta device skips initialisation, which would take time and draw random numbers.
    with torch.device("meta"):
        network = dilated_resnet(10)
    # Files from old versions of torch lack the batch counts, which eval mode does not use.
    keys = network.state_dict().keys()
    counts = {key: torch.zeros((), dtype=torch.long) for key in keys if key.endswith("num_batches_tracked")}
    take_weights(network, {key: key for key in keys if key not in counts}, NETWORK, path, counts)
    return network
