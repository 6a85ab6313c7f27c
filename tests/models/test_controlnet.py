"""ControlNet: with MONAI's weights it computes what MONAI's ControlNet and U-Net compute, and only it is trained."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import build_unet
from models.controlnet import PREFIX, ControlledUNet, binary_code, parts_of
from models.exchange import check_fit, find_state, stock_network, to_our_names
from settings import Settings, validate
from tests.models.test_exchange import SOMEWHERE

GRID = (6, 10, 14)
"""Halved, it is odd along each axis."""


def settings_with(scan: dict[str, Any] | None = None, **unet: Any) -> Settings:
    values: dict[str, Any] = {
        "data": {"voxel_size": [2 * n for n in GRID]},
        "autoencoder": {
            "num_channels": [8, 16],
            "attention_levels": [False, False],
            "training": {"discriminator": {"num_layers_d": 2}},
        },
        "ldm": {
            "pretrained": "ldm.safetensors",
            "unet": {
                "use_mean_map": False,
                "num_channels": [8, 16],
                "num_res_blocks": [2, 1],
                "attention_levels": [False, True],
                "num_head_channels": 8,
                "norm_num_groups": 4,
                **unet,
            },
            "conditioning": {
                "label_map": {"source": "labels", "num_classes": 5, "controlnet": [4, 8]},
                **({"scan": scan} if scan else {"type": "class", "num_classes": 2}),
            },
        },
    }
    return validate(values)


def lively_weights(network: nn.Module) -> nn.Module:
    """Every parameter random: at zero, where ControlNets start, a mistake would hide."""
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.15)
    return network


def inputs(settings: Settings, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    found = {
        "x": torch.randn(3, 3, *GRID, generator=draw).to(dtype),
        "timesteps": torch.tensor([3, 700, 40]),
        "class_labels": torch.tensor([0, 2, 1]),
        "control": torch.randint(0, 5, (3, 1, *(2 * n for n in GRID)), generator=draw).to(dtype),
    }
    width = settings.ldm.conditioning.scan.width
    return {**found, "scan": torch.rand(3, width, generator=draw).to(dtype)} if width else found


def ours(settings: Settings) -> ControlledUNet:
    torch.manual_seed(0)
    network = build_unet(settings.ldm, 3, settings.mean_map_shape)
    assert isinstance(network, ControlledUNet)
    return network


def theirs(settings: Settings) -> dict[str, nn.Module]:
    torch.manual_seed(5)
    networks = {name: lively_weights(stock_network(name, settings)).eval() for name in ("ldm", "controlnet")}
    networks["ldm"].requires_grad_(False)
    return networks


def called(networks: dict[str, nn.Module], given: dict[str, Tensor]) -> Tensor:
    """What MONAI's networks predict, called as MAISI's training calls them."""
    control, scan = given.pop("control"), given.pop("scan", None)
    bits = torch.stack([(control[:, 0].long() >> bit) & 1 for bit in range(8)], dim=1).to(control.dtype)
    down, middle = networks["controlnet"](**given, controlnet_cond=bits)
    options = {} if scan is None else {"spacing_tensor": scan}
    corrections = {"down_block_additional_residuals": tuple(down), "mid_block_additional_residual": middle}
    return networks["ldm"](**given, **options, **corrections)


@pytest.mark.parametrize(("checkpointed", "dtype"), [(False, torch.float32), (True, torch.float64)])
@pytest.mark.parametrize(
    ("scan", "unet"), [(None, {}), (None, {"resblock_updown": True}), ({"modality": 1}, {"resblock_updown": True})]
)
def test_outputs_and_gradients_are_those_of_monais_controlnet_and_unet(scan, unet, checkpointed, dtype):
    settings = settings_with(scan, **unet)
    stock, network, origin = theirs(settings), ours(settings), "maisi" if scan else "monai"
    assert [type(one).__name__.endswith("Maisi") for one in stock.values()] == [bool(scan)] * 2
    weights: dict[str, Tensor] = {}
    for name, one in stock.items():
        found, state = find_state({"epoch": 3, f"{name}_state_dict": one.state_dict()}, SOMEWHERE)
        assert found == name
        state = to_our_names(state, origin, SOMEWHERE)
        check_fit(name, state, settings, origin, SOMEWHERE)
        weights |= {(PREFIX if name == "controlnet" else "") + key: value for key, value in state.items()}
    network.load_state_dict(weights, strict=True)
    if checkpointed:
        network.gradient_checkpointing_enable()
    network.to(dtype)
    for one in stock.values():
        one.to(dtype)
    expected, found = called(stock, inputs(settings, dtype)), network.train()(**inputs(settings, dtype))
    assert expected.std() > 1e-2
    rounding = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)
    for output in (expected, found):
        output.square().mean().backward()
    gradients = {key: parameter.grad for key, parameter in stock["controlnet"].named_parameters()}
    # Some, such as those of the biases of keys, are zero but for rounding.
    largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
    assert {key for key, _ in network.controlnet.named_parameters()} == gradients.keys()
    for key, parameter in network.controlnet.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key], rtol=10 * rounding, atol=rounding * largest, msg=key)
    frozen = [parameter for key, parameter in network.named_parameters() if not key.startswith(PREFIX)]
    assert frozen
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in frozen)


@pytest.mark.parametrize(("scan", "has_mean_map"), [(None, True), ({"modality": 1}, False)])
def test_a_new_controlnet_copies_the_encoder_and_changes_nothing(scan, has_mean_map):
    settings = settings_with(scan, use_mean_map=has_mean_map)
    alone = settings.with_overrides({"ldm.conditioning.label_map": {}})
    torch.manual_seed(3)
    unet = lively_weights(build_unet(alone.ldm, 3, alone.mean_map_shape))
    network = ours(settings)
    network.load_state_dict(network.with_controlnet(unet.state_dict()), strict=True)
    given = inputs(settings)
    with torch.no_grad():
        assert torch.equal(
            network(**given), unet(**{name: value for name, value in given.items() if name != "control"})
        )
    state = unet.state_dict()
    for key, value in network.controlnet.state_dict().items():
        if key in state and not key.endswith("time_emb_proj.weight"):
            assert torch.equal(value, state[key]), key
    lively_weights(network.controlnet)
    # What was trained is kept.
    assert network.with_controlnet(network.state_dict()).keys() == network.state_dict().keys()
    parts = parts_of(network.state_dict())
    assert parts["ldm"].keys() == state.keys()
    assert set(parts["controlnet"]) == set(stock_network("controlnet", settings).state_dict())
    # A sample whose label map is hidden gets what the U-Net alone predicts, the other one does not.
    given["control"][0] = -1
    with torch.no_grad():
        found, expected = network(**given), unet(**{k: v for k, v in given.items() if k != "control"})
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert (found[1] - expected[1]).abs().max() > 1e-3


def test_label_values_become_their_bits():
    values = torch.tensor([0.0, 1, 6, 255, -1]).view(1, 1, 5, 1, 1)
    assert binary_code(values)[0, :, :, 0, 0].T.tolist() == [
        [0.0] * 8, [1.0] + [0.0] * 7, [0.0, 1, 1] + [0.0] * 5, [1.0] * 8, [0.0] * 8
    ]  # fmt: skip


def test_a_latent_that_was_padded_takes_its_label_map_unpadded():
    settings = settings_with()
    network, given = lively_weights(ours(settings)), inputs(settings)
    given["control"] = given["control"][:, :, :-4]
    padded = {**given, "x": torch.nn.functional.pad(given["x"][:, :, :-2], (0, 0, 0, 0, 0, 2))}
    with torch.no_grad():
        assert network(**padded).shape == given["x"].shape
