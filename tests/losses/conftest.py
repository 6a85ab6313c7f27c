"""Weight files as torchvision and MedicalNet publish them, with random numbers inside."""

import math
from pathlib import Path

import pytest
import torch

from losses.networks import dilated_resnet, import_torchvision

TRUNKS = {"squeeze": "squeezenet1_1", "alex": "alexnet", "vgg": "vgg16"}


def random_state(shapes: dict[str, torch.Size], seed: int) -> dict[str, torch.Tensor]:
    """He-initialised weights, so that activations neither vanish nor explode on their way through the network."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, shape in shapes.items():
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else 100
        state[key] = torch.randn(shape, generator=generator) * math.sqrt(2 / fan_in)
    return state


@pytest.fixture(scope="session")
def trunk_files(tmp_path_factory) -> dict[str, Path]:
    import_torchvision()
    from torchvision import models

    folder = tmp_path_factory.mktemp("trunks")
    files = {}
    for trunk, builder in TRUNKS.items():
        with torch.device("meta"):
            network = getattr(models, builder)()
        shapes = {key: value.shape for key, value in network.state_dict().items() if key.startswith("features.")}
        files[trunk] = folder / f"{builder}.pth"
        torch.save(random_state(shapes, seed=1), files[trunk])
    return files


@pytest.fixture(scope="session")
def medicalnet_file(tmp_path_factory) -> Path:
    with torch.device("meta"):
        network = dilated_resnet(10)
    state = random_state({key: value.shape for key, value in network.state_dict().items()}, seed=2)
    for key, value in state.items():
        if key.endswith("running_var"):
            state[key] = value.square() + 0.5
        if "bn" in key and key.endswith("weight"):
            state[key] = value.abs() + 0.5
    # As published: saved by DataParallel, inside a wrapper.
    wrapped = {"state_dict": {f"module.{k}": v for k, v in state.items() if not k.endswith("num_batches_tracked")}}
    path = tmp_path_factory.mktemp("medicalnet") / "resnet_10_23dataset.pth"
    torch.save(wrapped, path)
    return path
