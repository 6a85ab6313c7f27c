"""Run any piece of code under the tracker, on fake or real tensors, with CUDA's autocast rules or the CPU's.

CPU autocast leaves GroupNorm, upsampling, softmax, sums, powers and some losses in low precision. CUDA autocast runs
them in fp32 and keeps the fp32 copies for backward, which doubles the memory of a normalisation. The rules are
registered as kernels of the `AutocastCPU` dispatch key, so they apply wherever CPU autocast is on: in forward, in
custom autograd functions, and when a checkpoint recomputes. They do not apply to code that names "cuda" when it asks
for autocast, so networks and losses must name the device of their tensors.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from memory.predict.tracker import MemoryTracker
from runtime.observer import MemoryObserver, observed_by


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# From ATen's autocast_mode.h; a test compares these lists with the kernels that torch registers for AutocastCUDA.
FP32_OPS = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss "
    "nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
    "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa norm.Scalar norm.ScalarOpt_dim"
)
FP32_RESULT_OPS = _names(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
# Low precision under CUDA autocast; CPU autocast has no kernel for them.
LOW_PRECISION_OPS = _names("convolution _convolution addmv addr mv")
# fp32 under CPU autocast, unchanged by CUDA autocast; only the operators that a network or a loss may use.
UNTOUCHED_OPS = _names(
    "adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d max_pool3d reflection_pad1d reflection_pad2d "
    "replication_pad1d replication_pad2d replication_pad3d quantile quantile.scalar fft_rfftn fft_irfftn "
    "fft_fftn fft_ifftn"
)


def _overload(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _casting_kernel(name: str, dtype_of: Callable[[], torch.dtype]) -> Callable[..., Any]:
    op = _overload(name)

    def cast(tensor: Tensor) -> Tensor:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64  # which autocast never touches
        return tensor.to(dtype_of()) if eligible else tensor

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return op(*tree_map_only(Tensor, cast, args), **tree_map_only(Tensor, cast, kwargs))

    return kernel


def _fp32_result_kernel(name: str) -> Callable[..., Any]:
    op = _overload(name)
    position = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        chosen = args[position] if len(args) > position else kwargs.get("dtype")
        if chosen is None and args[0].dtype in (torch.float16, torch.bfloat16, torch.float32):
            args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
        with _without_autocast():
            return op(*args, **kwargs)

    return kernel


def _contiguous_group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Apply GroupNorm as CUDA does: copy an input that is not contiguous, and save the copy for backward."""
    batch, channels, voxels = x.shape[0], x.shape[1], x.shape[2:].numel()
    return torch.native_group_norm(x.contiguous(), weight, bias, batch, channels, voxels, num_groups, eps)[0]


@contextmanager
def cuda_autocast_rules() -> Iterator[None]:
    """Make `torch.autocast("cpu")` choose the dtypes of `torch.autocast("cuda")` inside the block.

    This does not turn autocast on. It affects the whole process, so never use it in a process that trains.
    """
    kernels: dict[str, Any] = {name: _casting_kernel(name, lambda: torch.float32) for name in FP32_OPS}
    kernels |= {name: _fp32_result_kernel(name) for name in FP32_RESULT_OPS}
    low = functools.partial(torch.get_autocast_dtype, "cpu")
    kernels |= {name: _casting_kernel(name, low) for name in LOW_PRECISION_OPS}
    kernels |= dict.fromkeys(UNTOUCHED_OPS, torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Oo]verrid.*")
            for name, kernel in kernels.items():
                library.impl(_overload(name), kernel, "AutocastCPU")
            library.impl(_overload("group_norm"), _contiguous_group_norm, "CompositeImplicitAutograd")
        yield
    finally:
        library._destroy()


@contextmanager
def emulated(fake: bool = True, cuda: bool = True) -> Iterator[FakeTensorMode | None]:
    """Emulate a GPU on the CPU inside the block, where networks must be built; yield the mode for `tracked`.

    fake: tensors hold no data, so size costs nothing. cuda: CPU tensors get the dtypes and copies they would get on a
    GPU.
    """
    with ExitStack() as stack:
        mode = None
        if fake:
            mode = stack.enter_context(FakeTensorMode())
            mode.cache_enabled = False  # `KnownResults` remembers the same results at a fraction of the cost
        if cuda:
            stack.enter_context(cuda_autocast_rules())
        yield mode


@contextmanager
def tracked(mode: FakeTensorMode | None, cuda: bool = True, without_triton: int = 0) -> Iterator[MemoryTracker]:
    """Yield a tracker that records everything in the block and counts offloaded tensors as host memory."""
    with MemoryTracker(cuda, mode, without_triton=without_triton) as tracker, observed_by(_StepObserver(tracker)):
        yield tracker


class _StepObserver(MemoryObserver):
    """Tells a tracker what a step offloads, and a step what is predicted."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self.tracker = tracker

    def host_allocation(self) -> AbstractContextManager[None]:
        return self.tracker.on_host()

    def emulates_gpu(self) -> bool:
        return self.tracker.cuda

    def free_host_bytes(self) -> int:
        return sys.maxsize  # what this machine has says nothing about the one that is predicted


class CopiedWeights(MemoryObserver):
    """Collects the weights that networks copy into another layout where they moved.

    A GPU has held such weights in both layouts, which leaves holes.
    """

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def weights_copied(self, weights: Sequence[Tensor]) -> None:
        """Add weights."""
        self.weights.extend(weights)


def place(tracker: MemoryTracker, weights: Iterable[Tensor], copied: Sequence[Tensor]) -> None:
    """Let the tracker see weights arrive on a device: all of them, and then the copies of those that are laid out."""
    is_copied = {id(weight) for weight in copied}
    originals: list[tuple[Tensor, Tensor]] = []
    for weight in weights:
        if id(weight) in is_copied:
            originals.append((weight, torch.empty_like(weight)))
        tracker.adopt([originals[-1][1] if id(weight) in is_copied else weight], "parameters")
    while originals:
        weight, _ = originals.pop(0)
        tracker.adopt([weight], "parameters")


def measure_peak(
    function: Callable[[MemoryTracker], Any], fake: bool = True, cuda: bool = True, without_triton: int = 0
) -> MemoryTracker:
    """Run `function(tracker)` and return the tracker; `tracker.peak["device"]` is the peak in bytes.

    `function` must build its networks itself; it may pass them to `tracker.name_modules` and `tracker.adopt`.
    """
    with emulated(fake, cuda) as mode, tracked(mode, cuda, without_triton) as tracker:
        function(tracker)
    return tracker
