"""Volumes, gradients and their exact results, for the tests of the norm operators on every device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.lean.norm.torch_kernels import Norm

EPS = 1e-5
MORE_ROWS = 3  # of the tensor that row slices are cut from


class Case(NamedTuple):
    """One volume: what it looks like and how it and its gradient lie in memory."""

    shape: tuple[int, ...]
    groups: int
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    grad_layout: str = "contiguous"
    silu: bool = True
    wild: bool = False

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        words = [size, f"{self.groups} groups", str(self.dtype)[6:], self.layout, f"gradient {self.grad_layout}"]
        return ", ".join(words + ["silu"] * self.silu + ["wild"] * self.wild)


class Inputs(NamedTuple):
    x: Tensor
    grad: Tensor
    weight: Tensor
    bias: Tensor


class Truth(NamedTuple):
    mean: Tensor
    rstd: Tensor
    y: Tensor
    sums: Tensor
    grad_x: Tensor
    before: Tensor


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Return the values in the memory layout that the words ask for."""
    if "rows" in layout:
        room = values.new_empty((*values.shape[:2], values.shape[2] + MORE_ROWS, *values.shape[3:]))
        inner = laid_out(room, layout.replace(" rows", ""))[:, :, 1 : 1 + values.shape[2]]
        return inner.copy_(values)
    values = values.clone()
    if layout == "channels last":
        return values.contiguous(memory_format=torch.channels_last_3d)
    if layout == "transposed":
        return values.transpose(3, 4).contiguous().transpose(3, 4)
    assert layout == "contiguous", layout
    return values.contiguous()


