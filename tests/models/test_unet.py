"""What the diffusion U-Net promises beside its gradients: when it checkpoints, and where its middle attends."""

import torch
from monai.networks.nets import DiffusionModelUNet
from torch.nn import functional as F

from models import build_unet
from models.unet import unet_arguments
from settings import Settings


def ldm_settings(**training):
    unet = {
        "num_channels": [8, 16, 16],
        "num_res_blocks": [1, 2, 1],
        "attention_levels": [False, True, True],
        "num_head_channels": [0, 8, 4],
        "norm_num_groups": 4,
    }
    return Settings.model_validate({"ldm": {"unet": unet, "training": training}}).ldm


def test_middle_attends_where_the_last_level_does_not():
    settings = ldm_settings()
    unet = settings.unet.model_copy(update={"attention_levels": (False, True, False), "num_head_channels": 8})
    model = build_unet(settings.model_copy(update={"unet": unet}), latent_channels=3)
    assert model.middle_block.attention.attn.num_heads == 2
    assert model(torch.randn(1, 3, 8, 8, 8), torch.tensor([5])).shape == (1, 3, 8, 8, 8)


def test_a_mean_map_is_concatenated_to_every_input_and_padded_with_it():
    settings = ldm_settings()
    model = build_unet(settings, latent_channels=3, mean_map_shape=(3, 8, 6, 8)).double()
    assert set(model.state_dict()) - set(build_unet(settings, latent_channels=3).state_dict()) == {"mean_map"}
    assert model.mean_map is not None
    stock = DiffusionModelUNet(**unet_arguments(settings, 3, (3, 8, 6, 8))).double()
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    model.mean_map.copy_(torch.randn(1, 3, 8, 6, 8))
    stock.load_state_dict({name: value for name, value in model.state_dict().items() if name != "mean_map"})
    # A latent of 8 x 6 x 8, padded to the multiple of four that the levels need.
    latents = F.pad(torch.randn(2, 3, 8, 6, 8, dtype=torch.float64), (0, 0, 0, 2))
    means = F.pad(model.mean_map, (0, 0, 0, 2)).expand(2, -1, -1, -1, -1)
    times = torch.tensor([5, 900])
    expected = stock(torch.cat([latents, means], dim=1), times)
    torch.testing.assert_close(model(latents, times), expected, rtol=1e-10, atol=1e-12)
