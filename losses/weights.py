"""Find the weights of perceptual networks: where the config says, else in the torch cache, else by a download."""

import re
import socket
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from runtime.files import check_regular
from settings import ConfigError, Problem
from settings.errors import AMBIGUOUS_READ_ERRORS, READ_ERRORS

KEY = "autoencoder.training.perceptual.weights"
TIMEOUT_SECONDS = 15.0
_READ_ERRORS: tuple[type[Exception], ...] = (*READ_ERRORS, *AMBIGUOUS_READ_ERRORS, SafetensorError)


@dataclass(frozen=True)
class WeightsFile:
    """A published file of weights."""

    url: str
    description: str

    @property
    def name(self) -> str:
        """Return the file's name, which is also its name in the torch cache."""
        return self.url.rsplit("/", 1)[1]


FILES = {
    "lpips-squeeze": WeightsFile(
        "https://download.pytorch.org/models/squeezenet1_1-b8a52dc0.pth", "torchvision's SqueezeNet 1.1"
    ),
    "lpips-alex": WeightsFile("https://download.pytorch.org/models/alexnet-owt-7be5be79.pth", "torchvision's AlexNet"),
    "lpips-vgg": WeightsFile("https://download.pytorch.org/models/vgg16-397923af.pth", "torchvision's VGG-16"),
    "medicalnet-resnet10": WeightsFile(
        "https://huggingface.co/TencentMedicalNet/MedicalNet-Resnet10/resolve/main/resnet_10_23dataset.pth",
        "MedicalNet's ResNet-10 of 23 datasets",
    ),
}


def find_weights(network: str, configured: str | None) -> Path:
    """Return the file with a network's weights; download it into the torch cache if it is not there yet.

    Raise ConfigError if there is no such file and it cannot be downloaded.
    """
    file = FILES[network]
    if configured is not None:
        path = Path(configured).expanduser()
        path = path / file.name if path.is_dir() else path
        if not path.is_file():
            found = f"there is no file {path}"
            raise _error(found, f"{network} needs {file.description}, {file.name}", _remedy(file))
        return path
    cached = cache_path(file)
    if not cached.is_file():
        _download(network, file, cached)
    return cached


def cache_path(file: WeightsFile) -> Path:
    """Return the file's path in the torch cache, which TORCH_HOME can move."""
    return Path(torch.hub.get_dir()) / "checkpoints" / file.name


def read_state_dict(path: Path, key: str = KEY) -> dict[str, Tensor]:
    """Return the tensors of a weight file by name, without executing code from it.

    `key` is what the user named the file with. Unwraps what published files have around them: a "state_dict" entry and
    a "module." in front of names.
    """
    try:
        check_regular(path)
        is_safe = path.suffix == ".safetensors"
        content: Any = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except _READ_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _error(f"{path} cannot be read as a state dict ({reason})", "", "fetch the file again", key) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        found = f"{path} holds a {type(content).__name__}, not a state dict"
        raise _error(found, "", "fetch the file again", key)
    return {str(key).removeprefix("module."): value for key, value in content.items() if isinstance(value, Tensor)}


def take_weights(
    module: nn.Module, names: dict[str, str], network: str, path: Path, shipped: dict[str, Tensor]
) -> None:
    """Fill a module, built on the meta device, from a file that has its parameters under other `names`.

    `shipped` are those that the file does not have. Raise ConfigError for a file with another network's weights.
    """
    found, expected = read_state_dict(path), module.state_dict()
    for key, name in names.items():
        if name not in found or found[name].shape != expected[key].shape:
            text = f"{path} does not hold the weights of {network} ({name} is missing or has another shape)"
            raise _error(text, f"it takes {FILES[network].description}", _remedy(FILES[network]))
    module.load_state_dict({key: found[name].float() for key, name in names.items()} | shipped, assign=True)


def _error(found: str, allowed: str, remedy: str, key: str = KEY) -> ConfigError:
    return ConfigError(str(Problem(key, found, allowed, remedy)))


def _remedy(file: WeightsFile) -> str:
    return (
        f"fetch {file.url} on a machine with internet and put it at {cache_path(file)} or name its place in {KEY},"
        " or choose network: structural, which needs no weights"
    )


def _download(network: str, file: WeightsFile, destination: Path) -> None:
    """Download a file into the torch cache; it appears there whole and checked, or not at all."""
    # torchvision publishes the beginning of the hash in the name.
    published = re.search(r"-([0-9a-f]{8})\.pth$", file.name)
    before = socket.getdefaulttimeout()
    try:
        # torch.hub takes no timeout, and a firewall may never answer.
        socket.setdefaulttimeout(TIMEOUT_SECONDS)
        destination.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(file.url, str(destination), published[1] if published else None)
    except (OSError, HTTPException, RuntimeError) as error:
        reason = getattr(error, "reason", None) or error
        found = (
            f"{network} needs {file.name} ({file.description}), which is not in {destination.parent}"
            f" and could not be downloaded ({reason})"
        )
        raise _error(found, "", _remedy(file)) from error
    finally:
        socket.setdefaulttimeout(before)
