"""What a measurement was made with: versions and machine."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from dropmatch import __version__


def versions() -> dict[str, str]:
    """Versions of what decides about the output."""
    found = {"dropmatch": __version__, "python": platform.python_version()}
    return found | {name: metadata.version(name) for name in ("torch", "transformers")}


def machine(device: Any) -> dict[str, Any]:
    """The processor, how many threads torch uses, and the device that the target runs on."""
    import torch

    found = {
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
