"""What one verdict takes at real sizes: no tensor of N × K × V elements is ever held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dropmatch

HEADS, VOCAB = 5, 151_936
MIB = 1 << 20
# two chunks' worth; all rows at once take 470 MiB over the full vocabulary and 185 MiB over the shortlist
BOUND = 128 * MIB

# VmHWM and not getrusage: the latter starts at the size of the process that started this one
SCRIPT = """
import sys
import torch
from dropmatch.acceptance import Evidence, judge
from dropmatch.config import AcceptanceConfig

torch.set_num_threads(2)
rows, heads, vocab, units = map(int, sys.argv[1:5])
support = sys.argv[5]


class Head:
    vocab_size, can_gather = vocab, True
    weight = torch.randn(vocab, units)

    def full(self, hidden):
        return hidden @ self.weight.T

    def gather(self, hidden, token_ids):
        return torch.bmm(hidden, self.weight[token_ids].transpose(1, 2))


def memory(field):
    status = open("/proc/self/status").read()
    return int(status.split(field + ":")[1].split()[0]) * 1024


def evidence(n):
    hidden = torch.randn(n, units)
    clean = Head().full(hidden)
    draft = clean + torch.randn(n, vocab)
    tokens = draft.argmax(dim=1)
    zeros = torch.zeros(n, dtype=torch.int64)
    return Evidence(hidden, clean, tokens, clean.argmax(dim=1), zeros, torch.arange(n), draft)


config = AcceptanceConfig(heads=heads, support=support)
with torch.no_grad():
    given = evidence(rows)
    before = memory("VmRSS")
    verdict = judge(given, config, Head())
assert verdict.accept.shape == (rows,)
print(memory("VmHWM") - before)
"""


def growth(rows: int, units: int, support: str) -> int:
    """How much the peak of a fresh process grows with one verdict, in bytes."""
    source = str(Path(dropmatch.__file__).parents[1])
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(rows), str(HEADS), str(VOCAB), str(units), support],
        # large blocks go back to the system at once, or the peak is what malloc made of the order of frees
        env={**os.environ, "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": str(MIB)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's peak memory from /proc")
@pytest.mark.parametrize(("rows", "units", "support"), [(24, 16, "full"), (50, 256, "shortlist")])
def test_peak_memory_of_a_verdict(rows: int, units: int, support: str) -> None:
    grown = growth(rows, units, support)
    assert grown < BOUND, f"{grown / MIB:.0f} MiB"
    assert grown > 4 * MIB  # or this measures nothing
