"""Keeps conditions on the latent grid, on disk or in memory, so that each is made once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from diffusion.latent_files import TensorCache
from runtime.files.run_folder import LATENTS
from runtime.processes import Process

# Part of the key: change it whenever the same file and settings would be stored differently.
VERSION = 2

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
        with process.raise_on_all_ranks():
            for number in _with_bar([n for n in share if not folder.has(n)], process, title):
                folder.write(number, make(number))
        return folder.read
    kept = torch.zeros(len(names) - first, *shape)
    with process.raise_on_all_ranks():
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
    hidden: dict[str, Any] = {} if process.is_rank_zero and numbers else {"disable": True}
    return tqdm(numbers, desc=title, unit="volume", leave=False, **hidden)


class _Folder:
    """One file per condition, named by the hash of what it is made from."""

    def __init__(self, key: Any, names: Sequence[str], shape: Sequence[int]) -> None:
        text = json.dumps(["condition", VERSION, key], sort_keys=True)
        self._cache = TensorCache(LATENTS / hashlib.sha256(text.encode()).hexdigest()[:24], {"joined": shape})
        self._names = [hashlib.sha256(name.encode()).hexdigest()[:32] for name in names]

    def has(self, number: int) -> bool:
        return self._cache.find(self._names[number], "condition") is not None

    def write(self, number: int, joined: Tensor) -> None:
        self._cache.write(self._names[number], "condition", {"joined": joined}, {})

    def read(self, number: int) -> Tensor:
        return self._cache.read(self._names[number], "condition")["joined"]
