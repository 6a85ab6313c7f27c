"""Stage 1 with a quantised latent: one codebook update per step, however it is divided, resumed to the bit."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from models.bottleneck import CodeStatistics, VectorQuantiser
from settings import CheckpointError
from tests.finished_run import export_autoencoder, run_here, train_ldm
from tests.training.steps import CPU, assert_same_gradients, autoencoder_step, gradients, make_batches
from training.autoencoder_step import AutoencoderStep
from training.validation.stages import validate_autoencoder


@pytest.fixture
def quantised(tiny_values) -> dict[str, Any]:
    """A config whose latents are codes."""
    tiny_values["autoencoder"] |= {"bottleneck": "vq", "codebook_size": 16}
    return tiny_values


def step_of(values: dict[str, Any], **training: Any) -> AutoencoderStep:
    return autoencoder_step(values, adversarial_weight=0.0, **training)


def codebook_of(step: AutoencoderStep) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in step.autoencoder.state_dict().items() if name.startswith("quantiser.")}


def test_batch_4_once_equals_batch_1_four_times(quantised):
    found = []
    for batch_size in (4, 1):
        step = step_of(quantised, batch_size=batch_size, gradient_accumulation_steps=4 // batch_size)
        terms = step.backward(make_batches(step, batch_size), 5)
        found.append((gradients(step), terms | step.update(5), codebook_of(step)))
    (whole, terms, codebook), (parted, same_terms, same_codebook) = found
    assert_same_gradients(whole, parted, 1e-5)
    assert "commitment" in terms
    torch.testing.assert_close(same_terms, terms, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(same_codebook, codebook, rtol=1e-5, atol=1e-6)
    assert len(codebook) == 3


def test_the_codebook_moves_once_per_step_also_with_recomputation(quantised):
    step = step_of(quantised, use_gradient_checkpointing=True)
    assert step.autoencoder.quantiser is not None
    step.autoencoder.quantiser.restart_below = 0.0
    for number in range(2):
        step(make_batches(step, 2), number)
    total = float(codebook_of(step)["quantiser.ema_sizes"].sum())
    # Averages that began at zero, of the 512 positions of 4 volumes.
    assert total == pytest.approx((0.01 + 0.0099) * 4 * 512, rel=1e-5)


def test_a_resumed_run_continues_to_the_bit(quantised):
    def train(step: AutoencoderStep, numbers: range) -> None:
        for number in numbers:
            step(make_batches(step, 2), number)

    whole = step_of(quantised, ema_decay=0.9)
    train(whole, range(2))
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    train(whole, range(2, 4))
    file.seek(0)
    resumed = step_of(quantised, ema_decay=0.9)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(resumed, range(2, 4))
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def giving(totals: list[Any]) -> Any:
    """Stand for a sum over processes: give out what was added up before."""
    left = iter(totals)
    return lambda values: values.copy_(next(left))


def test_two_processes_learn_the_codebook_of_one_that_accumulates_twice_as_much():
    def draw(positions, number: int) -> torch.Tensor:
        return torch.stack([torch.rand(number, generator=torch.Generator().manual_seed(p)) for p in positions])

    torch.manual_seed(0)
    alone = VectorQuantiser(16, 3, 0.9, 0.1)
    pair = [copy.deepcopy(alone) for _ in range(2)]
    latents = torch.randn(4, 3, 4, 4, 4)
    single = CodeStatistics(alone, 4, CPU.device, draw)
    ranks = [CodeStatistics(quantiser, 4, CPU.device, draw) for quantiser in pair]
    for position, latent in enumerate(latents.split(1)):
        single.add(latent, alone.codes(latent), [position])
        ranks[position % 2].add(latent, alone.codes(latent), [position])
    sums = [[getattr(rank, name).clone() for rank in ranks] for name in ("sizes", "sums", "candidates")]
    expected = single.finish(lambda values: values, torch.zeros(()))
    for quantiser, rank in zip(pair, ranks, strict=True):
        use = rank.finish(giving([sum(parts) for parts in sums]), torch.zeros(()))
        torch.testing.assert_close(use, expected)
        torch.testing.assert_close(quantiser.state_dict(), alone.state_dict(), rtol=1e-6, atol=1e-6)


def test_a_step_that_is_not_finite_and_fine_tuning_of_the_decoder_leave_the_codebook_alone(quantised):
    step = step_of(quantised)
    step(make_batches(step, 2), 0)
    before = codebook_of(step)
    batches = make_batches(step, 2)
    batches[1].image[0, 0, 3, 3, 3] = float("nan")
    step(batches, 1)
    torch.testing.assert_close(codebook_of(step), before, rtol=0, atol=0)
    quantised["autoencoder"]["pretrained"] = "given.safetensors"
    step = step_of(quantised, trainable="decoder")
    before = codebook_of(step)
    metrics = step(make_batches(step, 2), 0)
    torch.testing.assert_close(codebook_of(step), before, rtol=0, atol=0)
    assert "commitment" not in metrics
    assert 0 < float(metrics["codebook_use"]) <= 1


def test_held_out_volumes_tell_how_codes_are_used(quantised):
    step = step_of(quantised)
    metrics, _ = validate_autoencoder(step, make_batches(step, 1, total=2))
    assert {"val_psnr", "val_codebook_use", "val_perplexity"} <= metrics.keys()
    assert 1 <= metrics["val_perplexity"] <= 16
    quantised["autoencoder"]["bottleneck"] = "kl"
    assert "val_perplexity" not in validate_autoencoder(step_of(quantised), make_batches(step, 1, total=1))[0]


def test_stage_two_trains_before_quantisation_and_samples_through_it(quantised, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quantised["ldm"]["training"].update(max_steps=1, pixel_loss={"weight": 0.1})
    Path("tiny.yaml").write_text(yaml.safe_dump(quantised))
    export_autoencoder(quantised)
    assert train_ldm(Path("tiny.yaml")) == 0
    assert run_here("scripts/sample.py", "--run", "runs/tiny", "--num", "1", "--steps", "1", "--out", "drawn") == 0
    export = ["--weights", "runs/tiny/autoencoder.safetensors", "--out", "out.pt"]
    assert run_here("scripts/export_checkpoint.py", *export) == 2
    with pytest.raises(CheckpointError, match=r'autoencoder\.bottleneck: "vq" -> "kl"'):
        train_ldm(Path("tiny.yaml"), "name=other", "autoencoder.bottleneck=kl", f"ldm.autoencoder={export[1]}")


def test_the_commitment_term_counts_by_its_weight(quantised):
    found = []
    for weight in (0.0, 0.25, 1.0):
        step = step_of(quantised)
        step.weights["commitment"] = weight
        step.backward(make_batches(step, 2), 0)
        found.append(gradients(step)["autoencoder.quant_conv_mu.conv.weight"])
    without, quarter, whole = found
    assert (whole - without).norm() > 1e-3 * without.norm()
    torch.testing.assert_close(4 * (quarter - without), whole - without, rtol=1e-3, atol=1e-5)
