"""Tasks of lm-evaluation-harness: its prompts, its few-shots, its scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dropmatch.errors import SettingError
from dropmatch.evaluation.harness_library import cache_if_unreachable, hub_answers, quiet, reason
from dropmatch.evaluation.tasks import harness_data as data_files
from dropmatch.evaluation.tasks.base import Example, Prompt
from dropmatch.evaluation.tasks.harness_configs import (
    Config,
    budget_of,
    configs_of,
    is_class,
    primary,
    stops_of,
)

# --task of bench and paper has no word for few-shots: the plan of a benchmark does
ADVICE = (
    "in a plan file of dropmatch bench, give the task a file of such rows (fewshot_data: FILE) or ask for no few-shots "
    "(num_fewshot: 0); with --task, use a task that carries its own, as gsm8k_cot does"
)


class HarnessTask:
    """A task of type generate_until, or all tasks of a group in turn: the first example of each, the second, ...

    Few-shots are the harness's own, drawn with its default seed. Scores are those of its filters and metrics.

    Args:
        name: as the harness has it (gsm8k_cot, ifeval, mmlu_generative, ...), or a path of a task's YAML file.
        data: JSONL file to take the examples from, in place of the hub: rows {"id", "task", "prompt", "answer",
            "meta"}, or in the task's own fields. Rows for a group say by `subject` whose they are.
        chat: prompts are chat messages (few-shots as turns of their own), as the harness has them with
            --apply_chat_template; else text, as it has them without. A last message of the assistant's is to be
            continued.
        metric: of the task's metrics; None takes the first that is averaged over texts.
        filter_name: of the task's filters; None takes flexible-extract where there is one, else the first.
        num_fewshot: None takes the task's own number.
        fewshot_data: JSONL file that few-shots are drawn from. With `data`, a task that draws them from a split of
            its own (gsm8k: 5 of its training set) needs it, or num_fewshot=0; gsm8k_cot carries its few-shots.
        unsafe_code: allow tasks that run the generated texts as programs.

    Raises:
        SettingError: the harness is not installed, there is no such task, it cannot be decoded greedily, it has no
            such metric or filter, or it would not look at what is said of few-shots.
    """

    def __init__(
        self,
        name: str,
        data: Path | str | None = None,
        chat: bool = True,
        *,
        metric: str | None = None,
        filter_name: str | None = None,
        num_fewshot: int | None = None,
        fewshot_data: Path | str | None = None,
        unsafe_code: bool = False,
    ) -> None:
        self.name = Path(name).stem if Path(name).suffix == ".yaml" else name
        self.chat = chat
        self.runs_programs = unsafe_code
        self._data, self._fewshot_data = (None if p is None else Path(p) for p in (data, fewshot_data))
        self._num_fewshot = num_fewshot
        self._configs = configs_of(name, unsafe_code)
        self._check_fewshots()
        self._tasks: dict[str, Any] | None = None
        self._scored_by: dict[str, tuple[str, str]] = {}
        for config in self._configs:
            if is_class(config):
                config = self._settings_of_class(config)
            self._scored_by[config["task"]] = primary(config, metric, filter_name)
        self.metric: str | None = " or ".join(dict.fromkeys(_joined(*each) for each in self._scored_by.values()))

    def examples(self, limit: int | None) -> list[Example]:
        """The first examples; of a group of tasks so many of all together, where the harness has them of each.

        Raises:
            SettingError: the data set cannot be fetched, there are no examples, or a row of the file is malformed.
        """
        tasks = self._built()
        counts = _shares([len(task.task_docs) for task in tasks.values()], limit)
        by_task = [self._examples(task, count) for task, count in zip(tasks.values(), counts, strict=True) if count]
        longest = max(len(examples) for examples in by_task)
        return [examples[i] for i in range(longest) for examples in by_task if i < len(examples)]

    def score(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        """The task's metric of each text.

        Raises:
            SettingError: the metric is none of single texts, or not in [0, 1].
        """
        from lm_eval.api.instance import Instance

        tasks = self._built()
        found: list[float | None] = []
        for example, text in zip(examples, texts, strict=True):
            name, doc = example.data["task"], dict(example.data["doc"])
            metric, filter_name = self._scored_by[name]
            task = tasks[name]
            instance = Instance("generate_until", doc, ("", {}), 0, metadata=(name, 0, 1), resps=[text])
            for each in task._filters:
                if each.name == filter_name:
                    each.apply([instance])
            with quiet():
                scores = task.process_results(doc, [instance.filtered_resps[filter_name]])
            found.append(_number(scores, metric, name))
        return found

    def _check_fewshots(self) -> None:
        """Refuse now, before a model is loaded, what would not be looked at."""
        if self._fewshot_data is not None and self._data is None:
            raise SettingError("fewshot_data goes with data: without, few-shots come from the task's own data set")
        if any(is_class(config) for config in self._configs):  # what these do shows only when they are made
            return
        if self._num_fewshot and all(config.get("num_fewshot") == 0 for config in self._configs):
            raise SettingError(f"the task {self.name} is one without few-shots: leave num_fewshot out")
        if self._fewshot_data is None:
            return
        if not any(data_files.draws_fewshots(config) for config in self._configs):
            raise SettingError(
                f"the task {self.name} carries its few-shots, or draws them from its examples: leave fewshot_data out"
            )
        if not any(self._count_fewshots(config.get("num_fewshot")) for config in self._configs):
            raise SettingError(
                f"the task {self.name} has no few-shots here: say how many are drawn from fewshot_data (num_fewshot), "
                "or leave it out"
            )

    def _count_fewshots(self, own: int | None) -> int:
        """How many a task has; as in the harness, one that says 0 itself has none."""
        return (own if self._num_fewshot is None or own == 0 else self._num_fewshot) or 0

    def _built(self) -> dict[str, Any]:
        """The harness's tasks by name, with their data."""
        if self._tasks is None:
            rows = None if self._data is None else data_files.read_examples(self._data)
            shots = None if self._fewshot_data is None else data_files.read_examples(self._fewshot_data)
            if rows is not None:
                data_files.check_subjects(self._configs, rows)
            tasks = {}
            for config in self._configs:
                task = self._built_task(config, rows, shots)
                if task is not None:
                    tasks[config["task"]] = task
            if not tasks:
                raise SettingError(f"{self._data}: no row is of the task {self.name}")
            self._tasks = tasks
        return self._tasks

    def _built_task(
        self, config: Config, rows: list[data_files.Row] | None, shots: list[data_files.Row] | None
    ) -> Any | None:
        """None if the file has no rows for it."""
        if rows is None:
            task = self._from_hub(config)
        else:
            task = self._from_rows(config, rows, shots)
            if task is None:
                return None
        task.set_config("num_fewshot", self._count_fewshots(task.get_config("num_fewshot")))
        self._try(config, task)
        return task

    def _from_hub(self, config: Config) -> Any:
        try:
            with quiet(), cache_if_unreachable():
                return _build(config)
        except ImportError as error:
            name = config["task"]
            raise SettingError(f"the task {name} needs a package that is not installed ({reason(error)})") from error
        except Exception as error:  # the hub's, the network's, the data set's: there are too many kinds to name
            if _finds_nothing(error):
                raise self._no_examples(config) from error
            path = config.get("dataset_path")
            where = f"the data set {path} of the task {config['task']}" if path else f"the data of {config['task']}"
            why = reason(error) if hub_answers() else "the model hub does not answer"
            other = "" if is_class(config) else ", or give the examples in a JSONL file (--task TASK=FILE)"
            raise SettingError(f"cannot load {where} ({why}): check the network{other}") from error

    def _from_rows(self, config: Config, rows: list[data_files.Row], shots: list[data_files.Row] | None) -> Any | None:
        name, path = config["task"], self._data
        assert path is not None
        if is_class(config):
            raise SettingError(f"the task {name} is written in Python and fetches its own data: leave the file out")
        alone = len(self._configs) == 1
        chosen = data_files.rows_of(config, rows, alone)
        if not chosen:
            return None
        docs = data_files.to_docs(config, chosen)
        examples = None if shots is None else data_files.to_docs(config, data_files.rows_of(config, shots, alone))
        count = self._count_fewshots(config.get("num_fewshot"))
        parts = data_files.dataset(data_files.splits(config, docs, examples, count, ADVICE), path)
        try:
            with quiet():
                return _build({**config, "custom_dataset": lambda **_: parts})
        except Exception as error:  # what the task makes of rows is its own code
            if _finds_nothing(error):
                raise self._no_examples(config) from error
            raise SettingError(f"{path}: the task {name} cannot use these rows ({reason(error)})") from error

    def _no_examples(self, config: Config) -> SettingError:
        """What is wrong with a task that has none, and where they should have come from."""
        start = f"the task {config['task']} has no examples"
        if self._data is not None:
            return SettingError(f"{start}: its own code keeps no row of {self._data}; give it other rows")
        if is_class(config):
            return SettingError(f"{start}: the data set that its own code fetches is empty; use another task")
        split = data_files.examples_split(config)
        return SettingError(
            f"{start}: the split {split!r} of its data set {config.get('dataset_path')} is empty, or its own code "
            "keeps no row of it; use another task, or give the examples in a JSONL file (--task TASK=FILE)"
        )

    def _try(self, config: Config, task: Any) -> None:
        """Score the right answer now: what is missing for scoring must not show after hours of decoding."""
        if not len(task.task_docs):
            raise self._no_examples(config)
        name, doc = task.task_name, dict(task.task_docs[0])
        try:
            with quiet():
                target = task.doc_to_target(doc)
                scores = task.process_results(doc, [target if isinstance(target, str) else ""])
        except Exception as error:
            if isinstance(error, ImportError) or type(error) is LookupError:  # a package or file; else of this text
                raise SettingError(f"the task {name} cannot score texts here ({reason(error)})") from error
            return
        if name in self._scored_by and isinstance(target, str):  # of a class it is not known yet
            _number(scores, self._scored_by[name][0], name)

    def _examples(self, task: Any, count: int) -> list[Example]:
        """The first examples of one task."""
        from lm_eval.defaults import DEFAULT_OTHER_SEED

        name = task.task_name
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)  # each time, so that prompts are the same each time
        with quiet():
            task.build_all_requests(
                limit=count,
                apply_chat_template=self.chat,
                fewshot_as_multiturn=self.chat,
                chat_template=_keep if self.chat else None,
            )
        examples = []
        for instance in task.instances:
            if instance.request_type != "generate_until":
                raise SettingError(f"the task {name} also asks how likely texts are, which decodes nothing")
            text, arguments = instance.args[:2]
            prompt: Prompt = json.loads(text) if self.chat else text
            named = str(instance.doc["id"]) if self._has_ids else f"{name}-{instance.doc_id}"
            data = {"task": name, "doc": instance.doc}
            examples.append(Example(named, prompt, stops_of(arguments), budget_of(arguments), data))
        return examples

    @property
    def _has_ids(self) -> bool:
        """Whether rows of a file name themselves, each differently, those of all tasks together."""
        tasks = self._built().values()
        if self._data is None or any("id" not in task.features for task in tasks):
            return False
        ids = [str(each) for task in tasks for each in task.task_docs["id"]]
        return len(set(ids)) == len(ids)

    def _settings_of_class(self, config: Config) -> Config:
        """What shows only when a task is made."""
        task = self._built()[config["task"]]
        metrics = [{"metric": metric} for metric in task.aggregation()]
        return {
            "task": config["task"],
            "metric_list": metrics,
            "filter_list": [{"name": f.name} for f in task._filters],
        }


