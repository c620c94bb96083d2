"""dropmatch: speculative decoding with lossy acceptance, judged by Monte Carlo dropout on the LM head.

engine = dropmatch.load("demo:qwen2.5-coder")
print(engine.generate("def fib(n):", rule="js", max_tokens=64).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "AcceptanceConfig",
    "DraftConfig",
    "DropMatchError",
    "Engine",
    "GenerationResult",
    "ModelError",
    "SamplingConfig",
    "SettingError",
    "generate",
    "load",
]

if TYPE_CHECKING:
    from dropmatch.config import AcceptanceConfig, DraftConfig, SamplingConfig
    from dropmatch.engines.hf.custom_generate import generate
    from dropmatch.engines.hf.engine import Engine
    from dropmatch.engines.hf.load import load
    from dropmatch.engines.hf.result import GenerationResult
    from dropmatch.errors import DropMatchError, ModelError, SettingError

_HOMES = {
    "AcceptanceConfig": "dropmatch.config",
    "DraftConfig": "dropmatch.config",
    "DropMatchError": "dropmatch.errors",
    "Engine": "dropmatch.engines.hf.engine",
    "GenerationResult": "dropmatch.engines.hf.result",
    "ModelError": "dropmatch.errors",
    "SamplingConfig": "dropmatch.config",
    "SettingError": "dropmatch.errors",
    "generate": "dropmatch.engines.hf.custom_generate",
    "load": "dropmatch.engines.hf.load",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import dropmatch` and `dropmatch --help` stay quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dropmatch' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
