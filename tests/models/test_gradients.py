"""Every memory knob leaves results and gradients those of MONAI's stock autoencoder."""

import itertools

import pytest
import torch

from memory.cuda_autocast import cuda_autocast_rules
from models import slabs
from tests.models.autoencoders import pair, run, settings_of, truth

KNOBS = {
    "plain": {},
    "checkpointing": {"use_gradient_checkpointing": True},
    "one level": {"use_gradient_checkpointing": True, "checkpoint_levels": 1},
    "nested": {"use_gradient_checkpointing": True, "use_nested_checkpointing": True},
    "offload": {"use_gradient_checkpointing_offload": True},
    "nested offload": {"use_gradient_checkpointing_offload": True, "use_nested_checkpointing": True},
    "slabs": {"slab_rows": 4},
    "thinnest slabs": {"slab_rows": 2, "use_gradient_checkpointing": True},
    "slabs larger than the volume": {"slab_rows": 64, "use_gradient_checkpointing": True},
    "slabs and offload": {"slab_rows": 6, "use_gradient_checkpointing_offload": True},
    "slabs, nested, offload": {
        "slab_rows": 4,
        "use_gradient_checkpointing_offload": True,
        "use_nested_checkpointing": True,
    },
}


@pytest.fixture(autouse=True)
def _small_work_counts(monkeypatch):
    """Let tests' small volumes be cut into slabs and copied to the host like large ones."""
    monkeypatch.setattr(slabs, "MIN_SLAB_VALUES", 0)
    monkeypatch.setattr("models.checkpointing.MIN_OFFLOAD_BYTES", 0)


def inputs(shape, dtype=torch.float64, latent_channels=3):
    torch.manual_seed(1)
    latent = [(size - 2) // 2 + 1 for size in shape[2:]]
    latent = [(size - 2) // 2 + 1 for size in latent]
    return torch.randn(shape, dtype=dtype), torch.randn(shape[0], latent_channels, *latent, dtype=dtype)


@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS.keys())
@pytest.mark.parametrize("shape", [(1, 1, 20, 12, 8), (2, 1, 12, 8, 20)], ids=str)
def test_double_precision_gradients_equal_stock(knobs, shape):
    stock, lean = pair(settings_of(knobs))
    x, noise = inputs(shape)
    assert run(lean, x, noise).distance(run(stock, x, noise)) < 1e-12


def test_slabs_may_have_any_number_of_rows():
    stock, lean = pair(settings_of())
    x, noise = inputs((1, 1, 12, 8, 8))
    expected = run(stock, x, noise)
    for rows in (3, 5, 7):
        lean.set_slab_rows(rows)
        assert run(lean, x, noise).distance(expected) < 1e-12


@pytest.mark.parametrize("shape", [(1, 1, 13, 9, 10), (3, 1, 7, 11, 6)], ids=str)
@pytest.mark.parametrize("rows", [0, 2, 4])
def test_encoder_gradients_equal_stock_on_grids_that_no_level_divides(shape, rows):
    stock, lean = pair(settings_of({"slab_rows": rows}))
    x, _ = inputs(shape)
    grads = []
    for model in (stock, lean):
        leaf = x.clone().requires_grad_()
        mean, sigma = model.encode(leaf)
        (mean.square().sum() + sigma.sum()).backward()
        grads.append([leaf.grad, *(p.grad for n, p in model.encoder.named_parameters() if "to_k.bias" not in n)])
    for expected, found in zip(*grads, strict=True):
        assert float((expected - found).norm() / expected.norm()) < 1e-12


@pytest.mark.parametrize(
    "network",
    [
        {"attention_levels": [False, True, True], "num_res_blocks": 2},
        {"attention_levels": [False, False, False], "num_res_blocks": [0, 1, 2], "latent_channels": 2},
        {"num_channels": [12, 12], "attention_levels": [True, False], "num_res_blocks": [2, 0], "norm_num_groups": 3},
        {"in_channels": 2, "num_channels": [8], "attention_levels": [False]},
        {"use_nonlocal_attention": False, "num_channels": [16, 8, 16]},
    ],
    ids=["two attention levels", "no blocks on the first level", "no blocks on the last", "one level", "no middle"],
)
def test_gradients_equal_stock_for_other_networks(network):
    settings = settings_of({"slab_rows": 4, "use_gradient_checkpointing": True}, **network)
    stock, lean = pair(settings)
    x = torch.randn(1, settings.in_channels, 12, 8, 8, dtype=torch.float64)
    noise = torch.randn_like(stock.encode(x)[0])
    assert run(lean, x, noise).distance(run(stock, x, noise)) < 1e-12


@pytest.mark.parametrize("rows", [0, 4])
def test_single_precision_is_as_close_to_the_truth_as_stock(rows):
    stock, lean = pair(settings_of({"slab_rows": rows, "use_gradient_checkpointing": True}), torch.float32)
    x, noise = inputs((1, 1, 20, 12, 8), torch.float32)
    expected = truth(stock, x, noise)
    assert run(lean, x, noise).total_distance(expected) <= 2 * run(stock, x, noise).total_distance(expected)
    assert run(lean, x, noise).distance(expected) <= 2 * run(stock, x, noise).distance(expected)


@pytest.mark.parametrize(("rows", "dtype"), list(itertools.product([0, 4], [torch.bfloat16, torch.float16])))
def test_low_precision_is_as_close_to_the_truth_as_stock(rows, dtype):
    stock, lean = pair(settings_of({"slab_rows": rows, "use_gradient_checkpointing": True}), torch.float32)
    x, noise = inputs((1, 1, 20, 12, 8), torch.float32)
    expected = truth(stock, x, noise)
    # CPU autocast would run stock's norms in low precision: a GPU does not, and that is the stock to compare with.
    with cuda_autocast_rules():
        ours, theirs = run(lean, x, noise, dtype), run(stock, x, noise, dtype)
    assert ours.total_distance(expected) <= 1.5 * theirs.total_distance(expected)


def test_knobs_that_only_recompute_change_no_bit():
    _, plain = pair(settings_of(), torch.float32)
    x, noise = inputs((1, 1, 12, 8, 8), torch.float32)
    expected = run(plain, x, noise)
    for options in ({}, {"offload": True}, {"nested": True}, {"levels": 2}):
        plain.gradient_checkpointing_enable(**options)
        found = run(plain, x, noise)
        for name, gradient in expected.gradients.items():
            assert torch.equal(found.gradients[name], gradient), (options, name)
