"""The norm operators as fused Triton kernels: each reads every value once and computes in fp32.

A volume is addressed as (batch, channels, voxels) through three strides, so the same kernels handle contiguous and
channels-last tensors, rows of either, and gradients whose layout differs from their input's. A program processes one
tile of channels x voxels. Sums have stages of fixed order and no atomics, so the same input gives the same bits.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def _tile(channels, voxels, num_chunks, multiple: tl.constexpr, block_c: tl.constexpr, block_v: tl.constexpr):
    """Return the batch item, channels, voxels and chunk of voxels of this program, and the mask of those that exist.

    Factors of addresses are 64 bits wide, because a volume may have more than 2^31 values. The number of channels is a
    multiple of `multiple`, which Triton finds out by itself for 16 only.
    """
    channels = (channels // multiple) * multiple
    program = tl.program_id(0)
    chunk = program % num_chunks
    block = program // num_chunks
    num_blocks = tl.cdiv(channels, block_c)
    c = (block % num_blocks) * block_c + tl.arange(0, block_c)
    v = chunk.to(tl.int64) * block_v + tl.arange(0, block_v)
    return (block // num_blocks).to(tl.int64), c, v, chunk, (c < channels)[:, None] & (v < voxels)[None, :]


@triton.jit
def _places(ptr, b, c, v, stride_b, stride_c, stride_v, multiple: tl.constexpr):
    voxels = b * stride_b + v[None, :].to(tl.int64) * stride_v
    if multiple > 1:
        voxels = tl.multiple_of(voxels, (multiple, multiple))
    return ptr + voxels + c[:, None].to(tl.int64) * stride_c


@triton.jit
def _load(ptr, b, c, v, mask, stride_b, stride_c, stride_v, multiple: tl.constexpr = 1):
    return tl.load(_places(ptr, b, c, v, stride_b, stride_c, stride_v, multiple), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, values, b, c, v, mask, stride_b, stride_c, stride_v, multiple: tl.constexpr = 1):
    places = _places(ptr, b, c, v, stride_b, stride_c, stride_v, multiple)
    tl.store(places, values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _of_channels(ptr, c, channels):
    return tl.load(ptr + c, mask=c < channels, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _of_groups(ptr, b, c, channels, groups):
    return tl.load(ptr + b * groups + c // (channels // groups), mask=c < channels, other=0.0)[:, None]


@triton.jit
def _before_silu(grad, normed):
    s = tl.sigmoid(normed)
    return grad * s * (1.0 + normed * (1.0 - s))


@triton.jit
def moments_kernel(
    x_ptr, out_ptr, parts_ptr, channels, voxels, num_chunks, plane, x_b, x_c, x_v, out_b, out_c, out_v,
    has_out: tl.constexpr, multiple: tl.constexpr, block_c: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Write each channel's mean over the tile, and the sum of squared distances from it; copy the tile if asked to."""
    b, c, v, chunk, mask = _tile(channels, voxels, num_chunks, multiple, block_c, block_v)
    x = _load(x_ptr, b, c, v, mask, x_b, x_c, x_v, multiple)
    if has_out:
        _store(out_ptr, x, b, c, v, mask, out_b, out_c, out_v, multiple)
    count = tl.minimum(voxels - chunk.to(tl.int64) * block_v, block_v).to(tl.float32)
    mean = tl.sum(x, 1) / count
    centred = tl.where(mask, x - mean[:, None], 0.0)
    place = parts_ptr + (b * channels + c) * num_chunks + chunk
    tl.store(place, mean, mask=c < channels)
    tl.store(place + plane, tl.sum(centred * centred, 1), mask=c < channels)


