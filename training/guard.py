"""Detection of non-finite losses and gradients on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runtime.files import counted, printable
from runtime.processes import Process
from settings import TrainingError

MAX_SKIPPED_STEPS = 20
"""float16 only: how many updates in a row may overflow before the run stops."""

UNSET = -1
FilesOf = Callable[[int, int], Sequence[str]] | None
"""Maps (step, micro-batch) to the names of its volumes, if they are known."""


def checkpoint_state(saved: int) -> str:
    """Describe the last checkpoint for an error message; `saved` is its step, or 0 if there is none."""
    return f"the last checkpoint is good (step {saved})" if saved else "there is no checkpoint yet"


class Guard:
    """Records the first non-finite value and blocks all updates from then on.

    The host finds out in `raise_if_bad`, which the loop calls where it waits for the device anyway: at each log line
    and before each checkpoint. With float16, a non-finite gradient is an overflow: its network skips the step, and
    only `MAX_SKIPPED_STEPS` such steps in a row are an error.
    """

    def __init__(self, process: Process, terms: Sequence[str], skips_overflows: bool, files_of: FilesOf = None) -> None:
        device = process.device
        self.process = process
        self.terms = tuple(terms)
        self.skips_overflows = skips_overflows
        self.files_of = files_of
        self.blocked = torch.zeros((), device=device)
        self._first = torch.full((3,), UNSET, device=device, dtype=torch.int64)  # step, micro-batch, term
        self._numbers: dict[tuple[str, ...], Tensor] = {}
        self._skipped_in_row = torch.zeros((), device=device, dtype=torch.int64)
        self._skipped_here = torch.zeros((), device=device, dtype=torch.bool)
        self._step = UNSET
        self._num_micro_batches = 0

    def start(self, step: int) -> None:
        """Begin the checks of a step."""
        self._step = step
        self._skipped_here.zero_()

    def check_terms(self, micro_batch: int, values: dict[str, Tensor]) -> None:
        """Check the loss terms of one micro-batch."""
        self._num_micro_batches = max(self._num_micro_batches, micro_batch + 1)
        self._check(micro_batch, tuple(values), torch.stack([value.detach().float() for value in values.values()]))

    def check_gradient(self, network: str, norm: Tensor) -> None:
        """Check the gradient norm of a network, which depends on all micro-batches."""
        if self.skips_overflows:
            self._skipped_here |= ~torch.isfinite(norm)
        else:
            self._check(UNSET, (f"{network} gradient",), norm.detach().reshape(1))

    def blocks_update(self, norm: Tensor) -> Tensor:
        """Return 1.0 if a network with this gradient norm must not be updated, else 0.0; a tensor on the device."""
        if self.skips_overflows:
            return torch.maximum(self.blocked, (~torch.isfinite(norm)).float())
        return self.blocked

    def finish(self) -> None:
        """End the step; count it if float16 overflowed."""
        if self.skips_overflows:
            self._skipped_in_row.add_(1).mul_(self._skipped_here)

    def _check(self, micro_batch: int, names: tuple[str, ...], values: Tensor) -> None:
        if names not in self._numbers:  # copied to the device once, not in each step
            self._numbers[names] = torch.tensor([self.terms.index(name) for name in names], device=values.device)
        is_bad = ~torch.isfinite(values)
        worst = torch.where(is_bad, self._numbers[names], len(self.terms)).min()
        place = torch.stack([torch.full_like(worst, self._step), torch.full_like(worst, micro_batch), worst])
        any_bad = is_bad.any()
        self._first = torch.where(any_bad & (self.blocked == 0), place, self._first)
        self.blocked.copy_(torch.maximum(self.blocked, any_bad.float()))

    def raise_if_bad(self, saved: int = 0) -> None:
        """Raise `TrainingError` with the step, term and volumes if a value was not finite; wait for the device.

        Every process must call this, and all raise the same error: synchronised gradients spread a bad value to all
        of them, but only the process where it arose knows the volumes. `saved` is the step of the last checkpoint, or
        0 if there is none.
        """
        error: TrainingError | None = None
        step, micro_batch, term = self._first.tolist()
        if self.blocked.item():
            suspects = range(self._num_micro_batches) if micro_batch == UNSET else [micro_batch]
            files = [self.files_of(step, number) for number in suspects] if self.files_of else []
            names = dict.fromkeys(printable(name) for some in files for name in some)
            among = " one of" if len(names) > 1 else ""
            volumes = f" for{among} {', '.join(names)}" if names else ""
            error = TrainingError(
                f"step {step + 1}: {self.terms[term]} is not finite{volumes}; the weights were not updated and "
                f"{checkpoint_state(saved)}; lower the learning rate, check the volumes with scripts/check_data.py, "
                "or use bfloat16 or fp32 instead of float16"
            )
        elif self.skips_overflows and (skipped := int(self._skipped_in_row)) >= MAX_SKIPPED_STEPS:
            error = TrainingError(
                f"{counted(skipped, 'step')} in a row overflowed in float16; allowed: fewer than "
                f"{MAX_SKIPPED_STEPS}; set device.amp_dtype: bfloat16 or device.mixed_precision: false"
            )
        self.process.raise_first(error, urgency=(step, int(micro_batch == UNSET)))
