"""The tests of the vLLM plugin run where vLLM is installed: `make test-vllm`, in an environment of its own."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("vllm") else ["vllm"]
