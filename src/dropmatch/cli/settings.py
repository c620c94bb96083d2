"""From the values of options to checked settings, before any model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from dropmatch.config import AcceptanceConfig, DraftConfig, SamplingConfig
from dropmatch.errors import SettingError
from dropmatch.models.names import DRAFT_WEIGHTS, NO_DRAFT, PROMPT_LOOKUP
from dropmatch.rule_text import parse_rule

DTYPES = ("auto", "bfloat16", "float16", "float32")

ConfigT = TypeVar("ConfigT", AcceptanceConfig, DraftConfig, SamplingConfig)


@dataclass(frozen=True)
class Settings:
    """All that decides about a generation, but for the prompt.

    Attributes:
        target: name of the target model.
        draft: name of the draft model, or "prompt-lookup"; None is the demo target's own, or none.
        dtype: number format of both.
        draft_weights: "auto", "dense" or "int4".
        device: where they run; None is the GPU if there is one.
        raw: continue the prompt without a chat template.
        system: system message; None is none.
        stop: texts that end the generation.
        acceptance: how draft tokens are judged.
        drafting: how they are proposed.
        sampling: how the target's tokens are chosen, and when to stop.
    """

    target: str
    draft: str | None
    dtype: str
    draft_weights: str
    device: str | None
    raw: bool
    system: str | None
    stop: tuple[str, ...]
    acceptance: AcceptanceConfig
    drafting: DraftConfig
    sampling: SamplingConfig

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> Settings:
        """Build from a command's option values by name; what it does not offer keeps its default.

        Raises:
            SettingError: a value is out of range, or two cannot be had together.
            ModelError: a model's name is of no known form, or names a file that cannot be used.
        """
        values = with_rule_text(values)
        dtype, raw, system = values["dtype"], values["raw"], values.get("system")
        if dtype not in DTYPES:
            raise SettingError(f"dtype must be one of: {', '.join(DTYPES)}; got {dtype!r}")
        if values["draft_weights"] not in DRAFT_WEIGHTS:
            allowed = ", ".join(DRAFT_WEIGHTS)
            raise SettingError(f"draft_weights must be one of: {allowed}; got {values['draft_weights']!r}")
        if raw and system is not None:
            raise SettingError("--system is a chat message and --raw sends none: leave one of them out")
        stop = tuple(values.get("stop") or ())
        if "" in stop:
            raise SettingError("stop must be non-empty strings")
        settings = cls(
            target=values["target"],
            draft=values.get("draft"),
            dtype=dtype,
            draft_weights=values["draft_weights"],
            device=values.get("device"),
            raw=raw,
            system=system,
            stop=stop,
            drafting=_part(DraftConfig, values),
            sampling=_part(SamplingConfig, values),
            acceptance=_part(AcceptanceConfig, values),  # last: the registry of rules takes a second to import
        )
        settings._check_models()
        if "rule" in values:
            settings.check_rule(settings.acceptance, settings.drafting)
        return settings

    def _check_models(self) -> None:
        """Refuse names of no known form, which would otherwise show after the first model was loaded."""
        from dropmatch import models

        models.where(self.target)
        if self.draft not in (None, PROMPT_LOOKUP, NO_DRAFT):
            assert self.draft is not None
            models.where(self.draft)
        if self.drafting.draft_length and self.drafter is None:
            raise SettingError(
                f"{self.target} has no drafter: give --draft MODEL or --draft {PROMPT_LOOKUP}, or decode "
                "plainly with --draft-length 0"
            )

    @property
    def drafter(self) -> str | None:
        """The drafter's name, the target's own resolved; None if there is none."""
        from dropmatch import models

        return None if self.draft == NO_DRAFT else self.draft or models.default_draft(self.target)

    def check_rule(self, acceptance: AcceptanceConfig, drafting: DraftConfig) -> None:
        """Refuse a rule that this drafter cannot serve.

        Raises:
            SettingError: it compares distributions and the drafter has none, or it needs longer drafts.
        """
        from dropmatch.acceptance import get_rule

        if drafting.draft_length:
            rule = get_rule(acceptance.rule)
            rule.check_drafter(self.drafter != PROMPT_LOOKUP, PROMPT_LOOKUP)
            rule.check_window(acceptance.window, drafting.draft_length)

    def options(self) -> dict[str, Any]:
        """The settings as the engine takes them."""
        return {**asdict(self.acceptance), **asdict(self.drafting), **asdict(self.sampling)}

    def as_dict(self) -> dict[str, Any]:
        """Everything by name, ready for JSON."""
        names = ("target", "dtype", "draft_weights", "device", "raw", "system")
        own = {name: getattr(self, name) for name in names}
        return {**own, "draft": self.drafter, "stop": list(self.stop), **self.options()}


def with_rule_text(values: Mapping[str, Any]) -> dict[str, Any]:
    """Option values with what the text of --rule says (js:p=0.2) in its place.

    Raises:
        SettingError: the text is not of that form, or an option is given both ways.
    """
    values = dict(values)
    if "rule" not in values:
        return values
    defaults = {field.name: field.default for kind in (AcceptanceConfig, DraftConfig) for field in fields(kind)}
    for name, value in parse_rule(values["rule"]).items():
        if name != "rule" and values.get(name, defaults[name]) not in (defaults[name], value):
            raise SettingError(f"{name} is given twice: {values[name]!r}, and {value!r} in --rule {values['rule']}")
        values[name] = value
    return values


def _part(kind: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    return kind(**{field.name: values[field.name] for field in fields(kind) if field.name in values})
