"""A 4-bit copy of a draft model's weights for its steps of a row or a few on a CPU.

A draft is only a proposal: what its weights are rounded to changes how often it is accepted, never what strict
decoding emits. A step of a row costs the time to read the weights, and 4-bit ones are read in a third of the
time. Blocks of rows (the prompt) still use the bf16 weights, whose GEMM is faster there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dropmatch.errors import ModelError
from dropmatch.models.packing import PackedLinear, can_pack

GROUP = 32  # weights that share a scale and an offset
_LEVELS = 15
_ROWS = 3  # blocks up to this many rows use the 4-bit copy; from about 5 on bf16 is faster


class Int4RowLinear(nn.Module):
    """A packed linear layer with a 4-bit copy for a few rows.

    Args:
        dense: the packed bf16 layer, used for blocks of rows.
        weight: its weight [out, in] bf16, `in` a multiple of GROUP.
    """

    def __init__(self, dense: PackedLinear, weight: Tensor) -> None:
        super().__init__()
        self.dense = dense
        grouped = weight.detach().float().unflatten(1, (-1, GROUP))  # [out, in / GROUP, GROUP]
        low, high = grouped.amin(dim=2), grouped.amax(dim=2)  # [out, in / GROUP]
        # rounded to the precision that they are kept in before the codes are computed with them
        scale = ((high - low) / _LEVELS).clamp_min(torch.finfo(torch.bfloat16).tiny).bfloat16()
        middle = (low + 8 * scale.float()).bfloat16()  # the kernel reads (code - 8) * scale + middle
        codes = (grouped - middle.float()[..., None]) / scale.float()[..., None] + 8
        codes = codes.round_().clamp_(0, _LEVELS).to(torch.int32).flatten(1)  # [out, in]
        self.codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
        self.scales = torch.stack([scale.t(), middle.t()], dim=-1).contiguous()  # [in / GROUP, out, 2]

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        if rows.shape[0] > _ROWS:
            return self.dense(inputs)
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.codes, GROUP, self.scales)
        if self.dense.bias is not None:
            out = out + self.dense.bias
        return out.unflatten(0, inputs.shape[:-1])


def can_quantize(linear: Any) -> bool:
    """Whether a layer can have a 4-bit copy: a plain linear layer in bf16 on a CPU whose sizes the kernel takes."""
    return (
        type(linear) is nn.Linear
        and linear.weight.device.type == "cpu"
        and linear.weight.dtype is torch.bfloat16
        and linear.in_features % GROUP == 0
        and linear.out_features % 16 == 0
        and can_pack(linear.weight)
    )


def can_quantize_model(model: Any) -> bool:
    """Whether all linear layers of a model can have a 4-bit copy, and packed bf16 weights beside it."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return bool(layers) and all(can_quantize(layer) for layer in layers)


def quantize_draft(model: Any) -> int:
    """Give every linear layer but the LM head a 4-bit copy, in place; returns how many.

    The head decides between close candidates and keeps its precision.

    Raises:
        ModelError: no layer can have one (not bf16, not on a CPU, or already quantised).
    """
    head = model.get_output_embeddings()
    targets = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if child is not head and can_quantize(child)
    ]
    if not targets:
        raise ModelError(
            "draft_weights='int4' needs a draft model in bfloat16 on a CPU with plain linear layers: "
            "use draft_weights='dense'"
        )
    for parent, name, child in targets:
        weight = child.weight
        setattr(parent, name, Int4RowLinear(PackedLinear(child, keep_weight=False), weight))
        child.weight = None
    return len(targets)
