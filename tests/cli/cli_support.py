"""What the tests of the command line share: a tiny pair of models on disk, and ways to run commands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = ["<|end|>", "<unk>", "user", "system", "assistant", *(f"w{i}" for i in range(5, 160))]
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] == 'w13' %}{{ raise_exception('unlucky') }}{% endif %}"
    "{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Pair:
    """Folders of a tiny target, a draft that mostly agrees with it, and the target with a chat template."""

    target: str
    draft: str
    chat: str

    def args(self, *more: str) -> list[str]:
        """Options that choose the pair."""
        return ["--target", self.target, "--draft", self.draft, *more]


def build_tokenizer(template: str | None) -> Any:
    """One word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|end|>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


def build_pair(root: Path) -> Pair:
    """Save the models; random, but the same ones each time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    plain = build_tokenizer(None)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        initializer_range=0.4,
        tie_word_embeddings=False,
        eos_token_id=plain.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(11)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[plain.eos_token_id] = 0.0  # never the likeliest: texts end where a test says
    folders = Pair(*(str(root / name) for name in ("target", "draft", "chat")))
    model.save_pretrained(folders.target)
    model.save_pretrained(folders.chat)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
        model.lm_head.weight[plain.eos_token_id] = 0.0
    model.save_pretrained(folders.draft)
    for folder in (folders.target, folders.draft):
        plain.save_pretrained(folder)
    build_tokenizer(TEMPLATE).save_pretrained(folders.chat)
    return folders


def spawn(*args: str, **options: Any) -> subprocess.Popen[bytes]:
    """The command as a process of its own, that Ctrl-C reaches even if the test runner ignores it."""
    return subprocess.Popen(
        [sys.executable, "-m", "dropmatch.cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        **options,
    )


def bare(text: str) -> str:
    """Text without escape codes."""
    return ANSI.sub("", text)
