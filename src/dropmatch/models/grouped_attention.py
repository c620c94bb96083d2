"""Grouped-query attention for a few query rows, without repeating keys and values.

With G key/value heads and R query heads for each, transformers' `sdpa` repeats keys and values R times where
the mask or the kernel asks for it. The R heads of a group see the same keys, so here they become R times as
many query rows of one head: the same products, each key and value read once.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

NAME = "dropmatch_grouped"
# longer query blocks (prefill) go to transformers' own function
MAX_QUERY_ROWS = 32


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' convention.

    Args:
        module: the attention module.
        query: [B, G * R, Q, D].
        key: [B, G, T, D].
        value: [B, G, T, D].
        attention_mask: [B, 1, Q, T] bool or additive; None lets the only query row see all keys.
        dropout: must be 0 at inference; others go to transformers' function.
        scaling: factor on the scores; None is 1 / sqrt(D).

    Returns:
        [B, Q, G * R, D] and None for the weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, rows, width = query.shape
    groups = key.shape[1]
    prefill = rows > MAX_QUERY_ROWS or (attention_mask is None and rows > 1)
    masked_by_head = attention_mask is not None and attention_mask.shape[1] != 1
    special = any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))
    if prefill or masked_by_head or special or dropout:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    repeats = heads // groups
    folded = query.reshape(batch, groups, repeats * rows, width)
    mask = None if attention_mask is None else attention_mask.repeat(1, 1, repeats, 1)  # [B, 1, R * Q, T]
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, rows, width).transpose(1, 2).contiguous(), None


def use_grouped_attention(model: Any) -> bool:
    """Switch a model that uses `sdpa` with grouped queries to this function; returns whether it did."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    config = model.config.get_text_config()
    grouped = (getattr(config, "num_key_value_heads", None) or 0) < getattr(config, "num_attention_heads", 0)
    if getattr(config, "_attn_implementation", None) != "sdpa" or not grouped:
        return False
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True
