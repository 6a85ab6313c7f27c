"""Distances of gradients from the truth, compared with those of MONAI's network with the same weights and inputs.

The truth is MONAI's network in double precision. Ours must be about as close to it as MONAI's network is in the same
dtype under the same autocast.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn

from memory.predict.emulation import cuda_autocast_rules
from models.lean import checkpointing, slabs

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LOW_PRECISION = (torch.bfloat16, torch.float16)
BATCHES = (1, 2, 3, 4)

# How many times as far from the truth as stock all gradients together may be. In double precision, where stock is the
# truth, the floor takes its place.
LIMITS = {torch.float64: 1.0, torch.float32: 2.0, torch.bfloat16: 1.5, torch.float16: 1.5}

# The same for one tensor, where rounding averages out over fewer values. The few sums of a norm are the worst, and
# stock computes them almost exactly in fp32. A wrong gradient is off by tens of per cent, far beyond these limits.
LIMITS_OF_ONE = {torch.float64: 5.0, torch.float32: 20.0, torch.bfloat16: 8.0, torch.float16: 8.0}

# A gradient with a norm below this share of the total is measured against that share: some are zero up to rounding.
SMALL_SHARE = 1e-3

Run = Callable[..., Sequence[Tensor]]
Arrange = Callable[[Tensor], Tensor]


def floor(dtype: torch.dtype) -> float:
    """Return the distance that counts as none: rounding the truth to `dtype` moves it by up to half an epsilon.

    In double precision, where the truth itself is rounded at every step, a relative distance of 1e-12.
    """
    return 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps / 2


@contextmanager
def small_work_counts() -> Iterator[None]:
    """Let small volumes be cut into slabs and copied to the host like large ones."""
    with (
        mock.patch.object(slabs, "MIN_SLAB_VALUES", 0),
        mock.patch.object(checkpointing, "MIN_OFFLOAD_BYTES", 0),
    ):
        yield


@dataclass
class Found:
    """Results of one forward and backward in double precision."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


@dataclass
class Distances:
    """How far results lie from the truth, relative to it: all gradients together, and each tensor by itself."""

    total: float
    each: dict[str, float]


def distances(found: Found, truth: Found) -> Distances:
    """Return how far `found` is from `truth`."""
    assert found.gradients.keys() == truth.gradients.keys(), "both have gradients for the same tensors"
    size = sum(float(gradient.square().sum()) for gradient in truth.gradients.values()) ** 0.5
    off = {name: float((found.gradients[name] - gradient).norm()) for name, gradient in truth.gradients.items()}
    each = {name: off[name] / max(float(g.norm()), SMALL_SHARE * size) for name, g in truth.gradients.items()}
    for index, (mine, true) in enumerate(zip(found.outputs, truth.outputs, strict=True)):
        each[f"output {index}"] = float((mine - true).norm() / true.norm())
    return Distances(sum(value**2 for value in off.values()) ** 0.5 / size, each)


def same_in_every_dtype(values: Tensor) -> Tensor:
    """Round to what bfloat16 can hold: moderate numbers of that kind are exact in the three other dtypes too."""
    return values.bfloat16().to(values.dtype)


def direction(shape: torch.Size) -> Tensor:
    """Return the gradient that is sent back from an output."""
    return same_in_every_dtype(torch.linspace(-7, 7, shape.numel(), dtype=torch.float64).sin().view(shape))


def run_backward(
    network: nn.Module,
    run: Run,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    arrange: Arrange = Tensor.contiguous,
    low_inputs: bool = False,
) -> Found:
    """Run a network forward and backward as training does: low precision is autocast, with parameters in fp32.

    `arrange` gives inputs and incoming gradients their memory layout; `low_inputs` are of low precision themselves, as
    those of a block inside of a network are.
    """
    low = dtype in LOW_PRECISION
    kind = torch.float32 if low else dtype
    network.to(kind).zero_grad()
    input_kind = dtype if low_inputs else kind
    leaves = [arrange(x.to(input_kind, copy=True)).requires_grad_() if x.is_floating_point() else x for x in inputs]
    with torch.autocast("cpu", dtype if low else torch.bfloat16, enabled=low):
        outputs = list(run(network, *leaves))
    torch.autograd.backward(outputs, [arrange(direction(out.shape).to(out.dtype)) for out in outputs])
    found = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.requires_grad}
    found |= {f"input {index}": leaf.grad for index, leaf in enumerate(leaves) if leaf.is_floating_point()}
    return Found(
        [out.detach().double() for out in outputs],
        {name: gradient.double() for name, gradient in found.items() if gradient is not None},
    )


