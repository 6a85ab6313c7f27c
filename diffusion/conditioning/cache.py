"""Caches conditions on the latent grid, on disk or in memory, so that each is made once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from data.loading import Pose
from diffusion.conditioning.kind import Preparation, Read
from diffusion.latent_files import TensorCache, digest_of
from runtime.cli.bars import ProgressBar
from runtime.files.run_folder import LATENTS

# Part of the key: change it whenever the same file and settings would be stored differently.
VERSION = 3

Make = Callable[[int, int, Pose | None], Tensor]
"""Returns the condition of a volume by its index and the number of its variant, in a pose: float32 (C, D, H, W)."""


def cached(
    make: Make,
    made_from: Callable[[int, int], str],
    shape: Sequence[int],
    key: Any,
    run: Preparation,
    title: str,
    num_variants: int = 1,
) -> Read:
    """Make the conditions that are not cached yet, shared among the processes, and return how to read them.

    `made_from` says what the condition of a volume is made from, by its index and its variant, and `key` has all
    settings that decide the result. The variant changes from pass to pass, and each augmented copy is another one.
    They are on disk with `ldm.latents.cache: disk`, and otherwise in memory: they are about as large as latents.
    """
    entries = [(index, variant, 0) for index in range(len(run.files)) for variant in range(num_variants)]
    entries += [(index, copy, copy) for index in range(len(run.volumes.train)) for copy in range(1, 1 + run.num_copies)]
    row_of = {(index, variant if copy == 0 else 0, copy): row for row, (index, variant, copy) in enumerate(entries)}

    def made(row: int) -> Tensor:
        index, variant, copy = entries[row]
        return make(index, variant, None if copy == 0 or run.pose is None else run.pose(index, copy))

    def name(row: int) -> str:
        index, variant, copy = entries[row]
        text = made_from(index, variant)
        if copy:
            scales = run.settings.ldm.conditioning.copies_scale
            text = f"{text} {digest_of(run.volumes.train[index])} {copy}" + ("" if scales else " same size")
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    is_on_disk = run.settings.ldm.latents.cache == "disk"
    text = json.dumps(["condition", VERSION, key], sort_keys=True)
    folder = TensorCache(LATENTS / hashlib.sha256(text.encode()).hexdigest()[:24], {"joined": shape})
    in_memory = torch.zeros(0 if is_on_disk else len(entries), *shape)
    with run.process.raise_on_all_ranks():
        rows = range(run.process.rank, len(entries), run.process.world_size)
        missing = [row for row in rows if not is_on_disk or folder.find(name(row), "condition") is None]
        # Passed only to hide the bar, because an explicit disable=False would override --quiet.
        hidden: dict[str, Any] = {} if run.process.is_rank_zero and missing else {"disable": True}
        for row in ProgressBar(missing, desc=title, unit="volume", leave=False, **hidden):
            if is_on_disk:
                folder.write(name(row), "condition", {"joined": made(row)}, {})
            else:
                in_memory[row] = made(row)
    if not is_on_disk:
        # One process fills each row and the others leave zeros.
        run.process.sum(in_memory)

    def read(index: int, variant: int, copy: int) -> Tensor:
        row = row_of[index, 0 if copy else variant % num_variants, copy]
        return folder.read(name(row), "condition")["joined"] if is_on_disk else in_memory[row]

    return read
