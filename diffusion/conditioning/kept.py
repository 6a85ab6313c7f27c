"""Keeps conditions on the latent grid, on disk or in memory, so that each is made once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from runtime.processes import Process
from settings import DataError
from storage.atomic import replacing
from storage.run_folder import LATENTS

# Part of the key: change it whenever the same file and settings would be stored differently.
VERSION = 1

Read = Callable[[int], Tensor]
"""Returns one condition by its number: float32 (C, D, H, W)."""


def keep(
    make: Read,
    names: Sequence[str],
    shape: Sequence[int],
    key: Any,
    on_disk: bool,
    process: Process,
    title: str,
    first: int = 0,
) -> Read:
    """Make the conditions that are not kept yet, shared among the processes, and return how to read them.

    `names` says what each condition is made from, and `key` all settings that decide the result. Those before the
    `first` are not made and cannot be read.
    """
    share = range(first + process.rank, len(names), process.world_size)
    if on_disk:
        folder = _Folder(key, names, shape)
        with process.together():
            for number in _with_bar([n for n in share if not folder.has(n)], process, title):
                folder.write(number, make(number))
        return folder.read
    kept = torch.zeros(len(names) - first, *shape)
    with process.together():
        for number in _with_bar(share, process, title):
            kept[number - first] = make(number)
    # One process fills each row and the others leave zeros.
    process.sum(kept)

    def read(number: int) -> Tensor:
        assert number >= first, f"condition {number} is before the first that was made, {first}"
        return kept[number - first]

    return read


def _with_bar(numbers: Sequence[int], process: Process, title: str) -> Iterable[int]:
    # Passed only to hide the bar, because an explicit disable=False would override --quiet.
    hidden: dict[str, Any] = {} if process.is_first and numbers else {"disable": True}
    return tqdm(numbers, desc=title, unit="volume", leave=False, **hidden)


class _Folder:
    """One safetensors file per condition, named by the hash of what it is made from."""

    def __init__(self, key: Any, names: Sequence[str], shape: Sequence[int]) -> None:
        text = json.dumps(["condition", VERSION, key], sort_keys=True)
        self.folder = LATENTS / hashlib.sha256(text.encode()).hexdigest()[:24]
        self._paths = [self.folder / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.safetensors" for name in names]
        self._shape = list(shape)

    def has(self, number: int) -> bool:
        try:
            with safe_open(self._paths[number], framework="pt") as content:
                return content.get_slice("joined").get_shape() == self._shape
        except (OSError, SafetensorError):
            return False

    def write(self, number: int, joined: Tensor) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._paths[number]) as temporary:
                save_file({"joined": joined.contiguous()}, temporary)
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{self.folder}: a condition could not be written ({error}); free some space, or set "
                "ldm.latents.cache: memory"
            ) from None

    def read(self, number: int) -> Tensor:
        try:
            return load_file(self._paths[number])["joined"]
        except (OSError, SafetensorError, KeyError):
            raise DataError(
                f"{self._paths[number]}: a kept condition is missing or damaged; run the same command again to make "
                "it; several machines need a shared folder, or ldm.latents.cache: memory"
            ) from None
