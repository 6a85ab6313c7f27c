"""Our U-Net: with what MAISI's is told of a scan it computes what MAISI's computes; mean maps and the middle block."""

import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.apps.generation.maisi.networks.diffusion_model_unet_maisi import DiffusionModelUNetMaisi
from monai.networks.nets import DiffusionModelUNet
from torch.nn import functional as F

from models import build_unet
from models.exchange import check_fit, find_state, to_our_names
from models.unet import unet_arguments
from settings import CheckpointError, Settings, validate
from tests.models.gradients import BATCHES, DTYPES, LIMITS, Problem, same_in_every_dtype
from tests.models.problems import pooling_in_low_precision, with_lively_weights

ARGUMENTS = {"top_region_index_tensor": 4, "bottom_region_index_tensor": 4, "spacing_tensor": 3}
PATH = Path("maisi.pt")
UNET: dict[str, Any] = {
    "use_mean_map": False,
    "num_channels": [8, 16],
    "num_res_blocks": 1,
    "attention_levels": [False, True],
    "num_head_channels": [0, 8],
    "norm_num_groups": 4,
    "resblock_updown": True,
}
SCANS: dict[str, dict[str, Any]] = {
    "all": {"regions": ["chest", "pelvis"], "modality": 3},
    "modality": {"modality": 1},
    "regions": {"regions": ["head", "chest"]},
    "nothing": {},
}
INPUTS = {"regions": tuple(ARGUMENTS), "modality": ("spacing_tensor",)}


def settings_with(scan: dict[str, Any], unet: dict[str, Any] | None = None, **training: Any) -> Settings:
    """Settings of a small U-Net that is told of its scans."""
    return validate({"ldm": {"unet": {**UNET, **(unet or {})}, "conditioning": {"scan": scan}, "training": training}})


def maisi(scan: dict[str, Any], **options: Any) -> DiffusionModelUNetMaisi:
    torch.manual_seed(0)
    network = DiffusionModelUNetMaisi(
        3, 3, 3, num_channels=UNET["num_channels"], attention_levels=UNET["attention_levels"], num_res_blocks=(1, 1),
        num_head_channels=UNET["num_head_channels"], norm_num_groups=4, resblock_updown=True,
        num_class_embeds=128 if "modality" in scan else None, include_top_region_index_input="regions" in scan,
        include_bottom_region_index_input="regions" in scan, include_spacing_input=bool(scan), **options,
    )  # fmt: skip
    return with_lively_weights(network)


def inputs_of(scan: dict[str, Any], batch: int, grid: tuple[int, ...]) -> tuple[dict, dict]:
    """The same inputs as MAISI's network takes them, and as ours does."""
    torch.manual_seed(batch)
    kind = "regions" if "regions" in scan else "modality"
    theirs = {name: torch.rand(batch, ARGUMENTS[name]) for name in INPUTS[kind] if scan}
    common = {"x": torch.randn(batch, 3, *grid), "timesteps": torch.arange(1, 1 + batch) * 100}
    if "modality" in scan:
        common["class_labels"] = torch.arange(batch) + 1
    return {**common, **theirs}, {**common, **({"scan": torch.cat(list(theirs.values()), dim=1)} if theirs else {})}


def ours_with(theirs: DiffusionModelUNetMaisi, settings: Settings) -> Any:
    network, state = find_state({"epoch": 1, "unet_state_dict": theirs.state_dict()}, PATH)
    assert network == "ldm"
    ours = build_unet(settings.ldm, latent_channels=3)
    ours.load_state_dict(to_our_names(state, "maisi", PATH), strict=True)
    return ours


@pytest.mark.parametrize("name", SCANS)
def test_imported_unet_computes_what_maisi_computes(name):
    theirs = maisi(SCANS[name], include_fc=name != "all")
    ours = ours_with(theirs, settings_with(SCANS[name]))
    given, mine = inputs_of(SCANS[name], 2, (4, 8, 6))
    with torch.no_grad():
        torch.testing.assert_close(ours(**mine), theirs(**given), rtol=1e-5, atol=1e-5)


class AsMaisi(torch.nn.Module):
    """MAISI's network with the numbers of a scan side by side, as ours takes them."""

    def __init__(self, network: DiffusionModelUNetMaisi) -> None:
        super().__init__()
        self.network = pooling_in_low_precision(network)

    def forward(self, x, timesteps, class_labels=None, scan=None):
        names = [name for name in ARGUMENTS if getattr(self.network, f"include_{name.removesuffix('_tensor')}_input")]
        parts = [] if scan is None else scan.split([ARGUMENTS[name] for name in names], dim=1)
        return self.network(x, timesteps, class_labels=class_labels, **dict(zip(names, parts, strict=True)))

    def state_dict(self, **options):
        return self.network.state_dict(**options)

    def named_parameters(self, *options, **more):
        return self.network.named_parameters(*options, **more)


