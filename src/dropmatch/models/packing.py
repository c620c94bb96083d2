"""Linear layers with prepacked weights on a CPU.

A decoding step reads every weight once for a handful of rows. The plain layer's GEMM reads a row-major bf16
weight at some 60 % of the memory bandwidth; oneDNN's blocked layout, made once here, reads it at 85 to 100 %.
Products are accumulated in fp32 either way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# the layout is chosen for a verification of a few rows; other row counts use it too
PACKED_FOR_ROWS = 6


class PackedLinear(nn.Module):
    """`nn.Linear` whose weight lies in oneDNN's blocked layout.

    Args:
        linear: the layer to pack, [out, in] in bf16 or fp16 on a CPU.
        keep_weight: keep the row-major weight beside the packed one (for a tied embedding, or so that rows
            can be gathered); otherwise `weight` is None.
    """

    def __init__(self, linear: nn.Linear, *, keep_weight: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        self.weight = linear.weight if keep_weight else None
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(inputs, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


def can_pack(weight: Tensor) -> bool:
    """Whether a weight [out, in] can be packed on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def pack_linears(model: Any) -> int:
    """Replace every plain linear layer of a model on a CPU by a packed one, in place.

    Layers that are no plain `nn.Linear` (quantised, adapted) stay as they are. The LM head keeps its
    row-major weight beside the packed one.

    Returns:
        How many layers were packed: 0 where the dtype, the device or the processor does not allow it.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    targets = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and can_pack(child.weight)
    ]
    packed: dict[nn.Linear, PackedLinear] = {}
    for parent, name, child in targets:
        if child not in packed:  # a layer may stand in more than one place
            packed[child] = PackedLinear(child, keep_weight=child is head)
            if child is not head:
                child.weight = None  # type: ignore[assignment]  # free the row-major copy at once
        setattr(parent, name, packed[child])
    return len(packed)
