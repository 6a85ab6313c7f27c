"""The two commands from the outside: files in, files out, exit codes and messages."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from monai.networks.nets import AutoencoderKL, DiffusionModelUNet

from evaluation.trained_run import TrainedRun
from models import build_autoencoder
from models.exchange import UNKNOWN, published
from models.weight_files import load_texts, load_weights, save_weights
from settings import Settings, load_settings, stored
from tests.finished_run import finished_run, run_here
from training.checkpoints import Checkpoints, licence_of

SHAPE = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 1,
    "num_res_blocks": (1, 1),
    "attention_levels": (False, True),
    "latent_channels": 3,
    "norm_num_groups": 4,
}


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "tiny.yaml"
    content = {
        "data": {"voxel_size": [16, 16, 16]},
        "autoencoder": {
            "num_channels": [8, 16],
            "num_res_blocks": 1,
            "attention_levels": [False, True],
            "norm_num_groups": 4,
            "training": {"discriminator": {"num_layers_d": 2, "num_channels": 16}},
        },
        "ldm": {
            "unet": {
                "use_mean_map": False,
                "num_channels": [8, 16],
                "attention_levels": [False, True],
                "num_head_channels": 8,
                "norm_num_groups": 8,
            }
        },
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def generative_file(tmp_path) -> Path:
    from generative.networks.nets import AutoencoderKL as Generative

    torch.manual_seed(0)
    network = Generative(num_channels=(8, 16), **SHAPE)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    torch.save({"epoch": 3, "state_dict": network.state_dict()}, tmp_path / "generative.pt")
    return tmp_path / "generative.pt"


EXPORT = ("scripts/export_checkpoint.py", "--weights")
IMPORT = ("scripts/import_checkpoint.py", "--from")


@pytest.fixture
def take(tmp_path, config):
    """Import weights into the folder `run`; return the exit code."""

    def start(origin: str, weights: Path, *more: object) -> int:
        where = ("--weights", weights, "--config", config, "--out", tmp_path / "run")
        return run_here(*IMPORT, origin, *where, *map(str, more))

    return start


def test_generative_autoencoder_goes_through_a_run_into_stock_monai(tmp_path, config, take, generative_file, capsys):
    assert take("monai-generative", generative_file) == 0
    state, metadata = load_weights(tmp_path / "run" / "autoencoder.safetensors")
    assert metadata["stage"] == "autoencoder"
    settings = load_settings(config)
    assert metadata["settings"] == stored(settings)
    assert load_settings(tmp_path / "run" / "config.yaml").autoencoder == settings.autoencoder
    said = capsys.readouterr().err
    assert "autoencoder.norm_num_groups is 4; the weights cannot confirm this" in said
    _, script, option, path, *overrides = shlex.split(said.split("next: ")[1])
    assert (script, option) == ("train_autoencoder.py", "--config")
    assert load_settings(path, overrides).autoencoder.pretrained == str(tmp_path / "run" / "autoencoder.safetensors")

    source = tmp_path / "run" / "autoencoder.safetensors"
    assert run_here(*EXPORT, source, "--out", tmp_path / "monai.pt") == 0
    recipe = capsys.readouterr().out
    scope: dict = {}
    exec(recipe, scope)
    assert type(scope["network"]) is AutoencoderKL
    from generative.networks.nets import AutoencoderKL as Generative

    theirs = Generative(num_channels=(8, 16), **SHAPE)
    theirs.load_state_dict(torch.load(generative_file, weights_only=True)["state_dict"])
    ours = build_autoencoder(settings.autoencoder)
    ours.load_state_dict(state, strict=True)
    volume = torch.rand(1, 1, 16, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs.eval().reconstruct(volume)
        for network in (ours.eval(), scope["network"].eval()):
            mean, _ = network.encode(volume)
            torch.testing.assert_close(network.decode(mean), expected, rtol=1e-5, atol=1e-5)


def test_maisi_weights_need_the_settings_of_its_network_and_then_run(tmp_path, take, capsys):
    from monai.apps.generation.maisi.networks.autoencoderkl_maisi import AutoencoderKlMaisi

    theirs = AutoencoderKlMaisi(num_channels=(8, 16), include_fc=True, num_splits=1, **SHAPE)
    torch.save(theirs.state_dict(), tmp_path / "maisi.pt")
    assert take("maisi", tmp_path / "maisi.pt") == 2
    said = capsys.readouterr().err
    wanted = ["autoencoder.use_nonlocal_attention=false", "autoencoder.variant=maisi"]
    assert "missing (the first: encoder.blocks." in said
    assert f"set {wanted[1]}" in said
    assert take("maisi", tmp_path / "maisi.pt", *wanted) == 0
    ours = build_autoencoder(load_settings(tmp_path / "run" / "config.yaml").autoencoder)
    ours.load_state_dict(load_weights(tmp_path / "run" / "autoencoder.safetensors")[0], strict=True)
    volume = torch.rand(1, 1, 16, 16, 16)
    with torch.no_grad():
        mean, _ = theirs.encode(volume)
        torch.testing.assert_close(ours.encode(2 * volume - 1)[0], mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.decode(mean), 2 * theirs.decode(mean) - 1, rtol=1e-5, atol=1e-5)
    source = tmp_path / "run" / "autoencoder.safetensors"
    capsys.readouterr()
    assert run_here(*EXPORT, source, "--out", tmp_path / "again.safetensors") == 0
    recipe = capsys.readouterr().out
    assert "# It takes and returns volumes with intensities scaled to [0, 1].\n" in recipe
    scope: dict = {}
    exec(recipe, scope)
    assert type(scope["network"]) is AutoencoderKlMaisi
    again, before = scope["network"].state_dict(), theirs.state_dict()
    assert again.keys() == before.keys()
    assert all(torch.equal(again[key], value) for key, value in before.items())


@pytest.fixture
def unet_state() -> dict[str, torch.Tensor]:
    unet = DiffusionModelUNet(
        spatial_dims=3,
        in_channels=3,
        out_channels=3,
        channels=(8, 16),
        num_res_blocks=(2, 2),
        attention_levels=(False, True),
        num_head_channels=(0, 8),
        norm_num_groups=8,
    )
    return unet.state_dict()


def test_imported_unet_opens_as_a_trained_run_with_its_scale(tmp_path, take, unet_state):
    torch.save({"unet_state_dict": unet_state, "scale_factor": torch.tensor(0.75)}, tmp_path / "unet.pt")
    for given, expected in (([], 0.75), (["--latent-scale", 0.5], 0.5)):
        assert take("monai", tmp_path / "unet.pt", *given) == 0
        network, frame = TrainedRun(tmp_path / "run").unet()
        assert torch.equal(frame.normalisation.scale, torch.full((3, 1, 1, 1), expected))
        assert not frame.normalisation.mean.any()
        for key, value in network.state_dict().items():
            assert torch.equal(value.cpu(), unet_state[key])


def test_an_imported_unet_is_exported_with_its_latents_and_its_licence(tmp_path, take, unet_state, capsys):
    torch.save({"unet_state_dict": unet_state, "scale_factor": torch.tensor(0.75)}, tmp_path / "unet.pt")
    assert take("monai", tmp_path / "unet.pt") == 0
    source = tmp_path / "run" / "ldm.safetensors"
    state, metadata = load_weights(source)
    assert metadata["licence"] == UNKNOWN
    save_weights(source, state, metadata | {"licence": "Theirs"})
    settings = Settings.model_validate({"ldm": {"pretrained": str(source)}})
    assert licence_of("ldm", settings) == {"licence": "Theirs"}
    assert licence_of("autoencoder", settings) == {}
    export = (*EXPORT, source, "--out", tmp_path / "monai.safetensors")
    capsys.readouterr()
    assert run_here(*export) == 0
    recipe = capsys.readouterr().out
    assert "fine-tuned from: Theirs." in recipe
    assert recipe.endswith("\n# It takes the autoencoder's latents times 0.75.\n")
    assert load_texts(tmp_path / "monai.safetensors")["licence"] == "Theirs"
    save_weights(source, state, metadata | {"latent_mean": torch.ones(3, 1, 1, 1)})
    assert run_here(*export) == 0
    recipe = capsys.readouterr().out
    assert "# It takes (latent - mean) * scale: latent_mean and latent_scale in that file.\n" in recipe
    scope: dict = {}
    exec(recipe, scope)
    assert type(scope["network"]) is DiffusionModelUNet


def test_run_folder_of_another_config_is_refused(tmp_path, take, unet_state, generative_file, capsys):
    torch.save(unet_state, tmp_path / "unet.pt")
    content = torch.load(generative_file, weights_only=True)
    content |= {"again": content, "best": content["state_dict"]}  # a dict inside itself is searched once
    torch.save(content, tmp_path / "round.pt")
    assert take("monai-generative", tmp_path / "round.pt") == 0
    unet = ["monai", tmp_path / "unet.pt", "--latent-scale", 1]
    assert take(*unet, "seed=7") == 2
    assert "all weights in a run folder share one config" in capsys.readouterr().err
    assert take(*unet) == 0


def test_weights_that_are_no_finite_numbers_are_refused(tmp_path, take, generative_file, capsys):
    state = torch.load(generative_file, weights_only=True)["state_dict"]
    first, weight = next(iter(state.items()))
    nan = torch.full_like(weight, float("nan"))
    for strange in (nan, weight.to(torch.complex64), weight.to_sparse(), weight.double() * 1e300):
        torch.save(state | {first: strange}, tmp_path / "strange.pt")
        assert take("monai-generative", tmp_path / "strange.pt") == 2
        assert f"{first} is not a dense tensor of finite real numbers" in capsys.readouterr().err


def test_a_unet_with_missing_or_reshaped_weights_is_refused(tmp_path, take, unet_state, capsys):
    for broken in ("down_blocks.", "time_emb_proj.weight", "attn.to_q.weight"):
        left = {key: value for key, value in unet_state.items() if not key.startswith(broken)}
        state = {key: value.flatten() if broken in key else value for key, value in left.items()}
        torch.save(state, tmp_path / "unet.pt")
        assert take("monai", tmp_path / "unet.pt", "--latent-scale", 1) == 2
        assert "the weights are not those of the network in the config" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_exported_unet_comes_back_with_its_mean_map_and_its_latents(suffix, tmp_path, tmp_path_factory, capsys):
    run = finished_run(tmp_path_factory)
    exported, back = tmp_path / f"unet{suffix}", tmp_path / "back"
    arguments = ["--from", "monai", "--weights", exported, "--config", run / "config.yaml", "--out", back]
    weights, facts = load_weights(run / "ldm.safetensors")
    save_weights(tmp_path / "trained.safetensors", weights, facts | {"licence": "Theirs"})
    assert run_here(*EXPORT, tmp_path / "trained.safetensors", "--out", exported) == 0
    assert run_here(IMPORT[0], *arguments) == 0
    returned = load_texts(back / "ldm.safetensors")
    assert (returned["licence"], returned["autoencoder"]) == ("Theirs", facts["autoencoder"])
    shutil.copy(run / "autoencoder.safetensors", back)
    (expected, before), (found, after) = (TrainedRun(folder).unet() for folder in (run, back))
    assert expected.mean_map is not None
    assert expected.mean_map.any()
    for key, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], value)
    assert torch.equal(after.normalisation.scale, before.normalisation.scale)
    assert torch.equal(after.normalisation.mean, before.normalisation.mean)
    assert (after.spacing_mm, after.lower, after.upper) == (before.spacing_mm, before.lower, before.upper)
    beside = tmp_path / "unet_sampling.safetensors"
    state, metadata = load_weights(beside)
    save_weights(beside, {"mean_map": state["mean_map"] * torch.nan}, metadata)
    assert run_here(IMPORT[0], *arguments) == 2
    assert "unet_sampling.safetensors: mean_map is not a dense tensor of finite" in capsys.readouterr().err
    save_weights(beside, {"mean_map": state["mean_map"]}, metadata)
    assert run_here(IMPORT[0], *arguments) == 2
    assert "unet_sampling.safetensors: not what was exported beside unet" in capsys.readouterr().err


def test_imported_weights_may_be_replaced_and_trained_ones_may_not(tmp_path, tmp_path_factory, capsys):
    run = shutil.copytree(finished_run(tmp_path_factory), tmp_path / "run")
    trained = run / "autoencoder.safetensors"
    start = (*IMPORT, "monai", "--weights", trained, "--config", run / "config.yaml", "--out")
    for _ in range(2):
        assert run_here(*start, tmp_path / "new") == 0
    before = trained.read_bytes()
    assert run_here(*start, run) == 2
    assert "autoencoder.safetensors: was trained here; only imported weights are replaced" in capsys.readouterr().err
    assert trained.read_bytes() == before
    # A run that is not finished has checkpoints only.
    Checkpoints(tmp_path / "new" / "checkpoints", "autoencoder", 2).save(3, {})
    assert run_here(*start, tmp_path / "new") == 2
    assert "was trained here; only imported weights are replaced" in capsys.readouterr().err


def test_licences_of_published_weights_are_known_by_their_names():
    research = "NVIDIA OneWay Non-Commercial License, for academic research"
    expected = {"diff_unet_3d_rflow-ct.pt": "NVIDIA Open Model License", "autoencoder_v2.pt": research, "unet.pt": None}
    found = {name: published(name) for name in expected}
    assert {name: known and known.licence for name, known in found.items()} == expected