@cache
def problem(name: str, batch: int) -> Problem:
    _, mine = inputs_of(SCANS[name], batch, (4, 6, 4))
    numbers = [same_in_every_dtype(100 * mine["scan"])] if "scan" in mine else []
    labels = [mine["class_labels"]] if "class_labels" in mine else []

    def run(network, x, timesteps, *others):
        told = dict(zip(["class_labels"] * len(labels) + ["scan"] * len(numbers), others, strict=True))
        return [network(x, timesteps, **told)]

    inputs = [same_in_every_dtype(mine["x"]), mine["timesteps"], *labels, *numbers]
    return Problem(AsMaisi(maisi(SCANS[name], include_fc=True)), run, inputs)


@pytest.mark.parametrize("name", ["modality", "regions", "nothing"])
def test_imported_unet_has_the_gradients_of_maisi(name):
    ours = build_unet(settings_with(SCANS[name]).ldm, latent_channels=3)
    problem(name, 3).assert_as_close_as_stock(ours, torch.float64)


@pytest.mark.parametrize("knobs", [{}, {"use_gradient_checkpointing": True}], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_as_close_to_the_gradients_of_maisi_as_maisi_itself(dtype, knobs):
    ours = build_unet(settings_with(SCANS["all"], **knobs).ldm, latent_channels=3)
    ratios = [problem("all", batch).ratio(ours, dtype) for batch in BATCHES]
    # On average, because in one batch MAISI's rounding errors may happen to cancel: 3.1 at most, on a CPU without AVX.
    assert statistics.fmean(ratios) <= LIMITS[dtype]
    assert max(ratios) <= 2 * LIMITS[dtype], ratios


@pytest.mark.parametrize("name", SCANS)
def test_weights_fit_only_the_inputs_that_they_were_trained_with(name):
    state = maisi(SCANS[name], include_fc=True).state_dict()
    check_fit("ldm", state, settings_with(SCANS[name]), "maisi", PATH)
    for other in SCANS.keys() - {name}:
        with pytest.raises(CheckpointError, match="the weights are not those of the network in the config"):
            check_fit("ldm", state, settings_with(SCANS[other]), "maisi", PATH)


def test_weights_of_maisi_are_refused_as_those_of_monai():
    with pytest.raises(CheckpointError, match=r"holds MAISI's U-Net, which --from monai does not fit; use maisi"):
        to_our_names(maisi(SCANS["all"]).state_dict(), "monai", PATH)


def test_middle_attends_where_the_last_level_does_not():
    settings = settings_with({}, {"attention_levels": [True, False], "num_head_channels": 8})
    model = build_unet(settings.ldm, latent_channels=3)
    assert model.middle_block.attention.attn.num_heads == 2
    assert model(torch.randn(1, 3, 8, 8, 8), torch.tensor([5])).shape == (1, 3, 8, 8, 8)


def test_a_mean_map_is_concatenated_to_every_input_and_padded_with_it():
    settings = settings_with({}).ldm
    model = build_unet(settings, latent_channels=3, mean_map_shape=(3, 8, 5, 8)).double()
    assert set(model.state_dict()) - set(build_unet(settings, latent_channels=3).state_dict()) == {"mean_map"}
    assert model.mean_map is not None
    stock = DiffusionModelUNet(**unet_arguments(settings, 3, (3, 8, 5, 8))).double()
    with_lively_weights(model)
    model.mean_map.copy_(torch.randn(1, 3, 8, 5, 8))
    stock.load_state_dict({name: value for name, value in model.state_dict().items() if name != "mean_map"})
    # A latent of 8 x 5 x 8, padded to the multiple of two that the levels need.
    latents = F.pad(torch.randn(2, 3, 8, 5, 8, dtype=torch.float64), (0, 0, 0, 1))
    means = F.pad(model.mean_map, (0, 0, 0, 1)).expand(2, -1, -1, -1, -1)
    times = torch.tensor([5, 900])
    expected = stock(torch.cat([latents, means], dim=1), times)
    torch.testing.assert_close(model(latents, times), expected, rtol=1e-10, atol=1e-12)
