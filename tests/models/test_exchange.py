"""Weights from and for other libraries, and files of weights."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.networks.nets import AutoencoderKL, DiffusionModelUNet, PatchDiscriminator
from safetensors.torch import save_file

from models import build_autoencoder, build_discriminator, build_unet
from models.exchange import (
    check_fit,
    expected_state,
    find_state,
    monai_arguments,
    read_foreign_weights,
    stock_network,
    to_our_names,
)
from models.weight_files import load_weights, read_tensors, save_weights
from settings import CheckpointError, Settings, validate
from tests.privileges import without_privileges

SOMEWHERE = Path("weights.pth")
LEVELS = {"num_channels": [8, 16], "attention_levels": [False, True], "norm_num_groups": 4}
SETTINGS = Settings.model_validate(
    {
        "data": {"voxel_size": [32, 32, 32]},
        "autoencoder": {
            **LEVELS,
            "num_res_blocks": [1, 2],
            "latent_channels": 3,
            "training": {"discriminator": {"num_layers_d": 2, "num_channels": 4}},
        },
        "ldm": {"unet": {**LEVELS, "use_mean_map": False, "num_res_blocks": [2, 1], "num_head_channels": 8}},
    }
)
COMMON: dict[str, Any] = {"spatial_dims": 3, "attention_levels": (False, True), "norm_num_groups": 4}
AUTOENCODER = {**COMMON, "in_channels": 1, "out_channels": 1, "num_res_blocks": (1, 2), "latent_channels": 3}
UNET = {**COMMON, "in_channels": 3, "out_channels": 3, "num_res_blocks": (2, 1), "num_head_channels": (0, 8)}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def randomised(network: torch.nn.Module) -> torch.nn.Module:
    """Every parameter random: MONAI starts some of them at zero, behind which a mistake would hide."""
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return network.eval()


def outputs(name: str, network: Any, **labels: torch.Tensor) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        if name == "discriminator":
            return [network(torch.rand(1, 1, 16, 16, 16, generator=draw))[-1]]
        if name == "ldm":
            return [network(torch.rand(2, 3, 8, 4, 6, generator=draw), timesteps=torch.tensor([3, 700]), **labels)]
        mean, sigma = network.encode(torch.rand(1, 1, 16, 8, 12, generator=draw))
        return [network.decode(mean), mean, sigma]


def assert_reproduced(name: str, theirs: torch.nn.Module, settings: Settings, origin: str = "monai", **labels) -> None:
    """Our network with their weights computes what theirs does."""
    state = to_our_names(theirs.state_dict(), origin, SOMEWHERE)
    check_fit(name, state, settings, origin, SOMEWHERE)
    ours: torch.nn.Module = build_discriminator(settings.autoencoder)
    if name != "discriminator":
        ours = build_unet(settings.ldm, 3) if name == "ldm" else build_autoencoder(settings.autoencoder)
    ours.load_state_dict(state, strict=True)
    for own, other in zip(outputs(name, ours.eval(), **labels), outputs(name, theirs, **labels), strict=True):
        assert other.std() > 1e-3
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["lean", "monai"])
@pytest.mark.parametrize("has_middle", [True, False])
def test_generative_autoencoder_is_reproduced(implementation, has_middle):
    from generative.networks.nets import AutoencoderKL as Generative

    middle = {"with_encoder_nonlocal_attn": has_middle, "with_decoder_nonlocal_attn": has_middle}
    changes = {"autoencoder.implementation": implementation, "autoencoder.use_nonlocal_attention": has_middle}
    theirs = randomised(Generative(num_channels=(8, 16), **AUTOENCODER, **middle))
    assert_reproduced("autoencoder", theirs, SETTINGS.with_overrides(changes), "monai-generative")


@pytest.mark.parametrize("updown", [False, True])
@pytest.mark.parametrize("num_classes", [None, 3])
def test_generative_unet_is_reproduced(num_classes, updown):
    from generative.networks.nets import DiffusionModelUNet as Generative

    options = {"num_class_embeds": num_classes, "resblock_updown": updown}
    settings = SETTINGS.with_overrides({"ldm.unet.resblock_updown": updown})
    if num_classes:
        classes = {"ldm.conditioning.type": "class", "ldm.conditioning.num_classes": num_classes - 1}
        settings = settings.with_overrides(classes)
    labels = {"class_labels": torch.tensor([0, 2])} if num_classes else {}
    theirs = randomised(Generative(num_channels=(8, 16), **options, **UNET))
    assert_reproduced("ldm", theirs, settings, "monai-generative", **labels)


def test_generative_discriminator_is_reproduced():
    from generative.networks.nets import PatchDiscriminator as Generative

    theirs = Generative(spatial_dims=3, num_channels=4, in_channels=1, num_layers_d=2, norm="INSTANCE")
    assert_reproduced("discriminator", theirs, SETTINGS, "monai-generative")


@pytest.mark.parametrize("include_fc", [True, False])
@pytest.mark.parametrize("use_combined_linear", [True, False])
def test_monai_networks_are_reproduced_with_every_form_of_attention(include_fc, use_combined_linear):
    form = {"include_fc": include_fc, "use_combined_linear": use_combined_linear}
    assert_reproduced("autoencoder", randomised(AutoencoderKL(channels=(8, 16), **AUTOENCODER, **form)), SETTINGS)
    assert_reproduced("ldm", randomised(DiffusionModelUNet(channels=(8, 16), **UNET, **form)), SETTINGS)


@pytest.mark.parametrize(
    ("network", "changes"),
    [("autoencoder", {}), ("discriminator", {}), ("ldm", {}), ("ldm", {"ldm.unet.resblock_updown": True})],
)
def test_round_trip_through_stock_monai_is_exact(network, changes):
    settings = SETTINGS.with_overrides(changes)
    stock = randomised(stock_network(network, settings))
    assert type(stock) in (AutoencoderKL, PatchDiscriminator, DiffusionModelUNet)
    before = {key: value.clone() for key, value in stock.state_dict().items()}
    name, state = find_state({"state_dict": before}, SOMEWHERE)
    assert name == network
    state = to_our_names(state, "monai", SOMEWHERE)
    check_fit(network, state, settings, "monai", SOMEWHERE)
    again = stock_network(network, settings)
    again.load_state_dict(state, strict=True)
    for key, value in again.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_generative_names_under_from_monai_are_explained():
    from generative.networks.nets import AutoencoderKL as Generative

    state = Generative(num_channels=(8, 16), **AUTOENCODER).state_dict()
    with pytest.raises(CheckpointError, match="use --from monai-generative"):
        to_our_names(state, "monai", SOMEWHERE)


def test_state_dict_is_found_inside_the_usual_wrappers():
    state = stock_network("ldm", SETTINGS).state_dict()
    optimizer = {"state": {0: {"m": torch.ones(2)}}}
    for content in (
        {"epoch": 3, "model": {"module." + key: value for key, value in state.items()}},
        {"model.module." + key: value for key, value in state.items()},
        {"unet_state_dict": state, "scale_factor": torch.tensor(0.9), "optimizer": optimizer},
    ):
        network, found = find_state(content, SOMEWHERE)
        assert network == "ldm"
        assert set(found) == set(state)


def test_several_networks_in_one_file_need_a_choice():
    states = {name: stock_network(name, SETTINGS).state_dict() for name in ("autoencoder", "discriminator")}
    with pytest.raises(CheckpointError, match=r"holds several networks \(autoencoder, discriminator\).*--network"):
        find_state(states, SOMEWHERE)
    assert find_state(states, SOMEWHERE, "discriminator")[0] == "discriminator"


@pytest.mark.parametrize("content", [{"weight": torch.ones(2)}, [1, 2]])
def test_file_without_a_known_network_is_refused(content):
    with pytest.raises(CheckpointError, match="no weights of MONAI's AutoencoderKL"):
        find_state(content, SOMEWHERE)


@pytest.mark.parametrize(
    ("network", "key", "value", "said"),
    [
        ("autoencoder", "num_channels", (8, 8), "of another shape (the first: encoder."),
        ("autoencoder", "num_res_blocks", (2, 2), "missing"),
        ("autoencoder", "use_nonlocal_attention", False, "not in the network"),
        ("autoencoder", "strides", [[2, 2, 1]], "set autoencoder.strides=2"),
        ("autoencoder", "bottleneck", "vq", "set autoencoder.bottleneck=kl"),
        ("autoencoder", "variant", "maisi", "set autoencoder.variant=monai"),
        ("ldm", "unet.num_channels", (16, 16), "of another shape (the first: "),
        ("ldm", "unet.resblock_updown", True, "missing"),
        ("discriminator", "training.discriminator.num_layers_d", 3, "missing"),
    ],
)
def test_weights_of_another_network_than_the_config_are_refused(network, key, value, said):
    section = "ldm" if network == "ldm" else "autoencoder"
    state = expected_state(network, SETTINGS)
    check_fit(network, state, SETTINGS, "monai", SOMEWHERE)
    changed = SETTINGS.with_overrides({f"{section}.{key}": value})
    with pytest.raises(CheckpointError, match=re.escape(said)):
        check_fit(network, state, changed, "monai", SOMEWHERE)


@pytest.mark.parametrize(
    ("network", "theirs"),
    [
        ("autoencoder", lambda: AutoencoderKL(channels=(8, 16), **{**AUTOENCODER, "spatial_dims": 2})),
        ("autoencoder", lambda: AutoencoderKL(channels=(8, 16), with_encoder_nonlocal_attn=False, **AUTOENCODER)),
        ("ldm", lambda: DiffusionModelUNet(channels=(8, 16), with_conditioning=True, cross_attention_dim=4, **UNET)),
        ("discriminator", lambda: PatchDiscriminator(spatial_dims=3, channels=4, in_channels=1)),
    ],
)
def test_networks_with_options_that_ours_lack_are_refused(network, theirs):
    with pytest.raises(CheckpointError, match="the weights are not those of the network in the config"):
        check_fit(network, to_our_names(theirs().state_dict(), "monai", SOMEWHERE), SETTINGS, "monai", SOMEWHERE)


def test_files_of_safetensors_are_read(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "a.safetensors")
    torch.testing.assert_close(read_foreign_weights(tmp_path / "a.safetensors")["weight"], torch.ones(2))


def test_pickled_code_is_refused_and_not_run(tmp_path):
    marker = tmp_path / "executed"

    class Attack:
        def __reduce__(self):
            return (os.mkdir, (str(marker),))

    torch.save({"state_dict": Attack()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="never code"):
        read_foreign_weights(tmp_path / "evil.pt")
    assert not marker.exists()


def test_damaged_and_missing_files_are_refused(tmp_path):
    for name in ("a.safetensors", "a.pt"):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(CheckpointError, match="cannot be read as weights"):
            read_foreign_weights(tmp_path / name)
    with pytest.raises(CheckpointError, match="no such file"):
        read_foreign_weights(tmp_path / "gone.pt")


def test_weights_are_not_exchanged_with_monai_which_has_no_such_strides():
    thick, even = (validate({"autoencoder": {"strides": strides}}) for strides in ([[2, 2, 1], [2, 2, 2]], 2))
    with pytest.raises(CheckpointError, match=r"\[\[2, 2, 1\], \[2, 2, 2\]\]; MONAI's AutoencoderKL has"):
        monai_arguments("autoencoder", thick)
    assert monai_arguments("ldm", thick) == monai_arguments("ldm", even)


def test_tensors_read_from_a_file_are_aligned_as_new_ones_are(tmp_path):
    """Matrix products sum in another order at other addresses, so sampling would differ from training."""
    path = tmp_path / "a.safetensors"
    written = {"a": torch.rand(3), "b": torch.rand(5, 5), "c": torch.rand(7).bfloat16(), "d": torch.rand(4)}
    save_weights(path, written, {"mean": torch.rand(3)})
    tensors, _ = read_tensors(path)
    assert [tensor.data_ptr() % 64 for tensor in tensors.values()] == [0] * 5
    for name, tensor in written.items():
        assert torch.equal(tensors[name], tensor)


def test_the_permissions_of_weights_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        save_weights(tmp_path / "new" / "a.safetensors", {"a": torch.rand(3)}, {"stage": "ldm"})
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "a.safetensors").stat().st_mode & 0o777 == 0o640


def test_weights_that_may_not_be_read_are_not_called_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    save_weights(Path("a.safetensors"), {"a": torch.rand(3)}, {})
    Path("a.safetensors").chmod(0)
    for read in (load_weights, read_foreign_weights):
        with without_privileges(), pytest.raises(CheckpointError, match="Permission denied"):
            read(Path("a.safetensors"))
