"""From names to an engine."""

from __future__ import annotations

from typing import Any

import torch

from dropmatch.drafting import Drafter, DraftModel, PromptLookup
from dropmatch.engines.hf.engine import Engine
from dropmatch.errors import ModelError, SettingError
from dropmatch.models.names import DRAFT_WEIGHTS, NO_DRAFT, PROMPT_LOOKUP


def load(
    target: str,
    draft: str | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    draft_weights: str = "auto",
    prepare: bool = True,
    trust_remote_code: bool = False,
) -> Engine:
    """Load a target and a drafter.

    Args:
        target: hub id, local folder, `.gguf` file, or a demo name such as "demo:qwen2.5-coder".
        draft: likewise, or "prompt-lookup", or "none" (plain decoding only); None takes the draft that belongs
            to a demo target, else none.
        dtype: "auto", "bfloat16", "float16", "float32" or a torch dtype, for both models.
        device: "cpu", "cuda", ...; None takes a GPU if there is one.
        draft_weights: "dense", or "int4" for a 4-bit copy of the draft's weights on a CPU (strict decoding stays
            lossless; see `dropmatch.models.draft_weights`); "auto" takes int4 where it can be had.
        prepare: make the models fast for decoding (see `dropmatch.models.prepare`).
        trust_remote_code: run model code from the hub.

    Raises:
        SettingError: an unknown value of draft_weights, or int4 without a draft model.
        ModelError: a model cannot be found, fetched or used, or the two do not share a tokenizer.
    """
    if draft_weights not in DRAFT_WEIGHTS:
        raise SettingError(f"draft_weights must be one of: {', '.join(DRAFT_WEIGHTS)}; got {draft_weights!r}")
    if draft_weights == "int4" and draft in (PROMPT_LOOKUP, NO_DRAFT):
        raise SettingError(f"draft_weights='int4' needs a draft model, and draft is {draft!r}: leave one of them out")
    from dropmatch import models
    from dropmatch.models.draft_weights import can_quantize_model, quantize_draft
    from dropmatch.models.prepare import prepare_for_decoding

    loaded = models.load(target, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    if prepare:
        prepare_for_decoding(loaded.model)
    draft = draft or models.default_draft(target)
    drafter: Drafter | None = None
    if draft == PROMPT_LOOKUP:
        drafter = PromptLookup()
    elif draft not in (None, NO_DRAFT):
        assert draft is not None
        small = models.load(draft, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        check_same_tokenizer(loaded.tokenizer, small.tokenizer)
        if draft_weights == "int4" or (draft_weights == "auto" and prepare and can_quantize_model(small.model)):
            quantize_draft(small.model)
        if prepare:
            prepare_for_decoding(small.model)
        drafter = DraftModel(small.model)
    return Engine(loaded.model, loaded.tokenizer, drafter)


def check_same_tokenizer(target: Any, draft: Any) -> None:
    """Refuse a draft that counts tokens differently.

    Raises:
        ModelError: the vocabularies differ.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours != theirs:
        differing = sum(ours.get(token) != i for token, i in theirs.items())
        raise ModelError(
            f"target and draft have different tokenizers ({len(ours)} and {len(theirs)} tokens, {differing} of "
            "the draft's have another id in the target): use a draft of the target's family, or 'prompt-lookup'"
        )
