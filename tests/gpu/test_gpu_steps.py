"""Training steps on the GPU: nothing waits, copies on a second stream arrive in time, and float16 skips overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memory.predict.step import build_step
from settings import Settings, TrainingError
from tests.models.gradients import small_work_counts

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"mixed_precision": False},
    "bfloat16": {"mixed_precision": True, "amp_dtype": "bfloat16"},
    "float16": {"mixed_precision": True, "amp_dtype": "float16"},
}


def step_of(values: dict[str, Any], stage: Any, precision: str = "float32", **training: Any) -> Any:
    values["device"] = {"type": "cuda", **PRECISIONS[precision]}
    values[stage]["training"].update(training)
    values["autoencoder"]["training"]["adversarial_start_step"] = 0
    return build_step(Settings.model_validate(values), stage, CUDA)


def batches_of(step: Any) -> list[Any]:
    """Return pinned micro-batches of noise."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(2):
        batch = step.example_batch(step.training.batch_size)
        for value in vars(batch).values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.uniform_(0, 1, generator=generator)
        batches.append(batch.pin_memory())
    return batches


def weights_of(step: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in step.network.parameters()]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", ["autoencoder", "ldm"])
def test_the_host_never_waits_in_a_step(tiny_values, stage, precision):
    step = step_of(tiny_values, stage, precision, ema_decay=0.9)
    batches = batches_of(step)
    for batch in batches:
        assert all(value.is_pinned() for value in vars(batch).values() if isinstance(value, torch.Tensor))
    for number in range(2):
        step(batches, number)
    torch.cuda.set_sync_debug_mode("error")
    try:
        terms = step(batches, 2)
        with pytest.raises(RuntimeError, match="synchronizing"):
            next(iter(terms.values())).item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.guard.raise_if_bad()


def gradients(step: Any, number: int) -> dict[str, torch.Tensor]:
    step.backward(batches_of(step), number)
    found = {name: parameter.grad for name, parameter in step.network.named_parameters()}
    copies = {name: gradient.clone() for name, gradient in found.items() if gradient is not None}
    for network in step.networks.values():
        network.zero_grad()
    return copies


@pytest.mark.parametrize("stage", ["autoencoder", "ldm"])
def test_offloaded_activations_come_back_unchanged(tiny_values, stage, exact_arithmetic):
    # Large enough for copies to take a while, and repeated, because a race is not lost every time.
    tiny_values["data"]["voxel_size"] = [64, 64, 64]
    kept = step_of(tiny_values, stage, use_gradient_checkpointing=True)
    moved = step_of(tiny_values, stage, use_gradient_checkpointing=True, use_gradient_checkpointing_offload=True)
    moved.network.load_state_dict(kept.network.state_dict())
    exact_arithmetic()
    with small_work_counts():
        for number in range(4):
            expected, found = gradients(kept, number), gradients(moved, number)
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-9, name


@pytest.mark.parametrize("stage", ["autoencoder", "ldm"])
def test_an_overflow_in_float16_skips_the_update_and_lowers_the_scale(tiny_values, stage):
    step = step_of(tiny_values, stage, "float16")
    batches = batches_of(step)
    step(batches, 0)

    before = weights_of(step)
    step.precision.load_state_dict(step.precision.state_dict() | {"scale": 2.0**40})
    step(batches, 1)
    step.guard.raise_if_bad()
    assert step.precision.scaler.get_scale() == 2.0**39
    assert all(map(torch.equal, before, weights_of(step)))
    step.precision.load_state_dict(step.precision.state_dict() | {"scale": 256.0})
    step(batches, 2)
    step.guard.raise_if_bad()
    assert not all(map(torch.equal, before, weights_of(step)))


def test_a_value_that_is_not_finite_is_found_and_no_weight_moves(tiny_values):
    step = step_of(tiny_values, "autoencoder")
    batches = batches_of(step)
    before = weights_of(step)
    batches[1].image[0, 0, 0, 0, 0] = torch.nan
    step(batches, 0)
    with pytest.raises(TrainingError, match="is not finite"):
        step.guard.raise_if_bad()
    assert all(map(torch.equal, before, weights_of(step)))
