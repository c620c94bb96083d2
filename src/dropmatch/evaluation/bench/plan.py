"""What a benchmark runs: tasks x rules with their settings, from a YAML file or a command line.

target: demo:qwen2.5-coder
draft: null                    # the demo target's own
engine: hf                     # or vllm, in batches
batch: 10                      # vllm: requests at once
max_tokens: 256                # at most; a task's own limit, if this is left out
limit: 100                     # examples a task; of a group of tasks, of all together
tasks:
  - gsm8k_cot                  # a task of lm-evaluation-harness
  - humaneval                  # EvalPlus
  - data/prompts.jsonl         # open-ended prompts
turns: null                    # of conversations, so many turns; all
raw: false                     # true: texts to be continued, for models without a chat template
rules: [strict, "js:p=0.3"]    # one cell each
grid:                          # and every combination of these
  rule: [js, naive]
  p: [0.1, 0.2, 0.3]
  L: [5, 10]
seeds: [0, 1, 2]               # mask seeds of sampled verdicts; each is a cell
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from dropmatch.acceptance import get_rule
from dropmatch.config import AcceptanceConfig, DraftConfig
from dropmatch.errors import SettingError
from dropmatch.rule_text import parse_rule, rule_text

STRICT = "strict"
ENGINES = ("hf", "vllm")
DEFAULT_TOKENS = 256


@dataclass(frozen=True)
class TaskChoice:
    """A task of a plan.

    Attributes:
        name: of the harness, or a path of a JSONL file of prompts.
        data: a JSONL file to take its examples from, where they do not come from the hub.
        limit: examples, None is the plan's own.
        max_tokens: likewise.
        fewshot_data: a JSONL file to draw its few-shots from, where it has data and draws them from a set of its own.
        num_fewshot: how many few-shots, None is the task's own number.
        metric, filter: by which of the harness's it is scored, None is the task's first (see `primary`).
        unsafe_code: allow a task of the harness that runs the texts as programs.

    Raises:
        SettingError: a value that will not do.
    """

    name: str
    data: str | None = None
    limit: int | None = None
    max_tokens: int | None = None
    fewshot_data: str | None = None
    num_fewshot: int | None = None
    metric: str | None = None
    filter: str | None = None
    unsafe_code: bool = False

    def __post_init__(self) -> None:
        for name in ("name", "data", "fewshot_data", "metric", "filter"):
            value = getattr(self, name)
            if value is None and name != "name":
                continue
            if not isinstance(value, str) or not value:
                raise SettingError(f"a task's {name} must be a text, got {value!r}")
        if not isinstance(self.unsafe_code, bool):
            raise SettingError(f"{self.name}: unsafe_code must be true or false, got {self.unsafe_code!r}")
        if self.name.endswith((".jsonl", ".json")):  # one file is one task, whichever way its path is written
            object.__setattr__(self, "name", os.path.normpath(self.name))
        _check_counts(f"{self.name}: ", limit=self.limit, max_tokens=self.max_tokens)
        shots = self.num_fewshot
        if shots is not None and (not isinstance(shots, int) or isinstance(shots, bool) or shots < 0):
            raise SettingError(f"{self.name}: num_fewshot must be an integer of at least 0, got {shots!r}")


@dataclass(frozen=True)
class Plan:
    """Everything that decides about a benchmark's records.

    Attributes:
        target, draft: names of the models.
        engine: "hf" or "vllm".
        batch: requests at once, with vLLM.
        dtype, draft_weights, device: as the engine takes them.
        tasks: what to run.
        rules: texts of rules, one cell each; strict is always among them, since all are compared with it.
        limit: examples a task; None is all.
        max_tokens: the most tokens an example; None is the task's own limit, or DEFAULT_TOKENS where it has none.
        raw: prompts are texts to be continued, not chat messages.
        turns: of conversations, at most so many turns; None is all.
        log_likelihood: of open-ended tasks, also what the target gives the texts.
    """

    target: str
    draft: str | None = None
    engine: str = "hf"
    batch: int = 10
    dtype: str = "auto"
    draft_weights: str = "auto"
    device: str | None = None
    tasks: tuple[TaskChoice, ...] = ()
    rules: tuple[str, ...] = (STRICT,)
    limit: int | None = None
    max_tokens: int | None = None
    raw: bool = False
    turns: int | None = None
    log_likelihood: bool = True

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise SettingError(f"engine must be one of: {', '.join(ENGINES)}; got {self.engine!r}")
        if self.batch is None:
            raise SettingError("batch must be an integer of at least 1: leave it out for its default")
        _check_counts("", batch=self.batch, max_tokens=self.max_tokens, limit=self.limit, turns=self.turns)
        for name, flag in (("raw", self.raw), ("log_likelihood", self.log_likelihood)):
            if not isinstance(flag, bool):
                raise SettingError(f"{name} must be true or false, got {flag!r}")
        # what the chosen engine would not look at must not be thought to matter
        unused = ("batch",) if self.engine == "hf" else ("draft_weights", "device")
        for name in unused:
            if getattr(self, name) != getattr(Plan, name):
                raise SettingError(
                    f"{name}={getattr(self, name)!r} has no meaning with engine={self.engine!r}: leave it out, or "
                    "choose the other engine"
                )
        if not self.tasks:
            raise SettingError("a benchmark needs at least one task: give tasks, or --task")
        for text in self.rules:
            options(text)

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """Settings by name from a YAML file, for `from_values`.

        Raises:
            SettingError: the file cannot be read, or says something that is no plan.
        """
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingError(f"cannot read the plan {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SettingError(f"cannot read the plan {path}: it is no UTF-8 text") from error
        except yaml.YAMLError as error:
            raise SettingError(f"{path}: no valid YAML ({error})") from error
        if not isinstance(values, Mapping):
            raise SettingError(f"{path}: expected settings by name, as in 'tasks: [gsm8k_cot]'")
        try:
            _check_names(values)
        except SettingError as error:
            raise SettingError(f"{path}: {error}") from None
        return dict(values)

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> Plan:
        """From settings by name, `grid` and `seeds` among them.

        Raises:
            SettingError: a name that is none, or a value that will not do.
        """
        _check_names(values)
        rest = dict(values)
        if not isinstance(rest.get("target"), str) or not rest["target"]:
            raise SettingError(f"target must be the name of a model, got {rest.get('target')!r}")
        rules, grid, seeds = rest.pop("rules", ()), rest.pop("grid", {}), rest.pop("seeds", ())
        for name, value in (("tasks", rest.get("tasks", ())), ("rules", rules), ("seeds", seeds)):
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise SettingError(f"{name} must be a list, got {value!r}")
        for rule in rules:
            if not isinstance(rule, str):
                raise SettingError(f"a rule is a text as js:p=0.2, got {rule!r}")
        for seed in seeds:
            if not isinstance(seed, int) or isinstance(seed, bool):
                raise SettingError(f"seeds must be integers, got {seed!r}")
        rest["tasks"] = tuple(_task(task) for task in rest.get("tasks", ()))
        return Plan(**rest, rules=cells([*rules, *combinations(grid)], seeds))

    @staticmethod
    def load(folder: Path) -> Plan:
        """The plan that a benchmark's folder holds.

        Raises:
            SettingError: it holds none, or one that cannot be read.
        """
        path = folder / "plan.json"
        if not path.exists():
            raise SettingError(f"{folder} holds no benchmark: name the --out folder of dropmatch bench")
        try:
            return Plan.of_json(path.read_text(encoding="utf-8"))
        except (OSError, TypeError, KeyError, ValueError) as error:
            raise SettingError(f"cannot read {path}: {error}") from error

    def to_json(self) -> str:
        """For `of_json`."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1) + "\n"

    @staticmethod
    def of_json(text: str) -> Plan:
        """Of what `to_json` gives, or a benchmark's folder keeps."""
        values = json.loads(text)
        values.pop("cells", None)  # what `in_full` said when they were run
        values["tasks"] = tuple(TaskChoice(**task) for task in values["tasks"])
        values["rules"] = tuple(values["rules"])
        return Plan(**values)

    def task(self, choice: TaskChoice) -> TaskChoice:
        """A task's settings with the plan's where it has none."""
        return replace(choice, limit=choice.limit or self.limit, max_tokens=choice.max_tokens or self.max_tokens)


