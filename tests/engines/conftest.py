"""The tests of the vLLM plugin run where vLLM is installed: `make test-vllm`, in an environment of its own."""

import sys
from importlib.util import find_spec

collect_ignore = ["vllm", "vllm_v2"]
if find_spec("vllm"):
    # the V2 runner's tests switch Triton to its interpreter, so they have a process of their own
    collect_ignore = ["vllm"] if any("vllm_v2" in argument for argument in sys.argv) else ["vllm_v2"]