@triton.jit
def spans_kernel(
    parts_ptr, spans_ptr, voxels, num_chunks, num_spans, plane, spans_plane, block_v, block: tl.constexpr,
):  # fmt: skip
    """Combine the parts of `block` chunks of one channel into one; distances from the mean avoid cancellation."""
    program = tl.program_id(0)
    span = program % num_spans
    row = (program // num_spans).to(tl.int64)
    i = span * block + tl.arange(0, block)
    inside = i < num_chunks
    place = parts_ptr + row * num_chunks + i
    first = tl.load(parts_ptr + row * num_chunks + span * block)
    count = tl.where(inside, tl.minimum(voxels - i.to(tl.int64) * block_v, block_v), 0).to(tl.float32)
    means = tl.load(place, mask=inside, other=0.0)
    mean = first + tl.sum(count * (means - first), 0) / tl.sum(count, 0)
    squares = tl.load(place + plane, mask=inside, other=0.0) + count * (means - mean) * (means - mean)
    tl.store(spans_ptr + row * num_spans + span, mean)
    tl.store(spans_ptr + spans_plane + row * num_spans + span, tl.sum(squares, 0))


@triton.jit
def combine_kernel(parts_ptr, mean_ptr, rstd_ptr, size, voxels, num_chunks, eps, block_v, block: tl.constexpr):
    """Combine the parts of one group into its mean and rstd; distances from the mean avoid cancellation."""
    group = tl.program_id(0)
    num_parts = size * num_chunks
    means_ptr = parts_ptr + group.to(tl.int64) * num_parts
    squares_ptr = means_ptr + tl.num_programs(0).to(tl.int64) * num_parts
    total = (voxels * 1.0) * size
    first = tl.load(means_ptr)
    acc = tl.zeros([block], tl.float32)
    for start in range(0, num_parts, block):
        i = start + tl.arange(0, block)
        count = tl.minimum(voxels - (i % num_chunks).to(tl.int64) * block_v, block_v).to(tl.float32)
        acc += count * (tl.load(means_ptr + i, mask=i < num_parts, other=first) - first)
    mean = first + tl.sum(acc, 0) / total
    acc = tl.zeros([block], tl.float32)
    for start in range(0, num_parts, block):
        i = start + tl.arange(0, block)
        count = tl.minimum(voxels - (i % num_chunks).to(tl.int64) * block_v, block_v).to(tl.float32)
        distance = tl.load(means_ptr + i, mask=i < num_parts, other=mean) - mean
        acc += tl.load(squares_ptr + i, mask=i < num_parts, other=0.0) + count * distance * distance
    tl.store(mean_ptr + group, mean)
    tl.store(rstd_ptr + group, 1.0 / tl.sqrt(tl.sum(acc, 0) / total + eps))


@triton.jit
def normalise_kernel(
    x_ptr, out_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, channels, groups, voxels, out_voxels, voxels_before,
    num_chunks, x_b, x_c, x_v, out_b, out_c, out_v,
    silu: tl.constexpr, multiple: tl.constexpr, block_c: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Write the tile after norm and optional SiLU, and zeros where the output has rows that the input lacks."""
    b, c, v, _, mask = _tile(channels, out_voxels, num_chunks, multiple, block_c, block_v)
    inside = (v >= voxels_before) & (v - voxels_before < voxels)  # `v` has 64 bits, their sum may not
    x = _load(x_ptr, b, c, v - voxels_before, mask & inside[None, :], x_b, x_c, x_v, multiple)
    scale = _of_groups(rstd_ptr, b, c, channels, groups) * _of_channels(weight_ptr, c, channels)
    y = (x - _of_groups(mean_ptr, b, c, channels, groups)) * scale + _of_channels(bias_ptr, c, channels)
    if silu:
        y = y * tl.sigmoid(y)
    _store(out_ptr, tl.where(inside[None, :], y, 0.0), b, c, v, mask, out_b, out_c, out_v, multiple)


@triton.jit
def sums_kernel(
    grad_ptr, x_ptr, out_ptr, parts_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, channels, groups, voxels, num_chunks,
    plane, grad_b, grad_c, grad_v, x_b, x_c, x_v, out_b, out_c, out_v, silu: tl.constexpr, has_out: tl.constexpr,
    before_silu: tl.constexpr, multiple: tl.constexpr, block_c: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Write each channel's sums over the tile of the gradient before SiLU, and of it times the standardised input.

    If asked to, store the gradient as well, before or after SiLU.
    """
    b, c, v, chunk, mask = _tile(channels, voxels, num_chunks, multiple, block_c, block_v)
    x = _load(x_ptr, b, c, v, mask, x_b, x_c, x_v, multiple)
    grad = _load(grad_ptr, b, c, v, mask, grad_b, grad_c, grad_v, multiple)
    mean, rstd = _of_groups(mean_ptr, b, c, channels, groups), _of_groups(rstd_ptr, b, c, channels, groups)
    x = (x - mean) * rstd
    if has_out and not before_silu:
        _store(out_ptr, grad, b, c, v, mask, out_b, out_c, out_v, multiple)
    if silu:
        grad = _before_silu(grad, x * _of_channels(weight_ptr, c, channels) + _of_channels(bias_ptr, c, channels))
    if has_out and before_silu:
        _store(out_ptr, grad, b, c, v, mask, out_b, out_c, out_v, multiple)
    place = parts_ptr + (b * channels + c) * num_chunks + chunk
    tl.store(place, tl.sum(grad, 1), mask=c < channels)
    tl.store(place + plane, tl.sum(grad * x, 1), mask=c < channels)


@triton.jit
def total_kernel(parts_ptr, totals_ptr, num_chunks, block: tl.constexpr):
    """Add up the parts of one sum."""
    row = tl.program_id(0)
    acc = tl.zeros([block], tl.float32)
    for start in range(0, num_chunks, block):
        i = start + tl.arange(0, block)
        acc += tl.load(parts_ptr + row.to(tl.int64) * num_chunks + i, mask=i < num_chunks, other=0.0)
    tl.store(totals_ptr + row, tl.sum(acc, 0))


@triton.jit
def group_means_kernel(
    parts_ptr, sums_ptr, means_ptr, weight_ptr, channels, groups, voxels, num_chunks, plane, block: tl.constexpr,
):  # fmt: skip
    """Add up the parts of one group's sums, and write the group means that `input_grad_kernel` takes."""
    group = tl.program_id(0)
    size = channels // groups
    first = (group % groups) * size
    grad_mean, product_mean = 0.0, 0.0
    for c in range(first, first + size):
        row = (group // groups).to(tl.int64) * channels + c
        of_grad = tl.zeros([block], tl.float32)
        of_product = tl.zeros([block], tl.float32)
        for start in range(0, num_chunks, block):
            i = start + tl.arange(0, block)
            place = parts_ptr + row * num_chunks + i
            of_grad += tl.load(place, mask=i < num_chunks, other=0.0)
            of_product += tl.load(place + plane * num_chunks, mask=i < num_chunks, other=0.0)
        grad_sum, product_sum = tl.sum(of_grad, 0), tl.sum(of_product, 0)
        tl.store(sums_ptr + row, grad_sum)
        tl.store(sums_ptr + plane + row, product_sum)
        weight = tl.load(weight_ptr + c).to(tl.float32)
        grad_mean += grad_sum * weight
        product_mean += product_sum * weight
    total = (voxels * 1.0) * size
    tl.store(means_ptr + group, grad_mean / total)
    tl.store(means_ptr + tl.num_programs(0) + group, product_mean / total)


@triton.jit
def input_grad_kernel(
    grad_ptr, x_ptr, plus_ptr, out_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, group_means_ptr, channels, groups,
    voxels, num_chunks, batch, grad_b, grad_c, grad_v, x_b, x_c, x_v, plus_b, plus_c, plus_v, out_b, out_c, out_v,
    silu: tl.constexpr, has_plus: tl.constexpr, multiple: tl.constexpr, block_c: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the norm's input, from the gradient of its output and the means over each group."""
    b, c, v, _, mask = _tile(channels, voxels, num_chunks, multiple, block_c, block_v)
    x = _load(x_ptr, b, c, v, mask, x_b, x_c, x_v, multiple)
    grad = _load(grad_ptr, b, c, v, mask, grad_b, grad_c, grad_v, multiple)
    rstd, weight = _of_groups(rstd_ptr, b, c, channels, groups), _of_channels(weight_ptr, c, channels)
    x = (x - _of_groups(mean_ptr, b, c, channels, groups)) * rstd
    if silu:
        grad = _before_silu(grad, x * weight + _of_channels(bias_ptr, c, channels))
    of_grad = _of_groups(group_means_ptr, b, c, channels, groups)
    of_product = _of_groups(group_means_ptr + batch * groups, b, c, channels, groups)
    result = (grad * weight - of_grad - x * of_product) * rstd
    if has_plus:
        result += _load(plus_ptr, b, c, v, mask, plus_b, plus_c, plus_v, multiple)
    _store(out_ptr, result, b, c, v, mask, out_b, out_c, out_v, multiple)


@triton.jit
def _group(groups, channels, block_c: tl.constexpr):
    """Return the batch item, channels and number of channels of this program's group, and which channels exist."""
    program = tl.program_id(0)
    size = channels // groups
    offsets = tl.arange(0, block_c)
    return (program // groups).to(tl.int64), (program % groups) * size + offsets, size, offsets < size


@triton.jit
def group_norm_kernel(
    x_ptr, out_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, channels, groups, voxels, eps, x_b, x_c, x_v, out_b,
    out_c, out_v, silu: tl.constexpr, block_c: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Normalise one group: its mean, then its spread around the mean, then the output; a small group stays in cache."""
    b, c, size, exists = _group(groups, channels, block_c)
    total = (voxels * 1.0) * size
    acc = tl.zeros([block_c, block_v], tl.float32)
    for start in range(0, voxels, block_v):
        v = start + tl.arange(0, block_v)
        acc += _load(x_ptr, b, c, v, exists[:, None] & (v < voxels)[None, :], x_b, x_c, x_v)
    mean = tl.sum(tl.sum(acc, 1), 0) / total
    acc = tl.zeros([block_c, block_v], tl.float32)
    for start in range(0, voxels, block_v):
        v = start + tl.arange(0, block_v)
        mask = exists[:, None] & (v < voxels)[None, :]
        centred = tl.where(mask, _load(x_ptr, b, c, v, mask, x_b, x_c, x_v) - mean, 0.0)
        acc += centred * centred
    rstd = 1.0 / tl.sqrt(tl.sum(tl.sum(acc, 1), 0) / total + eps)
    tl.store(mean_ptr + tl.program_id(0), mean)
    tl.store(rstd_ptr + tl.program_id(0), rstd)
    weight = tl.load(weight_ptr + c, mask=exists, other=0.0).to(tl.float32)[:, None]
    bias = tl.load(bias_ptr + c, mask=exists, other=0.0).to(tl.float32)[:, None]
    for start in range(0, voxels, block_v):
        v = start + tl.arange(0, block_v)
        mask = exists[:, None] & (v < voxels)[None, :]
        y = (_load(x_ptr, b, c, v, mask, x_b, x_c, x_v) - mean) * (rstd * weight) + bias
        if silu:
            y = y * tl.sigmoid(y)
        _store(out_ptr, y, b, c, v, mask, out_b, out_c, out_v)


@triton.jit
def group_norm_backward_kernel(
    grad_ptr, x_ptr, out_ptr, sums_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, channels, groups, voxels, plane,
    grad_b, grad_c, grad_v, x_b, x_c, x_v, out_b, out_c, out_v,
    silu: tl.constexpr, block_c: tl.constexpr, block_v: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one group's input, and each channel's sums as `sums_kernel` defines them."""
    b, c, size, exists = _group(groups, channels, block_c)
    mean, rstd = tl.load(mean_ptr + tl.program_id(0)), tl.load(rstd_ptr + tl.program_id(0))
    weight = tl.load(weight_ptr + c, mask=exists, other=0.0).to(tl.float32)[:, None]
    bias = tl.load(bias_ptr + c, mask=exists, other=0.0).to(tl.float32)[:, None]
    of_grad = tl.zeros([block_c, block_v], tl.float32)
    of_product = tl.zeros([block_c, block_v], tl.float32)
    for start in range(0, voxels, block_v):
        v = start + tl.arange(0, block_v)
        mask = exists[:, None] & (v < voxels)[None, :]
        x = tl.where(mask, (_load(x_ptr, b, c, v, mask, x_b, x_c, x_v) - mean) * rstd, 0.0)
        grad = _load(grad_ptr, b, c, v, mask, grad_b, grad_c, grad_v)
        if silu:
            grad = _before_silu(grad, x * weight + bias)
        of_grad += grad
        of_product += grad * x
    grad_sums, product_sums = tl.sum(of_grad, 1), tl.sum(of_product, 1)
    place = sums_ptr + b * channels + c
    tl.store(place, grad_sums, mask=exists)
    tl.store(place + plane, product_sums, mask=exists)
    total = (voxels * 1.0) * size
    grad_mean = tl.sum(grad_sums[:, None] * weight) / total
    product_mean = tl.sum(product_sums[:, None] * weight) / total
    for start in range(0, voxels, block_v):
        v = start + tl.arange(0, block_v)
        mask = exists[:, None] & (v < voxels)[None, :]
        x = (_load(x_ptr, b, c, v, mask, x_b, x_c, x_v) - mean) * rstd
        grad = _load(grad_ptr, b, c, v, mask, grad_b, grad_c, grad_v)
        if silu:
            grad = _before_silu(grad, x * weight + bias)
        _store(out_ptr, (grad * weight - grad_mean - x * product_mean) * rstd, b, c, v, mask, out_b, out_c, out_v)
