"""MONAI's ControlNet: a trained copy of a frozen U-Net's encoder that sees a label map and corrects the U-Net.

Our parameters have MONAI's names, those of the ControlNet after "controlnet.".
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import monai.networks.nets
import torch
from torch import Tensor

from models.lean.layout import arranged
from models.unet import DiffusionUNet, Run, padded
from models.weight_files import load_state, load_weights

log = logging.getLogger(__name__)

NUM_BITS = 8
"""Channels of a label map as a ControlNet gets it: its values as binary numbers, as in MAISI."""

PREFIX = "controlnet."


def binary_code(label_map: Tensor) -> Tensor:
    """Return the bits (B, 8, D, H, W) of label values (B, 1, D, H, W), the lowest first, as the same type."""
    bits = torch.arange(NUM_BITS, dtype=torch.uint8, device=label_map.device).view(-1, 1, 1, 1)
    return ((label_map.clamp_min(0).to(torch.uint8) >> bits) & 1).to(label_map.dtype)


def controlnet_arguments(unet_arguments: dict[str, Any], embedding_channels: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of MONAI's `ControlNet` for a U-Net with these arguments."""
    own = {"conditioning_embedding_in_channels": NUM_BITS, "conditioning_embedding_num_channels": embedding_channels}
    return {name: value for name, value in unet_arguments.items() if name != "out_channels"} | own


class ControlNet(DiffusionUNet):
    """A U-Net's encoder and middle block; `embedding_channels` are those of the embedding of the label map.

    Convolutions that start at zero lead from each of its levels to the U-Net's. It knows timestep and class only, as
    MAISI's does: what else is embedded the U-Net knows.
    """

    def __init__(self, embedding_channels: tuple[int, ...], **arguments: Any) -> None:
        super().__init__(**arguments)
        del self.up_blocks, self.out
        stock = monai.networks.nets.ControlNet(**controlnet_arguments(arguments, embedding_channels))
        self.controlnet_cond_embedding = stock.controlnet_cond_embedding
        self.controlnet_down_blocks = stock.controlnet_down_blocks
        self.controlnet_mid_block = stock.controlnet_mid_block

    def corrections(
        self, x: Tensor, timesteps: Tensor, bits: Tensor, class_labels: Tensor | None, run: Run
    ) -> tuple[Tensor, list[Tensor]]:
        """Return what is added to the U-Net's middle block and to its skip connections."""
        control = padded(run(self.controlnet_cond_embedding, bits), x.shape[2:])
        embedding = self._embed(x, timesteps, class_labels, None)
        skips = self.encode(x, embedding, run, control)
        corrections = [conv(skip) for conv, skip in zip(self.controlnet_down_blocks, skips, strict=True)]
        return self.controlnet_mid_block(self.middle(skips[-1], embedding, run)), corrections


class ControlledUNet(DiffusionUNet):
    """A frozen U-Net with a ControlNet. A sample whose label map is hidden gets what the U-Net alone predicts.

    Both stay in training mode, in which checkpointing works: neither has dropout or running statistics.
    """

    def __init__(self, controlnet: ControlNet, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self.requires_grad_(False)
        self.controlnet = controlnet

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor | None = None,
        class_labels: Tensor | None = None,
        numbers: Tensor | None = None,
        scan: Tensor | None = None,
        control: Tensor | None = None,
    ) -> Tensor:
        """Return the prediction for `x`; `control` has label values (B, 1, D, H, W) of the volume, hidden ones -1."""
        assert context is None, "the network has self-attention only: it takes no context"
        assert control is not None, "control is missing: the network has a ControlNet"
        run, bits = self.runner(), arranged(binary_code(control), self.layout)
        with torch.no_grad():
            x = self._with_mean_map(arranged(x, self.layout))
            embedding = self._with_scan(self._embed(x, timesteps, class_labels, numbers), scan)
            skips = self.encode(x, embedding, run)
        of_middle, corrections = self.controlnet.corrections(x, timesteps, bits, class_labels, run)
        is_given = (control[:, :, :1, :1, :1] >= 0).to(of_middle.dtype)
        corrected = [skip + is_given * correction for skip, correction in zip(skips, corrections, strict=True)]
        # MAISI's U-Net corrects in place, and so what its middle block gets too; MONAI's does not.
        lowest = corrected[-1] if self.scan_inputs else skips[-1]
        del skips, corrections
        with torch.set_grad_enabled(lowest.requires_grad):
            h = self.middle(lowest, embedding, run)
        return self.decode(h + is_given * of_middle, corrected, embedding, run)

    def with_controlnet(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a U-Net with those of a ControlNet: a copy of its encoder, unless it has its own.

        A U-Net with scan inputs projects a longer embedding, of which the ControlNet has the timestep's part.
        """
        if any(name.startswith(PREFIX) for name in state):
            return state
        copies = {
            PREFIX + name: state[name][tuple(map(slice, own.shape))] if name in state else own
            for name, own in self.controlnet.state_dict().items()
        }
        return state | copies


def parts_of(state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the weights of a U-Net and of the ControlNet beside it, if there is one, under MONAI's names."""
    controlnet = {key.removeprefix(PREFIX): value for key, value in state.items() if key.startswith(PREFIX)}
    return {"ldm": {key: value for key, value in state.items() if not key.startswith(PREFIX)}, "controlnet": controlnet}


def load_pretrained(network: DiffusionUNet, path: Path) -> None:
    """Load the weights that training starts from; raise `CheckpointError` if they do not fit."""
    state, _ = load_weights(path)
    if isinstance(network, ControlledUNet):
        state = network.with_controlnet(state)
    load_state(network, state, path)
    log.info("%s: the U-Net starts from these weights", path)