class Problem:
    """Weights, inputs and a way to run both MONAI's network and ours; MONAI's runs once for each dtype.

    With `cuda` autocast chooses dtypes as on a GPU, where norms run in fp32; else as on a CPU, where they do not.
    """

    def __init__(self, stock: nn.Module, run: Run, inputs: Sequence[Tensor], cuda: bool = True) -> None:
        self.stock, self.run, self.inputs, self.cuda = stock, run, inputs, cuda
        self.truth = run_backward(copy.deepcopy(stock), run, inputs, torch.float64)
        self._stock: dict[tuple[torch.dtype, bool, Arrange], Distances] = {}

    def found_by(self, ours: nn.Module, dtype: torch.dtype, arrange: Arrange, low_inputs: bool) -> Found:
        """Return what `ours` makes of the inputs."""
        rules = cuda_autocast_rules() if self.cuda and dtype in LOW_PRECISION else nullcontext()
        with rules, small_work_counts():
            return run_backward(ours, self.run, self.inputs, dtype, arrange, low_inputs)

    def stock_distances(
        self, dtype: torch.dtype, low_inputs: bool = False, arrange: Arrange = Tensor.contiguous
    ) -> Distances:
        """Return how far MONAI's network is from the truth, for inputs in the same memory layout.

        oneDNN's weight gradients with channels last are up to 2.4 times as far from it in fp32 as contiguous ones.
        """
        key = (dtype, low_inputs, arrange)
        if key not in self._stock:
            found = self.found_by(copy.deepcopy(self.stock), dtype, arrange, low_inputs)
            self._stock[key] = distances(found, self.truth)
        return self._stock[key]

    def ratio(
        self, ours: nn.Module, dtype: torch.dtype, arrange: Arrange = Tensor.contiguous, low_inputs: bool = False
    ) -> float:
        """Return how many times as far from the truth as stock `ours` is; an error when any single tensor stands out.

        `ours` takes the weights of stock.
        """
        ours.load_state_dict(self.stock.state_dict())
        found = distances(self.found_by(ours, dtype, arrange, low_inputs), self.truth)
        stock = self.stock_distances(dtype, low_inputs, arrange)
        apart = standing_out(found.each, stock, dtype)
        assert not apart, f"times as far as stock: {apart}"
        return found.total / max(stock.total, floor(dtype))

    def assert_as_close_as_stock(self, ours: nn.Module, dtype: torch.dtype, **options: object) -> None:
        """Fail when `ours` is further from the truth than the limit of `dtype` allows."""
        ratio = self.ratio(ours, dtype, **options)  # type: ignore[arg-type]
        assert ratio <= LIMITS[dtype], f"{ratio:.2f} times as far from the truth as stock"


def standing_out(each: Mapping[str, float], stock: Distances, dtype: torch.dtype) -> dict[str, float]:
    """Return the tensors that are too far from the truth by themselves, and how many times as far as stock they are.

    Where stock happens to be very close with one tensor, it is measured by its distance with all of them.
    """
    least = max(stock.total, floor(dtype))
    ratios = {name: distance / max(stock.each[name], least) for name, distance in each.items()}
    return {name: ratio for name, ratio in ratios.items() if not ratio <= LIMITS_OF_ONE[dtype]}


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d)


def every_other_voxel(x: Tensor) -> Tensor:
    """A view of a wider tensor, whose other values are not numbers: reading one would show."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def some_channels(x: Tensor) -> Tensor:
    """A view of a tensor with more channels, as the gradient of a part of a concatenation is."""
    wide = torch.full((x.shape[0], x.shape[1] + 3, *x.shape[2:]), torch.nan, dtype=x.dtype)
    wide[:, 2:-1] = x
    return wide[:, 2:-1]


def batch_last(x: Tensor) -> Tensor:
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "channels last": channels_last,
    "every other voxel": every_other_voxel,
    "some channels": some_channels,
    "batch last": batch_last,
}