def _build(config: Config) -> Any:
    from lm_eval.tasks._factory import TaskFactory
    from lm_eval.tasks._index import Entry, Kind

    kind = Kind.PY_TASK if is_class(config) else Kind.TASK
    return TaskFactory().build(Entry(config["task"], kind, yaml_path=None, cfg=config), registry={})


def _finds_nothing(error: Exception) -> bool:
    """Whether a task could not be made for want of examples: the harness looks at the first one then."""
    return isinstance(error, IndexError) and "out of bounds for size 0" in str(error)


def _keep(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """A chat template that loses nothing."""
    return json.dumps(messages)


def _joined(metric: str, filter_name: str) -> str:
    """As the harness names results."""
    return metric if filter_name == "none" else f"{metric},{filter_name}"


def _shares(sizes: Sequence[int], limit: int | None) -> list[int]:
    """How many examples of each task are among the first `limit` that are taken in turn."""
    counts = list(sizes)
    if limit is None or limit >= sum(sizes):
        return counts
    left, counts = limit, [0] * len(sizes)
    while left:
        for i, size in enumerate(sizes):
            if left and counts[i] < size:
                counts[i] += 1
                left -= 1
    return counts


def _number(scores: Mapping[str, Any], metric: str, name: str) -> float:
    if metric not in scores:
        raise SettingError(f"the task {name} gives no {metric!r} for a text; it gives {', '.join(scores)}")
    value = scores[metric]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0.0 <= number <= 1.0:
        raise SettingError(
            f"{metric} of the task {name} is no score in [0, 1] of a single text ({value!r}): choose another metric; "
            f"there are {', '.join(scores)}"
        )
    return number