def inputs(case: Case, device: str = "cpu") -> Inputs:
    """Return the tensors of a case; in a wild one, groups' means and scales differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(sum(case.shape) + case.groups)
    channels = case.shape[1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, grad = normal(*case.shape), normal(*case.shape)
    if case.wild:
        size = channels // case.groups
        means = torch.tensor([1000.0, -3e-3, 0.0, 40.0]).repeat(case.groups)[: case.groups]
        scales = torch.tensor([1.0, 1e-2, 100.0, 10.0]).repeat(case.groups)[: case.groups]
        x = x * scales.repeat_interleave(size).view(1, -1, 1, 1, 1) + means.repeat_interleave(size).view(1, -1, 1, 1, 1)
    x, grad = laid_out(x.to(case.dtype), case.layout), laid_out(grad.to(case.dtype), case.grad_layout)
    affine = (1 + normal(channels) / 4, normal(channels) / 4)
    weight, bias = (values.to(torch.promote_types(case.dtype, torch.float32)) for values in affine)
    return Inputs(*(values.to(device) for values in (x, grad, weight, bias)))


def truth(case: Case, given: Inputs) -> Truth:
    """Return what the operators should, in double precision from the same rounded inputs, by autograd."""
    # Contiguous: with channels last, torch's own kernel subtracts the squared mean from the mean square.
    x, grad, weight, bias = (values.detach().cpu().double().contiguous() for values in given)
    x, weight, bias = x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    grouped = x.detach().unflatten(1, (case.groups, -1)).flatten(2)
    variance, mean = torch.var_mean(grouped, 2, correction=0)
    normed = F.group_norm(x, case.groups, eps=EPS).detach()
    y = F.group_norm(x, case.groups, weight, bias, EPS)
    y = F.silu(y) if case.silu else y
    (grad_x,) = torch.autograd.grad(y, x, grad)
    value = (normed * weight.view(1, -1, 1, 1, 1) + bias.view(1, -1, 1, 1, 1)).detach().requires_grad_()
    (before,) = torch.autograd.grad(F.silu(value) if case.silu else value * 1, value, grad)
    sums = torch.stack([before.sum((2, 3, 4)), (before * normed).sum((2, 3, 4))])
    return Truth(mean, (variance + EPS).rsqrt(), y.detach(), sums, grad_x, before)


def sums_of(backend: Any, grad: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """Return the sums that a backend writes where it need not store the gradient."""
    sums = torch.full((2, *x.shape[:2]), torch.nan, dtype=norm.mean.dtype, device=x.device)
    backend.store_norm_sums(None, sums, grad, x, norm, False)
    return sums


def distances(case: Case, given: Inputs, backend: Any, group_means: Any) -> dict[str, float]:
    """Return how far a backend's results are from the truth, relative to each value."""
    x, grad, weight, bias = given
    expected = truth(case, given)
    mean, rstd = backend.statistics(x, case.groups, EPS)
    norm = Norm(mean, rstd, weight, bias, case.silu)
    before, after = 1, 2
    # Results have the layout of x, or are contiguous where x has a layout that no result ever has.
    layout = case.layout.replace("transposed", "contiguous")
    room = x.new_full((*x.shape[:2], before + x.shape[2] + after, *x.shape[3:]), torch.nan)
    padded, grad_x, in_place = (laid_out(values, layout) for values in (room, x, grad))
    backend.normalise(padded, x, norm, before)
    sums = sums_of(backend, grad, x, norm)
    stored, kept, stored_statistics, stored_sums = (
        grad_x.clone(),
        grad_x.clone(),
        torch.stack((mean, rstd)),
        sums.clone(),
    )
    backend.store_statistics(stored, *stored_statistics.fill_(torch.nan), x, EPS)
    before_silu = case.dtype in (torch.float32, torch.float64)
    backend.store_norm_sums(kept, stored_sums.fill_(torch.nan), grad, x, norm, before_silu)
    means = group_means(sums, weight, case.groups, x.numel() // mean.numel())
    backend.norm_input_grad(grad_x, grad, x, norm, means, None)
    backend.norm_input_grad(in_place, in_place, x, norm, means, grad)
    rows = slice(before, before + x.shape[2])
    spread = expected.rstd.unsqueeze(2).expand(-1, -1, x.shape[1] // case.groups).flatten(1)[..., None, None, None]
    # In units of each group's own spread, so that an error in one group cannot hide behind a group of larger values.
    return {
        "mean": _distance(mean.cpu() * expected.rstd, expected.mean * expected.rstd),
        "rstd": float((rstd.cpu() / expected.rstd - 1).abs().max()),
        "y": _distance(padded[:, :, rows], expected.y),
        "halo": float(padded[:, :, :before].abs().sum() + padded[:, :, rows.stop :].abs().sum()),
        # The rounding error of a sum of n values that partly cancel grows with the root of n.
        "sums": max(
            _distance(found / x[0, 0].numel() ** 0.5, expected.sums / x[0, 0].numel() ** 0.5)
            for found in (sums, stored_sums)
        ),
        "grad_x": _distance(grad_x.cpu() / spread, expected.grad_x / spread),
        "stored": _distance(stored, x.cpu().double())
        + _distance(stored_statistics, torch.stack((mean, rstd)).cpu().double()),
        "kept": _distance(kept, expected.before if before_silu else grad.cpu().double()),
        "grad_x added in place": _distance(in_place, expected.grad_x + grad.cpu().double()),
    }


def whole_distances(case: Case, given: Inputs, backend: Any) -> dict[str, float]:
    """Return how far a norm of the whole volume, forward and backward, is from the truth."""
    x, grad, weight, bias = given
    expected = truth(case, given)
    layout = case.layout.replace("transposed", "contiguous")
    y, grad_x = (laid_out(torch.full_like(x, torch.nan), layout) for _ in range(2))
    mean, rstd = backend.group_norm(y, x, weight, bias, case.groups, EPS, case.silu)
    norm = Norm(mean, rstd, weight, bias, case.silu)
    sums = backend.group_norm_backward(grad_x, grad, x, norm)
    spread = expected.rstd.unsqueeze(2).expand(-1, -1, x.shape[1] // case.groups).flatten(1)[..., None, None, None]
    return {
        "mean": _distance(norm.mean.cpu() * expected.rstd, expected.mean * expected.rstd),
        "rstd": float((norm.rstd.cpu() / expected.rstd - 1).abs().max()),
        "y": _distance(y, expected.y),
        "sums": _distance(sums / x[0, 0].numel() ** 0.5, expected.sums / x[0, 0].numel() ** 0.5),
        "grad_x": _distance(grad_x.cpu() / spread, expected.grad_x / spread),
    }


def forget_launches(backend: Any) -> None:
    """Have volumes cut into tiles again, by changed constants."""
    for function in vars(backend).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _distance(found: Tensor, expected: Tensor) -> float:
    return float(((found.detach().cpu().double() - expected).abs() / (1 + expected.abs())).max())


SHAPES = {
    "even": ((1, 4, 4, 8, 8), 2),
    "odd": ((2, 6, 3, 5, 7), 3),
    "one group": ((3, 5, 2, 3, 3), 1),
    "a group per channel": ((4, 3, 2, 2, 5), 3),
    "one row": ((1, 12, 1, 3, 4), 2),
    "one voxel wide": ((2, 4, 5, 1, 1), 2),
    "one voxel": ((2, 6, 1, 1, 1), 2),
}
LAYOUTS = {
    "contiguous": "contiguous",
    "channels last": "channels last",
    "contiguous rows": "contiguous",
    "channels last rows": "channels last",
    "transposed": "transposed",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def all_cases(dtypes: tuple[torch.dtype, ...] = DTYPES) -> list[Case]:
    """Return shapes in all layouts, dtypes in turn; gradients that lie differently; and wild values."""
    cases = []
    for number, (shape, groups) in enumerate(SHAPES.values()):
        for turn, (layout, grad_layout) in enumerate(LAYOUTS.items()):
            dtype = dtypes[(number + turn) % len(dtypes)]
            cases.append(Case(shape, groups, dtype, layout, grad_layout, silu=(number + turn) % 2 == 0))
    shape, groups = (1, 4, 4, 6, 7), 2
    for dtype in dtypes:
        for layout, grad_layout in (("contiguous rows", "channels last"), ("channels last", "transposed")):
            cases.append(Case(shape, groups, dtype, layout, grad_layout))
    for layout in ("contiguous", "channels last"):
        cases += [Case(shape, 4, dtypes[0], layout, silu=silu, wild=True) for silu in (False, True)]
    return cases
