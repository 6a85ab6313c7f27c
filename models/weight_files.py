"""Weight files: safetensors with JSON metadata, never executable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from runtime.files import check_regular, reason, replacing
from settings import CheckpointError, TrainingError

_METADATA = "metadata."


def save_weights(path: Path, state: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    """Write weights with metadata, tensors or JSON, atomically; raise `TrainingError` if writing fails.

    Tensors of the metadata are stored beside the weights, under names that start with "metadata.".
    """
    kept = {f"{_METADATA}{name}": value for name, value in metadata.items() if isinstance(value, Tensor)}
    metadata = {name: value for name, value in metadata.items() if not isinstance(value, Tensor)}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in (state | kept).items()}
    try:
        write_tensors(path, tensors, {name: json.dumps(value) for name, value in metadata.items()})
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{path}: the weights could not be written ({error}); make room, then run the same command again"
        ) from error


def write_tensors(path: Path, tensors: dict[str, Tensor], texts: dict[str, str]) -> None:
    """Write a safetensors file atomically, with the permissions of any new file; create its folder.

    Raise OSError or SafetensorError if that fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(tensors, temporary, texts)
        if texts:
            _sort_metadata(temporary)
        # safetensors 0.8 makes files that only their owner can read, whatever the umask.
        temporary.chmod(mode)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the texts of a safetensors file; raise OSError or SafetensorError if it is not one.

    Tensors in the file start at any address. The copies do not, because matrix products may sum in another order there
    and would differ from those of the tensors that were written.
    """
    check_regular(path)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _sort_metadata(path: Path) -> None:
    """Sort the entries of the metadata, which safetensors writes in random order, so that equal runs write equal files.

    The file starts with the length of its header (8 bytes, little-endian), followed by the header as JSON.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(text) <= length, "sorting the metadata must not make the header longer"
        file.seek(8)
        file.write(text.ljust(length))


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return weights and metadata; raise `CheckpointError` if the file is missing or was written by another program."""
    try:
        state, texts = read_tensors(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file; train the stage that writes it, or give the path of one"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({reason(error)}); make it readable, or give the path of another"
        ) from None
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file ({error}); copy it again, or train the stage that writes it"
        ) from None
    try:
        metadata = {name: json.loads(text) for name, text in texts.items()}
    except ValueError:
        raise CheckpointError(
            f"{path}: was not written by this program; bring weights from elsewhere in with "
            "scripts/import_checkpoint.py"
        ) from None
    kept = [name for name in state if name.startswith(_METADATA)]
    return state, metadata | {name.removeprefix(_METADATA): state.pop(name) for name in kept}


def load_texts(path: Path) -> dict[str, Any]:
    """Return the metadata of a weight file that are not tensors, without reading the weights."""
    with safe_open(path, framework="pt") as file:
        return {name: json.loads(text) for name, text in (file.metadata() or {}).items()}


def load_into(network: nn.Module, path: Path) -> dict[str, Any]:
    """Load a weight file into a network and return its metadata; raise `CheckpointError` if it does not fit."""
    state, metadata = load_weights(path)
    load_state(network, state, path)
    return metadata


def load_state(network: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Load weights into a network; raise `CheckpointError`, which names the file, if they do not fit."""
    if wrong := differences(network.state_dict(), state):
        raise CheckpointError(
            f"{path}: does not fit the network of this config ({'; '.join(wrong)}); "
            "use the config it was trained with, or scripts/import_checkpoint.py for weights from elsewhere"
        )
    network.load_state_dict(state)


def differences(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Return a line for each way in which names and shapes of weights differ from those that a network expects."""
    reshaped = [
        f"{key}, {list(state[key].shape)} in the weights, {list(value.shape)} in the config"
        for key, value in expected.items()
        if key in state and state[key].shape != value.shape
    ]
    missing, unexpected = [key for key in expected if key not in state], [key for key in state if key not in expected]
    kinds = (("missing", missing), ("not in the network", unexpected), ("of another shape", reshaped))
    return [f"{len(keys)} {kind} (the first: {keys[0]})" for kind, keys in kinds if keys]