def parse_tasks(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Tasks of a command line: NAME, or NAME=FILE to take its examples from there."""
    found = []
    for text in texts:
        name, equals, data = text.partition("=")
        found.append({"name": name, "data": data if equals else None})
    return found


def with_setting(tasks: Sequence[Any], name: str, values: Sequence[str | bool]) -> list[Any]:
    """Tasks of a plan with what a command line says of one of their settings.

    Args:
        tasks: as a plan file has them.
        name: of the setting.
        values: VALUE for all tasks, or TASK=VALUE for one.

    Raises:
        SettingError: there is no such task.
    """
    found = [{"name": task} if isinstance(task, str) else task for task in tasks]
    names = [task.get("name") for task in found if isinstance(task, Mapping)]
    for given in values:
        task, equals, value = given.rpartition("=") if isinstance(given, str) else ("", "", given)
        if equals and task not in names:
            raise SettingError(f"{name}: there is no task {task!r} here; there are {', '.join(map(str, names))}")
        found = [
            {**each, name: value} if isinstance(each, Mapping) and (not equals or each.get("name") == task) else each
            for each in found
        ]
    return found


def combinations(grid: Mapping[str, Any]) -> list[str]:
    """Texts of all combinations of a grid; `rule` must be in it.

    Raises:
        SettingError: it is no grid.
    """
    if not grid:
        return []
    if not isinstance(grid, Mapping) or "rule" not in grid:
        raise SettingError("grid needs the rules: rule: [js, naive], and lists of settings beside it, as p: [0.1, 0.3]")
    columns = {name: value if isinstance(value, list) else [value] for name, value in grid.items()}
    rules = columns.pop("rule")
    return [
        ":".join([rule, *(f"{name}={value}" for name, value in zip(columns, row, strict=True))])
        for rule in rules
        for row in itertools.product(*columns.values())
    ]


def cells(texts: Iterable[str], seeds: Sequence[int]) -> tuple[str, ...]:
    """The cells of some rules: strict for each draft length first, and one for each seed of a sampled verdict.

    Of rules that mean the same the first is kept.

    Raises:
        SettingError: a text is none of a rule, or there are seeds and none that takes them.
    """
    found: dict[str, None] = {}
    chosen = [_usual_length(parse_rule(text)) for text in texts]
    seeded = [each for each in chosen if _has_seeds(each) and "mask_seed" not in each]
    if seeds and not seeded:
        raise SettingError(
            "seeds are of sampled verdicts, and none of these rules has one: write for example js:sampled, or leave "
            "seeds out"
        )
    lengths = list(dict.fromkeys(each.get("draft_length") for each in chosen)) or [None]
    for length in sorted(lengths, key=lambda length: length == 0):  # plain decoding, which comes after what drafts
        found[rule_text({"rule": STRICT, "draft_length": length})] = None
    for each in chosen:
        for seed in seeds if seeds and each in seeded else [each.get("mask_seed")]:
            found[rule_text({**each, "mask_seed": seed})] = None
    meant: dict[str, str] = {}
    for text in found:
        meant.setdefault(meaning(text), text)
    return tuple(meant.values())


def _usual_length(rule: dict[str, Any]) -> dict[str, Any]:
    """A rule without the draft length that it would have anyway, so that there is one strict cell of it."""
    usual = rule.get("draft_length") == DraftConfig.draft_length
    return {name: value for name, value in rule.items() if not (usual and name == "draft_length")}


def options(text: str) -> tuple[AcceptanceConfig, DraftConfig]:
    """A cell's settings.

    Raises:
        SettingError: it cannot be.
    """
    values = parse_rule(text)
    names = {each.name for each in fields(DraftConfig)}
    draft = DraftConfig.from_options({name: value for name, value in values.items() if name in names})
    acceptance = {name: value for name, value in values.items() if name not in names}
    return AcceptanceConfig.from_options(acceptance), draft


def in_full(text: str) -> dict[str, Any]:
    """All of a cell's settings by name, its defaults among them, which another version may have others of."""
    acceptance, draft = options(text)
    return {**asdict(acceptance), "token_floor": acceptance.floor, **asdict(draft)}


def meaning(text: str) -> str:
    """What decides about a cell's texts and counts, the same of cells that are only written differently.

    What the rule does not look at is left out, and what is "auto" is as where rows of the LM head can be gathered:
    whether they can, only the model knows.

    Raises:
        SettingError: the text is none of a cell.
    """
    acceptance, draft = options(text)
    if not draft.draft_length:  # plain decoding asks no rule
        return json.dumps({"draft_length": 0})
    rule, full = get_rule(acceptance.rule), in_full(text)
    looked_at = ["rule", *(each.name for each in rule.parameters), *asdict(draft)]
    if not rule.lossless:
        looked_at += ["token_floor", "evaluation"]
    if rule.needs_heads:
        denoised = acceptance.denoises(can_gather=True)
        full["verdict"] = "denoised" if denoised else "sampled"
        full["heads_mode"] = "gaussian" if acceptance.wants_gaussian else "dropout"
        full["support"] = "shortlist" if acceptance.support == "auto" else acceptance.support
        looked_at += ["heads", "dropout", "verdict", "heads_mode", "strictness" if denoised else "mask_seed"]
        looked_at += ["gaussian_tokens"] if acceptance.wants_gaussian else ["support"]
        if not acceptance.wants_gaussian and full["support"] == "shortlist":
            looked_at.append("shortlist_size")
    # 1 and 1.0 are equal
    found = {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in full.items()}
    return json.dumps({name: found[name] for name in sorted(looked_at)})


def baseline(text: str) -> str:
    """The strict cell that a cell is compared with: of the same draft length."""
    return rule_text({"rule": STRICT, "draft_length": parse_rule(text).get("draft_length")})


def without_seed(text: str) -> str:
    """The text of a rule less its mask seed: the same for all seeds of it."""
    return rule_text({**parse_rule(text), "mask_seed": None})


def _has_seeds(rule: Mapping[str, Any]) -> bool:
    """Whether a rule draws its heads by a seed."""
    return options(rule_text(rule))[0].verdict == "sampled" and get_rule(rule["rule"]).needs_heads


def _check_counts(where: str, **counts: Any) -> None:
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise SettingError(f"{where}{name} must be an integer of at least 1, got {value!r}")


def _check_names(values: Mapping[str, Any]) -> None:
    known = [*(each.name for each in fields(Plan)), "grid", "seeds"]
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=3)
            meant = f"did you mean {', '.join(close)}? " if close else ""
            raise SettingError(f"unknown setting {name!r}; {meant}there are {', '.join(known)}")


def _task(value: Any) -> TaskChoice:
    if isinstance(value, str):
        return TaskChoice(value)
    known = [each.name for each in fields(TaskChoice)]
    if not isinstance(value, Mapping) or "name" not in value or set(value) - set(known):
        raise SettingError(f"a task is a name, or settings out of {', '.join(known)}; got {value!r}")
    return TaskChoice(**value)
