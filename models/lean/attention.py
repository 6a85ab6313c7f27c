"""Self-attention over all voxels without the N x N matrix."""

from __future__ import annotations

from collections.abc import Sequence

from monai.networks.blocks import SpatialAttentionBlock
from torch import Tensor, nn
from torch.nn import functional as F

from models.lean.layout import CHANNELS_LAST
from models.lean.norm import group_norm


class AttentionBlock(nn.Module):
    """MONAI's `SpatialAttentionBlock` with the same layers and parameter names.

    Attention always runs through `scaled_dot_product_attention`. Otherwise the forward differs from MONAI's in two
    ways: dropout is active in training only, and the norm saves only its low-precision input. A checkpoint keeps the
    result of attention, so that it is not computed twice.
    """

    keeps_attention = True

    def __init__(self, stock: SpatialAttentionBlock) -> None:
        super().__init__()
        self.norm, self.attn = stock.norm, stock.attn

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` plus the attention of every voxel over all voxels."""
        return self.finish(x, self.attend(*self.project(x)))

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Return query, key and value, each (batch, tokens, channels)."""
        # The norm writes tokens, which have their channels side by side, itself: no other operator changes the layout.
        tokens = group_norm(x, self.norm, layout=CHANNELS_LAST).flatten(2).transpose(1, 2)
        attn = self.attn
        if attn.use_combined_linear:
            return attn.qkv(tokens).chunk(3, dim=-1)
        return attn.to_q(tokens), attn.to_k(tokens), attn.to_v(tokens)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the values, weighted for each query, as (batch, heads, tokens, channels of a head)."""
        heads = (*query.shape[:2], self.attn.num_heads, -1)
        query, key, value = (part.view(heads).transpose(1, 2) for part in (query, key, value))
        dropout = self.attn.dropout_rate if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=self.attn.scale)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return `x` plus the projection of what `attend` returned."""
        mixed = self.attn.drop_output(self.attn.out_proj(mixed.transpose(1, 2).flatten(2)))
        # x comes first because the sum takes the memory layout of its first operand, and convolutions want that of x.
        return x + mixed.transpose(1, 2).view(x.shape)
