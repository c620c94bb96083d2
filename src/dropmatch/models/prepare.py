"""Make a loaded model fast for decoding, in place. What it computes stays the same up to rounding."""

from __future__ import annotations

from typing import Any

from dropmatch.models.grouped_attention import use_grouped_attention
from dropmatch.models.packing import pack_linears


def prepare_for_decoding(model: Any) -> None:
    """Pack the weights of linear layers (on a CPU that can), and share keys and values within a group.

    What a model or a processor does not allow is left as it is.
    """
    pack_linears(model)
    use_grouped_attention(model)
