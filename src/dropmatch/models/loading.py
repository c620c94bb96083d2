"""From a model name to a model and tokenizer in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropmatch.errors import ModelError
from dropmatch.models import resources
from dropmatch.models.folder import Weights, check_folder, encoder_decoder, read_config
from dropmatch.models.progress import Reporter
from dropmatch.models.store import Kind, classify, fetch

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class LoadedModel:
    """A decoder-only model in evaluation mode, its tokenizer, and where they came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    path: Path
    dtype: torch.dtype


def load(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    progress: bool | Reporter = True,
) -> LoadedModel:
    """Loads a model by name: a hub id, a local folder, a .gguf file, or a demo model.

    `dtype`: "auto" keeps the dtype that the weights are stored in, but for float16 on a CPU, which becomes
    bfloat16; or bfloat16, float16, float32, by name or as a torch.dtype.
    `device`: None is the GPU if there is one, else the CPU.
    `trust_remote_code`: run the Python code that the model's repository carries. Off, unless asked for.

    Raises ModelError as `fetch` does, and when the dtype or device is not known or not there, the model
    does not fit in memory, is no decoder-only model, needs code that is not trusted, or lacks weights.
    """
    target = _device(device)
    wanted = _dtype_name(dtype)
    kind = classify(name)
    stored = wanted if kind in (Kind.DEMO, Kind.GGUF) else "auto"  # the dtype a GGUF is converted to
    path = fetch(name, dtype=stored, progress=progress, trust_remote_code=trust_remote_code)
    weights = check_folder(path)
    config = read_config(path)
    quantised = "quantization_config" in config
    chosen = _choose_dtype(wanted, weights, target, quantised)
    _need_room(weights, chosen, target, name)
    with no_bars():
        model, tokenizer = _load_folder(path, name, chosen, target, trust_remote_code, config)
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, name=name, path=path, dtype=model.dtype)


def _device(device: str | torch.device | None) -> torch.device:
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"device {device!r} is not known; choose cpu or cuda.") from error
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was asked for, but torch sees no GPU. Use device='cpu', or leave it out.")
    return target


def _dtype_name(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name != "auto" and name not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} is not known; choose auto, {', '.join(_DTYPES)}.")
    return name


def _choose_dtype(wanted: str, weights: Weights, device: torch.device, quantised: bool) -> str:
    if wanted != "auto":
        return wanted
    if quantised or weights.dtype is None:
        return "auto"  # the quantiser knows
    if weights.dtype == "float16" and device.type == "cpu":
        return "bfloat16"  # as small, and CPUs compute in it
    return weights.dtype


def _need_room(weights: Weights, dtype: str, device: torch.device, name: str) -> None:
    import torch

    nbytes = weights.bytes_in(_DTYPES.get(dtype, 2))
    if device.type != "cuda":
        resources.need_memory_to_load(nbytes, name)
        return
    free = torch.cuda.mem_get_info(device)[0]
    if nbytes * resources.LOAD_FACTOR > free:
        raise ModelError(
            f"not enough GPU memory to load {name}: {resources.human(nbytes * resources.LOAD_FACTOR)} "
            f"needed, {resources.human(free)} free. Choose a smaller model or dtype, or device='cpu'."
        )


def _load_folder(
    path: Path, name: str, dtype: str, device: torch.device, trust: bool, config: dict[str, Any]
) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if config.get("auto_map") and not trust and not _known_type(config):
        raise ModelError(
            f"{name} needs Python code that its repository carries. If you trust it, pass trust_remote_code=True."
        )
    placement = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        parsed = AutoConfig.from_pretrained(str(path), trust_remote_code=trust)
        if getattr(parsed, "is_encoder_decoder", False):  # some types say so by default, not in the file
            raise encoder_decoder(name, str(parsed.model_type))
        model, info = AutoModelForCausalLM.from_pretrained(
            str(path),
            config=parsed,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust,
            output_loading_info=True,
            **placement,
        )
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust)
    except ModelError:
        raise
    except Exception as error:  # transformers raises many kinds; all of them are about this model
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise ModelError(f"{name} cannot be loaded as a decoder-only model: {reason[:400]}") from error
    missing = sorted(info.get("missing_keys") or ())
    if missing:  # transformers would fill them with random numbers
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"{name} is no whole decoder-only model: weights for {', '.join(missing[:3])}{more} are missing."
        )
    return model, tokenizer


@contextmanager
def no_bars() -> Iterator[None]:
    """No progress bars of transformers, which would fill a log: loading takes a second or two."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _known_type(config: dict[str, Any]) -> bool:
    from transformers import CONFIG_MAPPING

    return config.get("model_type") in CONFIG_MAPPING
