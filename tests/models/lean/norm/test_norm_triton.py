"""The Triton kernels, without a GPU: what they compute through Triton's interpreter, and that they compile for GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.lean.norm.norm_cases import all_cases

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]  # noqa: E402
from triton.compiler import ASTSource  # type: ignore[import-untyped]  # noqa: E402

from models.lean.norm import triton_kernels, triton_launch  # noqa: E402
from models.lean.norm.torch_kernels import Norm  # noqa: E402

ROOT = Path(__file__).resolve().parents[4]

# Half a step of the dtype for rounding to nearest; a whole one for bf16, which the interpreter (not a GPU) cuts off.
ROUNDING = {torch.float32: 4e-7, torch.bfloat16: 2**-7, torch.float16: 2**-11}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = Path(__file__).with_name("interpreted_norm.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("interpreted"))],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_kernels_compute_what_double_precision_does(interpreted, case):
    found = interpreted[str(case)]
    # With a mean of 1000 and a spread of 1, fp32 knows a mean to 3e-5 of the spread.
    exact, rounded = (1e-4, 5e-5) if case.wild else (3e-6, ROUNDING[case.dtype])
    assert found["halo"] == 0
    assert found["rstd"] < (1e-5 if case.wild else 3e-7)
    assert found["mean"] < 1e-7
    assert found["sums"] < exact
    assert found["stored"] == 0
    for name in ("y", "grad_x", "grad_x added in place", "kept"):
        assert found[name] <= rounded, name


@pytest.mark.parametrize("case", all_cases(), ids=str)
@pytest.mark.parametrize("size", ["small", "large", "huge"])
def test_norms_of_whole_volumes_compute_what_double_precision_does(interpreted, size, case):
    found = interpreted[f"{size} {case}"]
    exact, rounded = (1e-4, 5e-5) if case.wild else (3e-6, ROUNDING[case.dtype])
    assert found["rstd"] < (1e-5 if case.wild else 3e-7)
    assert found["mean"] < 1e-7
    assert found["sums"] < exact
    assert max(found["y"], found["grad_x"]) <= rounded


def test_kernels_reach_beyond_32_bits(interpreted):
    assert interpreted["beyond 32 bits"]["y"] == 0


def test_moments_of_many_tiles_do_not_cancel(interpreted):
    assert interpreted["real tiles"]["rstd"] < 5e-7
    assert interpreted["real tiles"]["sums"] < 1e-4


def compiled(kernel, capability, dtype, ones=(), others=(), **constants):
    """Compile a kernel as its launch would: arguments that are 1 are constants, all but `others` divisible by 16."""
    signature, known, attributes = {}, {}, {}
    for number, name in enumerate(kernel.arg_names):
        constants |= {name: 1} if name in ones else {}
        if name in constants:
            signature[name], known[name] = "constexpr", constants[name]
            continue
        of_volume = name in ("x_ptr", "grad_ptr", "plus_ptr", "out_ptr")
        pointer = f"*{dtype}" if of_volume else "*fp32"
        signature[name] = pointer if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"
        if name != "eps" and name not in others:
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, known, attributes)
    return triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": triton_launch.NUM_WARPS})


KERNELS = [
    triton_kernels.moments_kernel,
    triton_kernels.spans_kernel,
    triton_kernels.combine_kernel,
    triton_kernels.normalise_kernel,
    triton_kernels.sums_kernel,
    triton_kernels.input_grad_kernel,
    triton_kernels.group_norm_kernel,
    triton_kernels.group_norm_backward_kernel,
    triton_kernels.group_means_kernel,
    triton_kernels.total_kernel,
]
TARGETS = [(75, "fp16"), (75, "bf16"), (80, "fp32"), (89, "bf16"), (90, "bf16")]
DENSE_VOXELS = ("x_v", "out_v", "grad_v", "plus_v")
DENSE_CHANNELS = ("x_c", "out_c", "grad_c", "plus_c")
ONE_OF_EACH = ("channels", "groups", "voxels", "out_voxels", "num_chunks", "batch", "plane", "size", "num_spans")


def constants_of(kernel, block_c, block_v):
    values = {
        "block_c": block_c,
        "block_v": block_v,
        "multiple": 1,
        "silu": True,
        "has_plus": True,
        "has_out": True,
        "before_silu": False,
        "block": 2048,
    }
    constants = {name: values[name] for name in kernel.arg_names if name in values}
    if kernel in (triton_kernels.spans_kernel, triton_kernels.combine_kernel):
        del constants["block_v"]
    return constants


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("capability", "dtype"), TARGETS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_kernels_compile_for_every_gpu_since_turing(kernel, capability, dtype):
    constants = constants_of(kernel, 1, triton_launch.TILE_VALUES)
    ones = [name for name in DENSE_VOXELS if name in kernel.arg_names]
    binary = compiled(kernel, capability, dtype, ones, **constants)
    assert binary.asm["cubin"]
    ptx = binary.asm["ptx"]
    if "x_ptr" in kernel.arg_names:
        assert "ld.global.v4.b32" in ptx, "rows of voxels are read 16 bytes at a time"
    # The others store copies of what they read, which need no rounding.
    computes_volume = kernel in (triton_kernels.normalise_kernel, *KERNELS[5:8])
    if computes_volume and capability >= 80 and dtype == "bf16":
        assert "cvt.rn.bf16" in ptx, "results are rounded to nearest"


@pytest.mark.parametrize("kernel", [KERNELS[0], *KERNELS[3:6]], ids=lambda kernel: kernel.__name__)
def test_kernels_read_channels_last_16_bytes_at_a_time(kernel):
    ones = [name for name in DENSE_CHANNELS if name in kernel.arg_names]
    not_of_16 = ["channels", *DENSE_VOXELS, *(name.replace("_v", "_b") for name in DENSE_VOXELS)]
    # 64 channels, 24 with what the launch knows of them, and 24 without.
    for block_c, multiple, others, is_wide in ((64, 1, (), True), (32, 8, not_of_16, True), (32, 1, not_of_16, False)):
        constants = constants_of(kernel, block_c, 64) | {"multiple": multiple}
        ptx = compiled(kernel, 80, "bf16", ones, others, **constants).asm["ptx"]
        assert ("ld.global.v4.b32" in ptx) == is_wide, (block_c, multiple)


def test_a_norm_of_another_device_and_an_empty_batch_are_refused_before_a_launch():
    x, weight = torch.zeros(1, 4, 2, 2, 2), torch.zeros(4)
    with pytest.raises(AssertionError, match="the norm's weight is on meta, its input on cpu"):
        triton_launch.group_norm(x, x, weight.to("meta"), weight, 2, 1e-5, False)
    with pytest.raises(AssertionError, match=r"\(0, 4, 2, 2, 2\) has no values"):
        triton_launch.group_norm(x[:0], x[:0], weight, weight, 2, 1e-5, False)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_kernels_compile_where_every_size_is_one(kernel):
    # Triton turns arguments that are 1 into plain numbers, which lack what its own integers can do.
    ones = [name for name in (*ONE_OF_EACH, *DENSE_VOXELS) if name in kernel.arg_names]
    assert compiled(kernel, 80, "fp16", ones, **constants_of(kernel, 1, 1)).asm["cubin"]


def strides(x):
    return triton_launch.strides(x.shape, x.stride())


def test_uneven_voxels_are_copied_when_read_and_refused_when_written():
    even = torch.zeros(2, 3, 4, 5, 6)
    assert strides(even[:, :, 1:3]) == (360, 120, 1)
    assert strides(even.to(memory_format=torch.channels_last_3d)[:, :, 1:]) == (360, 1, 3)
    assert strides(torch.zeros(1, 1, 1, 1, 1).expand(2, 3, 4, 5, 6)) == (0, 0, 0)
    for uneven in (even[..., 1:], even[:, :, :, 1:], even.transpose(2, 4), even[:, :, ::2]):
        assert strides(uneven) is None
        assert triton_launch._readable(uneven).is_contiguous()
        zero = torch.zeros(1, 1)
        with pytest.raises(AssertionError, match="voxels must be evenly spaced"):
            triton_launch.normalise(uneven, uneven.contiguous(), Norm(zero, zero, zero, zero, False), 0)
