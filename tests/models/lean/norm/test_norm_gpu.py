"""The norm operators on a GPU: Triton's kernels and torch's own against double precision, and what memory they take."""

import pytest
import torch

from models.lean.norm import operators, torch_kernels
from models.lean.norm.operators import group_means, uses_triton
from models.lean.norm.torch_kernels import Norm
from tests.models.lean.norm.norm_cases import EPS, Case, all_cases, distances, forget_launches, inputs, whole_distances

pytestmark = pytest.mark.gpu

ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
LARGE = [
    Case((2, 16, 33, 40, 37), 8, dtype, layout, grad_layout, wild=wild)
    for dtype, wild in ((torch.float32, True), (torch.bfloat16, False), (torch.float16, False))
    for layout, grad_layout in (("contiguous rows", "channels last"), ("channels last rows", "contiguous"))
]


@pytest.fixture
def kernels():
    if not uses_triton(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("Triton does not run on this GPU")
    from models.lean.norm import triton_launch

    return triton_launch


def check(case, found):
    assert found.get("halo", 0) == 0
    assert found["rstd"] < (1e-5 if case.wild else 1e-6)
    assert found["mean"] < 1e-6
    assert found["sums"] < (3e-4 if case.wild else 1e-5)
    for name in {"y", "grad_x", "grad_x added in place"} & found.keys():
        assert found[name] <= (3e-4 if case.wild else ROUNDING[case.dtype]), name


@pytest.mark.parametrize("case", [*all_cases(), *LARGE], ids=str)
def test_triton_kernels_compute_what_double_precision_does(kernels, case):
    check(case, distances(case, inputs(case, "cuda"), kernels, group_means))


@pytest.mark.parametrize("case", [*all_cases(), *LARGE], ids=str)
@pytest.mark.parametrize("limits", [{}, {"SMALL_VALUES": 0}, {"SMALL_VALUES": 0, "MOST_PARTS": 1}])
def test_norms_of_whole_volumes_compute_what_double_precision_does(kernels, limits, case, monkeypatch):
    for name, value in limits.items():
        monkeypatch.setattr(kernels, name, value)
    forget_launches(kernels)
    try:
        # Launched a second time, through what Triton compiled the first time.
        for _ in range(2):
            check(case, whole_distances(case, inputs(case, "cuda"), kernels))
    finally:
        forget_launches(kernels)


@pytest.mark.parametrize("case", [*all_cases(), *LARGE], ids=str)
def test_native_kernels_compute_what_double_precision_does(case):
    check(case, distances(case, inputs(case, "cuda"), torch_kernels, group_means))


def test_same_input_gives_same_bits(kernels):
    x, grad, weight, bias = inputs(Case((2, 16, 40, 41, 42), 8, torch.bfloat16), "cuda")
    runs = []
    for _ in range(3):
        y, mean, rstd = operators.group_norm(x, weight, bias, 8, EPS, True, x.dtype)
        runs.append((y, mean, rstd, *operators.group_norm_backward(grad, x, Norm(mean, rstd, weight, bias, True))))
    for other in runs[1:]:
        assert all(torch.equal(first, second) for first, second in zip(runs[0], other, strict=True))


def test_no_copy_of_a_volume_is_made(kernels):
    x, grad, weight, bias = inputs(Case((1, 16, 64, 96, 96), 8, torch.bfloat16), "cuda")
    operators.group_norm(x, weight, bias, 8, EPS, True, x.dtype)  # what compiling takes is not counted
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y, mean, rstd = operators.group_norm(x, weight, bias, 8, EPS, True, x.dtype)
    grad_x, *_ = operators.group_norm_backward(grad, x, Norm(mean, rstd, weight, bias, True))
    assert y.nbytes == grad_x.nbytes == x.nbytes
    assert torch.cuda.max_memory_allocated() - before < 2.02 * x.nbytes


def test_volumes_beyond_32_bits(kernels):
    free, _ = torch.cuda.mem_get_info()
    shape = (1, 3, 900, 900, 900)  # 2.2e9 values, the last channel beyond 2^31
    if free < 2.5 * 2 * 3 * 900**3:
        pytest.skip("needs 11 GB of free GPU memory")
    x = torch.zeros(shape, dtype=torch.float16, device="cuda")
    x[:, 2, -1] = torch.randn(900, 900, device="cuda")
    mean, rstd = operators.statistics(x, 3, EPS)
    exact = x[:, 2, -1].double().square().sum() / 900**3 - (x[:, 2, -1].double().sum() / 900**3).square()
    torch.testing.assert_close(rstd[0, 2].double(), (exact + EPS).rsqrt(), rtol=1e-5, atol=0)
    one, zero = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    y = operators.normalise(x, Norm(mean, rstd, one, zero, False), x.dtype)
    expected = (x[:, 2, -1].float() - mean[0, 2]) * rstd[0, 2]
    torch.testing.assert_close(y[:, 2, -1].float(), expected, rtol=2**-10, atol=1e-6)
