"""Networks with published figures: U-Nets of nnU-Net version 1, NVIDIA, MONAI and MAISI, and MAISI's decoder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.lean.norm import group_norm

Size = tuple[int, int, int]
CUBE = (3, 3, 3)


class FusedNorm(nn.GroupNorm):
    """An instance norm of one kernel: this project's own."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return group_norm(x, self)


class Block(nn.Sequential):
    """Two convolutions, each with an instance norm and a leaky ReLU; the first one may have a stride."""

    def __init__(self, inputs: int, outputs: int, kernel: Size, stride: Size = (1, 1, 1)) -> None:
        layers: list[nn.Module] = []
        for channels, step in ((inputs, stride), (outputs, (1, 1, 1))):
            padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
            layers += [nn.Conv3d(channels, outputs, kernel, step, padding)]
            layers += [nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01, inplace=True)]
        super().__init__(*layers)


class NnUnet(nn.Module):
    """nnU-Net's network: 32 channels, doubled at each level to at most 320, and an output at each level going up.

    kernels: of each level, the highest resolution first. strides: between them.
    """

    def __init__(self, inputs: int, classes: int, kernels: Sequence[Size], strides: Sequence[Size]) -> None:
        super().__init__()
        widths = [min(320, 32 * 2**level) for level in range(len(kernels))]
        self.down = nn.ModuleList([Block(inputs, widths[0], kernels[0])])
        for (above, below), kernel, stride in zip(pairwise(widths), kernels[1:], strides, strict=True):
            self.down.append(Block(above, below, kernel, stride))
        self.resize, self.up, self.heads = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for level in reversed(range(len(strides))):
            below, above, stride = widths[level + 1], widths[level], strides[level]
            self.resize.append(nn.ConvTranspose3d(below, above, stride, stride, bias=False))
            # As published: going up, a level has the kernels of the one below it.
            self.up.append(Block(2 * above, above, kernels[level + 1]))
            self.heads.append(nn.Conv3d(above, classes, 1, bias=False))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the outputs, the highest resolution first."""
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        outputs = []
        for resize, block, head, skip in zip(self.resize, self.up, self.heads, reversed(skips[:-1]), strict=True):
            x = block(torch.cat((resize(x), skip), dim=1))
            outputs.append(head(x))
        return outputs[::-1]


def dice_and_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return soft Dice over the batch, from the true and the false positives and negatives, plus cross entropy."""
    hot = torch.zeros_like(logits).scatter_(1, target, 1)
    chances, axes = torch.softmax(logits, 1), (0, *range(2, logits.dim()))
    hits, false, missed = chances * hot, chances * (1 - hot), (1 - chances) * hot
    right, wrong, lost = hits.sum(axes), false.sum(axes), missed.sum(axes)
    return F.cross_entropy(logits, target[:, 0]) - (2 * right / (2 * right + wrong + lost + 1e-5))[1:].mean()


def nnunet_loss(outputs: list[Tensor]) -> Tensor:
    """Return the loss of all outputs but the lowest one, each of half the weight of the one above it."""
    parts = []
    for level, logits in enumerate(outputs[:-1]):
        target = torch.zeros(logits.shape[0], 1, *logits.shape[2:], dtype=torch.int64)
        parts.append(dice_and_entropy(logits, target) * 0.5**level)
    return torch.stack(parts).sum()


def nvidia_unet(spatial_dims: int, fused: bool) -> nn.Module:
    """Return MONAI's DynUNet as NVIDIA's benchmark builds it for brain tumours: 4 inputs, 4 classes, 6 levels.

    fused: a norm of one kernel in channels-last order; this project's own stands for NVIDIA's.
    """
    from monai.networks.nets import DynUNet

    steps = [1, 2, 2, 2, 2, 2]
    unet = DynUNet(
        spatial_dims,
        4,
        4,
        kernel_size=[3] * len(steps),
        strides=steps,
        upsample_kernel_size=steps[1:],
        norm_name=("INSTANCE", {"affine": True}),
        act_name=("leakyrelu", {"inplace": False, "negative_slope": 0.01}),
        trans_bias=True,
    )
    if fused:
        for parent in list(unet.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.InstanceNorm3d):
                    setattr(parent, name, FusedNorm(child.num_features))
                elif isinstance(child, (nn.Conv3d, nn.ConvTranspose3d)):
                    weight = child.weight.detach().contiguous(memory_format=torch.channels_last_3d)
                    child.weight = nn.Parameter(weight)
    return unet


