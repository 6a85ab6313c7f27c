"""Fine-tuning the decoder alone: the encoder stays as it is, costs nothing in backward, and stage 2 stays valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from memory.predict.step import tracked_step
from models.frozen_autoencoder import latents_digest, weights_digest
from models.stock import ENCODER_PARTS
from models.weight_files import load_weights, save_weights
from settings import CheckpointError
from tests.finished_run import export_autoencoder, run_here, train_ldm
from tests.training.steps import autoencoder_step, gradients, ldm_step, make_batches
from training.autoencoder_step import AutoencoderStep


def step_of(values: dict[str, Any], trainable: str = "decoder", **training: Any) -> AutoencoderStep:
    values["autoencoder"]["pretrained"] = "given.safetensors"
    return autoencoder_step(values, trainable=trainable, adversarial_weight=0.0, **training)


@pytest.mark.parametrize("implementation", ["lean", "monai"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_decoder_gets_the_gradients_of_joint_training_and_the_encoder_none(
    tiny_values, implementation, checkpointed
):
    tiny_values["autoencoder"]["implementation"] = implementation
    found = []
    for trainable in ("all", "decoder"):
        step = step_of(tiny_values, trainable, kl_weight=0.0, use_gradient_checkpointing=checkpointed)
        terms = step.backward(make_batches(step, 2), 0)
        found.append((gradients(step), terms["reconstruction"]))
        assert ("kl" in terms) == (trainable == "all")
    (joint, loss), (alone, same_loss) = found
    assert loss == same_loss
    is_of_encoder = {name: name.removeprefix("autoencoder.").startswith(ENCODER_PARTS) for name in joint}
    assert alone.keys() == {name for name in joint if not is_of_encoder[name]}
    for name, gradient in alone.items():
        torch.testing.assert_close(gradient, joint[name], rtol=0, atol=0)


def test_the_encoder_keeps_its_weights_and_has_no_optimizer_state_and_no_average(tiny_values):
    step = step_of(tiny_values, ema_decay=0.9)
    before = {name: tensor.clone() for name, tensor in step.autoencoder.state_dict().items()}
    for number in range(2):
        step(make_batches(step, 2), number)
    changed = {name for name, tensor in step.autoencoder.state_dict().items() if not torch.equal(tensor, before[name])}
    decoder = {name for name in before if not name.startswith(ENCODER_PARTS)}
    assert changed == decoder
    assert sum(len(optimizer.state) for optimizer in step.updaters["autoencoder"].optimizers) == len(decoder)
    assert step.average is not None
    assert set(step.average.names) == decoder


def test_the_predicted_step_holds_no_activation_of_the_encoder(tiny_values):
    def kept(trainable: str) -> tuple[int, int]:
        with tracked_step(step_of(tiny_values, trainable).settings, "autoencoder") as (_, tracker):
            pass
        of_encoder = [a.nbytes for a in tracker.alive_at_peak() if a.module.startswith("autoencoder.encoder")]
        return sum(of_encoder), tracker.peak["device"]

    (activations, peak), (joint_activations, joint_peak) = kept("decoder"), kept("all")
    assert activations == 0 < joint_activations
    assert peak < joint_peak - 0.5 * joint_activations


def test_the_digest_of_latents_follows_every_weight_of_the_encoder_only(tiny_values):
    network = step_of(tiny_values).autoencoder
    digest, of_all = latents_digest(network), weights_digest(network)
    for name, parameter in network.named_parameters():
        with torch.no_grad():
            before = parameter.clone()
            parameter[(-1,) * parameter.dim()] += 1e-3
            assert (latents_digest(network) != digest) == name.startswith(ENCODER_PARTS), name
            assert weights_digest(network) != of_all, name
            parameter.copy_(before)


def test_stage_two_accepts_a_fine_tuned_decoder_elsewhere_and_needs_no_new_latents(
    tiny_values, tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    config = Path("tiny.yaml")
    config.write_text(yaml.safe_dump(tiny_values))
    export_autoencoder(tiny_values)
    assert train_ldm(config, "ldm.training.max_steps=1") == 0
    caplog.set_level("INFO")
    own, fine_tuned = Path("runs/tiny/autoencoder.safetensors"), tmp_path / "fine_tuned.safetensors"
    state, metadata = load_weights(own)
    changed = {name: tensor + 1e-2 * (not name.startswith(ENCODER_PARTS)) for name, tensor in state.items()}
    save_weights(fine_tuned, changed, metadata)
    own.unlink()
    assert train_ldm(config, "ldm.training.max_steps=2", f"ldm.autoencoder={fine_tuned}") == 0
    assert "latents: 6 of 6 found" in caplog.text
    assert "resuming ldm after step 1" in caplog.text
    assert run_here("scripts/sample.py", "--run", "runs/tiny", "--num", "1", "--steps", "1", "--out", "drawn") == 0


def test_a_run_with_pixel_loss_is_not_resumed_with_another_decoder(tiny_values):
    step = ldm_step(tiny_values, training={"pixel_loss": {"weight": 1.0}})
    state = step.state_dict()
    assert state["autoencoder"] == weights_digest(step.autoencoder)
    step.load_state_dict(state)
    with torch.no_grad():
        step.autoencoder.post_quant_conv.conv.bias += 1e-3
    with pytest.raises(CheckpointError, match="autoencoder with other weights"):
        step.load_state_dict(state)
