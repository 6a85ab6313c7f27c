"""Self-attention over all voxels without the N x N matrix."""

from __future__ import annotations

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
        attn = self.attn
        # The norm writes tokens, which have their channels side by side, itself: no other operator changes the layout.
        tokens = group_norm(x, self.norm, layout=CHANNELS_LAST).flatten(2).transpose(1, 2)
        if attn.use_combined_linear:
            query, key, value = attn.qkv(tokens).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(tokens), attn.to_k(tokens), attn.to_v(tokens)
        del tokens
        heads = (*query.shape[:2], attn.num_heads, -1)
        query, key, value = (part.view(heads).transpose(1, 2) for part in (query, key, value))
        dropout = attn.dropout_rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=attn.scale)
        del query, key, value
        mixed = attn.drop_output(attn.out_proj(mixed.transpose(1, 2).flatten(2)))
        # x comes first because the sum takes the memory layout of its first operand, and convolutions want that of x.
        return x + mixed.transpose(1, 2).view(x.shape)