MAISI_COMMON = {
    "spatial_dims": 3,
    "in_channels": 4,
    "num_channels": (64, 128, 256, 512),
    "attention_levels": (False, False, True, True),
    "num_head_channels": (0, 0, 32, 32),
    "num_res_blocks": 2,
}


def maisi_networks(is_rflow: bool) -> tuple[nn.Module, nn.Module]:
    """Return MAISI's diffusion network as published, 181 million parameters, and its ControlNet.

    Their constructors refuse the kernel that never stores an attention matrix where there is no GPU, so the blocks are
    told to use it afterwards.
    """
    from monai.apps.generation.maisi.networks.controlnet_maisi import ControlNetMaisi
    from monai.apps.generation.maisi.networks.diffusion_model_unet_maisi import DiffusionModelUNetMaisi
    from monai.networks.blocks.selfattention import SABlock

    classes = 128 if is_rflow else None
    common = {**MAISI_COMMON, "resblock_updown": is_rflow, "include_fc": is_rflow, "num_class_embeds": classes}
    regions = {f"include_{end}_region_index_input": not is_rflow for end in ("top", "bottom")}
    unet = DiffusionModelUNetMaisi(out_channels=4, include_spacing_input=True, **regions, **common)
    inputs = {"conditioning_embedding_in_channels": 8, "conditioning_embedding_num_channels": (8, 32, 64)}
    control = ControlNetMaisi(**inputs, **common)
    for module in (*unet.modules(), *control.modules()):
        if isinstance(module, SABlock):
            module.use_flash_attention = True
    return unet, control


def maisi_autoencoder(splits: int) -> nn.Module:
    """Return MAISI's autoencoder as published, whose convolutions run in so many pieces."""
    from monai.apps.generation.maisi.networks.autoencoderkl_maisi import AutoencoderKlMaisi

    return AutoencoderKlMaisi(
        spatial_dims=3,
        in_channels=1,
        out_channels=1,
        latent_channels=4,
        num_channels=(64, 128, 256),
        num_res_blocks=(2, 2, 2),
        norm_num_groups=32,
        norm_eps=1e-6,
        attention_levels=(False, False, False),
        with_encoder_nonlocal_attn=False,
        with_decoder_nonlocal_attn=False,
        norm_float16=True,
        num_splits=splits,
        dim_split=1,
    )


def stable_diffusion_vae(is_encoder: bool) -> nn.Sequential:
    """Return the encoder or the decoder of Stable Diffusion's VAE, whose levels have one block more going up."""
    from monai.networks.blocks.selfattention import SABlock
    from monai.networks.nets import AutoencoderKL

    widths = (128, 256, 512, 512)
    vae = AutoencoderKL(
        2,
        3,
        3,
        (2 if is_encoder else 3,) * len(widths),
        widths,
        (False,) * len(widths),
        latent_channels=4,
        with_encoder_nonlocal_attn=is_encoder,
        with_decoder_nonlocal_attn=not is_encoder,
    )
    for module in vae.modules():
        if isinstance(module, SABlock):
            module.use_flash_attention = True
    parts = (vae.encoder, vae.quant_conv_mu) if is_encoder else (vae.post_quant_conv, vae.decoder)
    return nn.Sequential(*parts)


def notebook_unet() -> nn.Module:
    """Return the U-Net of MONAI's notebook of mixed precision."""
    from monai.networks.nets import UNet

    return UNet(3, 1, 2, (16, 32, 64, 128, 256), (2, 2, 2, 2), num_res_units=2, norm="batch")


def notebook_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the Dice loss of that notebook, of each class of each volume."""
    chances, axes = torch.softmax(logits, 1), (2, 3, 4)
    hot = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, labels.long(), 1)
    both = torch.sum(hot * chances, axes)
    return (1 - (2 * both + 1e-5) / (torch.sum(hot, axes) + torch.sum(chances, axes) + 1e-5)).mean()
