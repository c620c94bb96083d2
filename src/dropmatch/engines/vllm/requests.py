"""The settings of the requests that a model runner holds."""

from __future__ import annotations

from typing import Any

from dropmatch.acceptance.registry import get_rule
from dropmatch.config import AcceptanceConfig
from dropmatch.engines.vllm.settings import request_config


class RequestSettings:
    """Acceptance settings by request id, read from a request's parameters once.

    Args:
        runner: whose `requests` holds the parameters: vLLM's V1 model runner, or a stand-in.
        default: of requests that name none; None is off.
        vllm_config: vLLM's `VllmConfig`.
    """

    def __init__(self, runner: Any, default: AcceptanceConfig | None, vllm_config: Any) -> None:
        self._runner = runner
        self._default = default
        self._vllm_config = vllm_config
        self._known: dict[str, AcceptanceConfig | None] = {}

    def of(self, request: str) -> AcceptanceConfig | None:
        """The settings of a request; None is off.

        Raises:
            SettingError: they are not valid; the front end has refused such a request before it came here.
        """
        if request not in self._known:
            self._known = {name: config for name, config in self._known.items() if name in self._runner.requests}
            params = self._runner.requests[request].sampling_params
            extra = None if params is None else params.extra_args
            self._known[request] = request_config(extra, self._default, self._vllm_config)
        return self._known[request]

    def seed(self, request: str) -> int:
        """Seed of a request's dropout masks: its own mask seed, else its seed, else 0."""
        config, params = self.of(request), self._runner.requests[request].sampling_params
        if config is not None and config.mask_seed is not None:
            return config.mask_seed
        return 0 if params is None or params.seed is None else int(params.seed)

    def temperature(self, request: str) -> float:
        """Temperature of a request; 0 is greedy."""
        params = self._runner.requests[request].sampling_params
        return 0.0 if params is None else float(params.temperature)

    def any_compares(self) -> bool:
        """Whether a request of the current batch has a rule that compares distributions."""
        configs = (self.of(name) for name in self._runner.input_batch.req_ids)
        return any(config is not None and get_rule(config.rule).needs_draft_distribution for config in configs)
