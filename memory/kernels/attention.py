"""What attention allocates on a GPU besides its results."""

import math
from typing import Any

import torch

aten = torch.ops.aten
_BLOCK_TOKENS = 64  # of the blocks in which fp32 attention accumulates the gradient of the query
_BLOCK_STATE_BYTES = 16  # before each of them


def attention_workspaces(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the bytes of each workspace that attention's CUDA kernel allocates; empty for other operators.

    The complement of a position among the workspaces stands where that one is freed; the others stay to the end.
    torch serves 16 bits with flash attention and fp32 with its memory-efficient kernel; both need none in forward.
    """
    if func._overloadpacket is not aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return ()
    query = args[1]
    return _memory_efficient_backward(*query.shape) if query.dtype == torch.float32 else _flash_backward(*query.shape)


def _flash_backward(batch: int, heads: int, tokens: int, channels: int) -> tuple[int, ...]:
    """One fp32 number per token and head, and the query's gradient in fp32; both are rounded up to whole blocks."""
    numbers = 4 * batch * heads * math.ceil(tokens / 128) * 128
    return numbers, numbers * math.ceil(channels / 32) * 32


def _memory_efficient_backward(batch: int, heads: int, tokens: int, channels: int) -> tuple[int, ...]:
    """The product of result and gradient, its sums by token and head, and the query's gradient in blocks."""
    sums = 4 * batch * heads * tokens
    width = 64 if channels <= 64 else 128
    blocks = batch * heads * math.ceil(tokens / _BLOCK_TOKENS) * math.ceil(channels / width)
    workspace = blocks * (_BLOCK_STATE_BYTES + 4 * _BLOCK_TOKENS * width)
    reordered = (sums, ~1) if heads > 1 else ()
    return sums * channels, sums, *reordered, ~0, workspace
