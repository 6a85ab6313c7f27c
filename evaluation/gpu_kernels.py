"""Times of the kernels that make up a step, measured on a device: convolutions, attention, norms, copies, launches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from models.lean import native
from models.lean.layout import CHANNELS_LAST, CONTIGUOUS
from models.lean.norm import group_norm

CHANNELS = (16, 24, 32, 64)
GRID = (128, 128, 64)
TOKENS, HEAD_CHANNELS = 65536, 64
NORMS = ((16, (128, 128, 64)), (24, (128, 128, 64)), (64, (64, 64, 16)))
LAYOUTS = {"channels_last": CHANNELS_LAST, "contiguous": CONTIGUOUS}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": torch.float32}
KERNELS = dict(zip(native.ATTENTION, ("flash", "efficient", "cudnn", "flash"), strict=True))
COPIED_BYTES = 1 << 28
SECONDS_EACH = 0.02


def seconds_of(run: Callable[[], Any], device: torch.device, most: int = 50) -> float:
    """Return the time of one call, from several in a row after two that are not counted."""
    run()
    single = _elapsed(run, device, 1)
    times = max(1, min(most, int(SECONDS_EACH / max(single, 1e-7))))
    return _elapsed(run, device, times) / times


def _elapsed(run: Callable[[], Any], device: torch.device, times: int) -> float:
    _finish(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def basics(device: torch.device, num_bytes: int = COPIED_BYTES, size: int = 4096) -> dict[str, Any]:
    """Return bandwidths in GB/s, the time of a launch, and what matrix products reach in TFLOPS."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target, tiny = torch.empty_like(source), torch.zeros(1, device=device)
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    found: dict[str, Any] = {
        "copy_gbs": 2e-9 * num_bytes / seconds_of(lambda: target.copy_(source), device),
        "to_host_gbs": 1e-9 * num_bytes / seconds_of(lambda: host.copy_(source, non_blocking=True), device),
        "to_device_gbs": 1e-9 * num_bytes / seconds_of(lambda: source.copy_(host, non_blocking=True), device),
        "launch_seconds": seconds_of(lambda: tiny.add_(1), device, most=5000),
        "matmul_tflops": {},
    }
    for name in ("bfloat16", "float16", "float32"):
        matrix = torch.zeros(size, size, dtype=getattr(torch, name), device=device)
        found["matmul_tflops"][name] = 2e-12 * size**3 / seconds_of(lambda m=matrix: m @ m, device)  # type: ignore[misc]
    return found


def convolutions(
    device: torch.device, channels: tuple[int, ...] = CHANNELS, grid: tuple[int, ...] = GRID
) -> Iterator[dict[str, Any]]:
    """Yield the times of 3x3x3 convolutions and of their two gradients."""
    for number, (dtype, kind), (layout, memory) in product(channels, DTYPES.items(), LAYOUTS.items()):
        x = torch.zeros((1, number, *grid), dtype=kind, device=device).contiguous(memory_format=memory)
        weight = torch.zeros((number, number, 3, 3, 3), dtype=kind, device=device).contiguous(memory_format=memory)

        def gradient(of_x: bool, x: Tensor = x, weight: Tensor = weight) -> Any:
            return native.convolution_backward(x, x, weight, (of_x, not of_x), padding=(1, 1, 1))

        yield {
            "channels": number,
            "grid": list(grid),
            "dtype": dtype,
            "layout": layout,
            "flops": 2 * 27 * number**2 * x[0, 0].numel(),
            "forward_seconds": seconds_of(lambda x=x, w=weight: F.conv3d(x, w, padding=1), device),  # type: ignore[misc]
            "data_gradient_seconds": seconds_of(lambda g=gradient: g(True), device),  # type: ignore[misc]
            "weight_gradient_seconds": seconds_of(lambda g=gradient: g(False), device),  # type: ignore[misc]
        }


class _AttentionKernel(TorchDispatchMode):
    """Notes which kernel of attention ran; "math" builds the matrix of all pairs."""

    name = "math"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = KERNELS.get(func, self.name)
        return func(*args, **(kwargs or {}))


def _attend(parts: tuple[Tensor, ...]) -> Tensor:
    query, key, value = parts
    return F.scaled_dot_product_attention(query, key, value)


def attention(
    device: torch.device, dtypes: tuple[str, ...] = ("bfloat16", "float16"), tokens: int = TOKENS
) -> Iterator[dict[str, Any]]:
    """Yield the times of attention with one head; raise `RuntimeError` where it would need the matrix of all pairs."""
    for dtype in dtypes:
        shape = (3, 1, 1, tokens, HEAD_CHANNELS)
        query, key, value = torch.zeros(shape, dtype=getattr(torch, dtype), device=device).requires_grad_().unbind()
        with _AttentionKernel() as kernel:
            _attend((query[:, :, :1024], key[:, :, :1024], value[:, :, :1024]))
        if kernel.name == "math":
            raise RuntimeError(f"attention in {dtype} has no kernel here that does without the matrix of all pairs")

        def run(parts: tuple[Tensor, ...] = (query, key, value)) -> Tensor:
            return _attend(parts)

        out = run()

        def back(out: Tensor = out, parts: tuple[Tensor, ...] = (query, key, value)) -> Any:
            return torch.autograd.grad(out, parts, out.detach(), retain_graph=True)

        yield {
            "tokens": tokens,
            "heads": 1,
            "head_channels": HEAD_CHANNELS,
            "dtype": dtype,
            "kernel": kernel.name,
            "flops": 4 * tokens**2 * HEAD_CHANNELS,
            "forward_seconds": seconds_of(run, device),
            "backward_seconds": seconds_of(back, device),
        }


def norms(
    device: torch.device,
    dtypes: tuple[str, ...] = ("bfloat16", "float16"),
    shapes: tuple[tuple[int, tuple[int, ...]], ...] = NORMS,
) -> Iterator[dict[str, Any]]:
    """Yield the times of GroupNorm with SiLU, and the bytes that it reads and writes."""
    for (channels, grid), dtype, (layout, memory) in product(shapes, dtypes, LAYOUTS.items()):
        norm = nn.GroupNorm(8, channels, device=device)
        x = torch.zeros((1, channels, *grid), dtype=getattr(torch, dtype), device=device)
        x = x.contiguous(memory_format=memory).requires_grad_()
        out = group_norm(x, norm, silu=True)
        inputs = (x, norm.weight, norm.bias)

        def run(x: Tensor = x, norm: nn.GroupNorm = norm) -> Tensor:
            with torch.no_grad():
                return group_norm(x, norm, silu=True)

        def back(out: Tensor = out, inputs: tuple[Tensor, ...] = inputs) -> Any:
            return torch.autograd.grad(out, inputs, out.detach(), retain_graph=True)

        yield {
            "shape": list(x.shape),
            "dtype": dtype,
            "layout": layout,
            "silu": True,
            "forward_seconds": seconds_of(run, device),
            "forward_bytes": 3 * x.nbytes,  # two reads, one write
            "backward_seconds": seconds_of(back, device),
            "backward_bytes": 5 * x.nbytes,  # four reads, one write
        }
