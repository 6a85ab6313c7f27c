"""Find the weights of perceptual networks: where the config says, else in the torch cache, else by a download."""

import hashlib
import queue
import threading
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from runtime.files.atomic import replacing
from runtime.files.reading import check_regular
from settings import ConfigError, Problem
from settings.errors import AMBIGUOUS_READ_ERRORS, READ_ERRORS

KEY = "autoencoder.training.perceptual.weights"
# A socket's timeout does not cover the name lookup, so the whole attempt to connect has a limit of its own.
CONNECT_SECONDS = 6.0
READ_SECONDS = 15.0
_BLOCK_BYTES = 1 << 20
_READ_ERRORS: tuple[type[Exception], ...] = (*READ_ERRORS, *AMBIGUOUS_READ_ERRORS, SafetensorError)


@dataclass(frozen=True)
class WeightsFile:
    """A published file of weights."""

    url: str
    description: str
    has_hash_in_name: bool = True

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
        has_hash_in_name=False,
    ),
}


def find_weights(network: str, configured: str | None) -> Path:
    """Return the file with a network's weights; download it into the torch cache if it is not there yet.

    Raise ConfigError if there is no such file and it cannot be downloaded. Without a network this takes
    CONNECT_SECONDS at most.
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


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a weight file by name, without executing code from it.

    Unwraps what published files have around them: a "state_dict" entry and a "module." in front of names.
    """
    try:
        check_regular(path)
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except _READ_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _error(f"{path} cannot be read as a state dict ({reason})", remedy="fetch the file again") from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        raise _error(f"{path} holds a {type(content).__name__}, not a state dict", remedy="fetch the file again")
    return {str(key).removeprefix("module."): value for key, value in content.items() if isinstance(value, Tensor)}


def weights_mismatch(path: Path, network: str, missing: str) -> ConfigError:
    """Return the error for a file with another network's weights."""
    file = FILES[network]
    found = f"{path} does not hold the weights of {network} ({missing} is missing or has another shape)"
    return _error(found, f"it takes {file.description}, {file.name}", _remedy(file))


def _error(found: str, allowed: str = "", remedy: str = "") -> ConfigError:
    return ConfigError(str(Problem(KEY, found, allowed, remedy)))


def _remedy(file: WeightsFile) -> str:
    return (
        f"fetch {file.url} on a machine with internet and put it at {cache_path(file)} or name its place in {KEY},"
        " or choose network: structural, which needs no weights"
    )


def _download(network: str, file: WeightsFile, destination: Path) -> None:
    """Download a file into the torch cache; it appears there whole and checked, or not at all.

    `torch.hub.download_url_to_file` takes no timeout and does not notice a file without a published hash that ends
    early, so the blocks are read here.
    """
    try:
        with _connect(file.url) as response:
            destination.parent.mkdir(parents=True, exist_ok=True)
            with replacing(destination) as temporary:
                _receive(response, file, temporary)
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        found = (
            f"{network} needs {file.name} ({file.description}), which is not in {destination.parent}"
            f" and could not be downloaded ({reason})"
        )
        raise _error(found, remedy=_remedy(file)) from error


def _receive(response: HTTPResponse, file: WeightsFile, path: Path) -> None:
    from tqdm import tqdm

    total = int(response.headers.get("Content-Length") or 0) or None
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("wb") as part, tqdm(total=total, unit="B", unit_scale=True, desc=f"downloading {file.name}") as bar:
        while block := response.read(_BLOCK_BYTES):
            part.write(block)
            digest.update(block)
            num_bytes += len(block)
            bar.update(len(block))
    _check_download(file, digest.hexdigest(), num_bytes, total)


def _check_download(file: WeightsFile, digest: str, num_bytes: int, expected_bytes: int | None) -> None:
    if expected_bytes is not None and num_bytes != expected_bytes:
        raise OSError(f"{num_bytes} of {expected_bytes} bytes arrived")
    published = file.name.rsplit(".", 1)[0].rsplit("-", 1)[-1]
    if file.has_hash_in_name and not digest.startswith(published):
        raise OSError(f"the download has the SHA-256 {digest[:8]}, not {published}")


def _connect(url: str) -> HTTPResponse:
    """Open a URL; give up after CONNECT_SECONDS, even while the name lookup hangs."""
    outcome: queue.Queue[HTTPResponse | Exception] = queue.Queue()

    def attempt() -> None:
        try:
            outcome.put(urllib.request.urlopen(url, timeout=READ_SECONDS))
        except (OSError, HTTPException) as error:
            outcome.put(error)

    threading.Thread(target=attempt, daemon=True).start()
    try:
        result = outcome.get(timeout=CONNECT_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"no answer within {CONNECT_SECONDS:.0f} s") from None
    if isinstance(result, Exception):
        raise result
    return result
