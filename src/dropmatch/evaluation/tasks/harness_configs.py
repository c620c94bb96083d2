"""The settings of the harness's tasks by name, and which of them can be decoded; no data are loaded here."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dropmatch.errors import SettingError
from dropmatch.evaluation.harness_library import cache_if_unreachable, need_punkt, quiet, reason, require
from dropmatch.evaluation.tasks.prompts import where_to_find

Config = dict[str, Any]
GENERATE = "generate_until"
BUDGETS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given counts
FLEXIBLE = "flexible-extract"  # takes the last number of a text; models seldom keep to the strict format
_SUFFIXES = ("generative", "gen", "chat", "cot", "cot_zeroshot", "cot_fewshot", "generative_n_shot")


def configs_of(name: str, unsafe_code: bool = False) -> list[Config]:
    """The settings of a task, or of all tasks of a group or tag, each of which can be decoded.

    Args:
        name: as the harness has it, or a path of a task's YAML file.
        unsafe_code: also tasks whose scoring runs the texts as programs.

    Raises:
        SettingError: there is no such task, a package or file that it needs is missing, or it cannot be decoded
            greedily, text to text.
    """
    if unsafe_code:  # the metric of such tasks wants to be told once more
        os.environ.setdefault("HF_ALLOW_CODE_EVAL", "1")
    found = collect(name, lambda config: _check(config, name, unsafe_code))
    if any("ifeval" in config["task"] for config in found):
        need_punkt()
    return found


def collect(name: str, check: Callable[[Config], None] = lambda config: None) -> list[Config]:
    """The settings of a task, or of all tasks of a group or tag.

    Args:
        name: as the harness has it, or a path of a task's YAML file.
        check: told of each before its functions are imported.

    Raises:
        SettingError: there is no such task, or a package or file that it needs is missing.
    """
    require()
    from lm_eval.tasks._factory import TaskFactory
    from lm_eval.tasks._index import TaskIndex

    class Named:
        """Stands for a task in a group."""

        def __init__(self, task_name: str) -> None:
            self.task_name = task_name

    class Collector(TaskFactory):
        """Notes the settings of tasks that it would build, since building loads data."""

        def _build_task(self, entry: Any, overrides: Any) -> Any:
            check({**(entry.cfg or {}), **(overrides or {}), "task": entry.name})
            config = self._load_full_config(entry, overrides)
            check(config)
            found.append(config)
            return Named(config["task"])

    found: list[Config] = []
    index = task_manager().task_index
    try:
        entry = index.get(name) or (TaskIndex.entry_from_path(Path(name)) if Path(name).suffix == ".yaml" else None)
        if entry is None:
            raise SettingError(no_such_task(name))
        with quiet(), cache_if_unreachable():
            Collector().build(entry, registry=index)
    except SettingError:
        raise
    except ImportError as error:
        raise SettingError(f"the task {name} needs a package that is not installed ({reason(error)})") from error
    except Exception as error:
        raise SettingError(f"the task {name} cannot be read ({reason(error)})") from error
    return found


@cache
def task_manager() -> Any:
    """The harness's list of tasks, which takes seconds to read."""
    from lm_eval.tasks import TaskManager

    with quiet():
        return TaskManager()


def no_such_task(name: str) -> str:
    """The message about a name that the harness does not have."""
    if known := where_to_find(name):
        return known
    names = task_manager().all_tasks
    close = difflib.get_close_matches(name, names, n=5) or [n for n in names if name and name.lower() in n.lower()][:5]
    meant = f"; did you mean {', '.join(close)}?" if close else ";"
    return f"lm-evaluation-harness has no task {name!r}{meant} All names: dropmatch eval ls tasks"


def is_class(config: Mapping[str, Any]) -> bool:
    """Whether a task is a Python class, whose settings show only when it is made."""
    return "class" in config


def stops_of(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The stop strings of generation arguments."""
    until = arguments.get("until") or []
    return tuple(text for text in ([until] if isinstance(until, str) else until) if text)


def budget_of(arguments: Mapping[str, Any]) -> int | None:
    """The most tokens that generation arguments ask for; None if they do not say."""
    return next((int(arguments[name]) for name in BUDGETS if arguments.get(name) is not None), None)


def samples(arguments: Mapping[str, Any]) -> bool:
    """Whether generation arguments ask for random texts."""
    temperature = arguments.get("temperature")
    if arguments.get("do_sample") is not None:
        return bool(arguments["do_sample"]) and temperature != 0
    return bool(temperature)


def primary(config: Mapping[str, Any], metric: str | None, filter_name: str | None) -> tuple[str, str]:
    """The metric and the filter that a task is scored by.

    Args:
        config: its settings.
        metric: the wanted one; None takes the first that is averaged over texts.
        filter_name: likewise; None takes flexible-extract, or else the first.

    Raises:
        SettingError: the task has no such metric or filter.
    """
    name = config["task"]
    listed = config.get("metric_list") or [{"metric": "exact_match"}]  # the harness's own default
    names = [m["metric"] if isinstance(m["metric"], str) else m["metric"].__name__ for m in listed]
    averaged = [n for n, m in zip(names, listed, strict=True) if m.get("aggregation", "mean") == "mean"]
    filters = [f["name"] for f in config.get("filter_list") or []] or ["none"]
    if metric is not None and metric not in names:
        raise SettingError(f"the task {name} has no metric {metric!r}; there are {', '.join(names)}")
    if filter_name is not None and filter_name not in filters:
        raise SettingError(f"the task {name} has no filter {filter_name!r}; there are {', '.join(filters)}")
    chosen = FLEXIBLE if FLEXIBLE in filters else filters[0]
    return metric or (averaged or names)[0], filter_name or chosen


def _check(config: Mapping[str, Any], asked: str, unsafe_code: bool) -> None:
    name = config["task"]
    among = "" if name == asked else f" (one of {asked})"
    kind = config.get("output_type", GENERATE)
    if kind != GENERATE and not is_class(config):
        others = _generative(asked) or _generative(name)
        raise SettingError(
            f"the task {name}{among} is of type {kind}: it only asks how likely given texts are, so that nothing is "
            + (f"decoded; use {' or '.join(others)}" if others else "decoded; use a task of type generate_until")
        )
    if config.get("doc_to_image") is not None or config.get("doc_to_audio"):
        raise SettingError(f"the task {name}{among} is about images or sound: only text models are decoded here")
    arguments = config.get("generation_kwargs") or {}
    if int(config.get("repeats", 1)) > 1 or samples(arguments):
        raise SettingError(
            f"the task {name}{among} asks for {config.get('repeats', 1)} random texts an example, and examples are "
            "decoded once, greedily: use a task without sampling"
        )
    if config.get("unsafe_code") and not unsafe_code:
        raise SettingError(
            f"the task {name}{among} runs the generated texts as programs on this machine: in a container, allow it "
            "with dropmatch bench --unsafe-code, or by unsafe_code: true of the task in a plan file; humaneval and "
            "humaneval_plus run theirs confined"
        )


def _generative(name: str) -> list[str]:
    """Tasks like this one that decode."""
    index = task_manager().task_index
    stem = name.rsplit("_", 1)[0]
    close = [f"{start}_{end}" for start in (name, stem) for end in _SUFFIXES]
    found = [each for each in dict.fromkeys(close) if each in index and each != name]
    return [each for each in found if (index[each].cfg or {}).get("output_type", GENERATE) == GENERATE][:3]
