"""The folder of a benchmark: its plan, and what every cell said to every example.

records.jsonl has a line for each example and cell. Those of a group, which was decoded and timed together, are
written at once; a group that is not complete, since the process was killed meanwhile, counts as not done.
The record of a later turn of a conversation has the texts of the turns before it, which it replies to, as `after`.
scores.jsonl has what was found out about the texts afterwards.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dropmatch.errors import SettingError
from dropmatch.evaluation.backends import Group
from dropmatch.evaluation.bench.lines import append_lines, read_lines
from dropmatch.evaluation.bench.plan import Plan, in_full, meaning
from dropmatch.evaluation.tasks import Example, digest

GROWS = ("tasks", "rules", "limit", "log_likelihood")  # a plan may ask for more of these later
SCORING = "scoring: "  # how the failure of a cell begins whose texts are there and have no score
MACHINES, UNNAMED = "machine.json", "before"  # and the run of a folder that did not name them
Key = tuple[str, str, int]  # task, cell, group


@dataclass(frozen=True)
class Timed:
    """One group of one cell.

    Attributes:
        ids: its examples.
        outputs: by example, as `Output` has them, with `after`, the texts of the turns before, and `category` where
            there is one; what older versions wrote has neither.
        seconds: wall time of all.
        prompts: their digests, to tell whether an example still is what it was.
        run: of the process that decoded them; speeds of one process may be compared.
    """

    ids: list[str]
    outputs: list[dict[str, Any]]
    seconds: float
    prompts: list[str]
    run: str = ""


class Store:
    """A benchmark's folder.

    Records of a cell that the plan has in another spelling are that cell's.

    Args:
        folder: is made once something is kept.
        plan: what is run.

    Raises:
        SettingError: the folder holds a benchmark of other settings, or a file there is damaged.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self._plan, self._run = folder, plan, uuid.uuid4().hex[:12]
        self._check_plan(plan)
        self._names: dict[str, str] = {}  # of the plan's cells, by how records have them
        self._cells: dict[str, str] = {}  # likewise, by what they mean; the first spelling
        self._changed = self._cells_of_other_defaults()
        for cell in plan.rules:
            if cell not in self._changed:
                self._cells.setdefault(meaning(cell), cell)
        self.groups: dict[Key, Timed] = {}
        self.failures: dict[tuple[str, str], str] = {}
        self.scores: dict[tuple[str, str, str], dict[str, float | None]] = defaultdict(dict)  # task, cell, example
        self._load()

    def keep_machine(self, about: Mapping[str, Any]) -> None:
        """Keep where this run's texts are made."""
        found = machines(self.folder) | {self._run: dict(about)}
        write_file(self.folder / MACHINES, json.dumps(found, indent=1) + "\n")

    def machines(self) -> dict[str, dict[str, Any]]:
        """Where texts that are here were made, by run; all that were noted, if it is not known of them."""
        found, runs = machines(self.folder), {group.run for group in self.groups.values()}
        return {run: about for run, about in found.items() if run in runs or run == UNNAMED} or found

    def add(self, task: str, cell: str, number: int, examples: Iterable[Example], group: Group) -> None:
        """Keep a group of a cell."""
        examples = list(examples)
        where: dict[str, Any] = {"task": task, "cell": cell, "group": number, "of": len(examples)}
        where |= {"group_seconds": group.seconds, "run": self._run}
        outputs = [
            {**asdict(output), "after": list(example.replies), **_category(example)}
            for example, output in zip(examples, group.outputs, strict=True)
        ]
        prompts = [digest(example) for example in examples]
        lines = [
            {**where, "id": example.id, "prompt": prompt, **output}
            for example, prompt, output in zip(examples, prompts, outputs, strict=True)
        ]
        append_lines(self.folder / "records.jsonl", lines)
        self.groups[task, cell, number] = Timed([e.id for e in examples], outputs, group.seconds, prompts, self._run)
        self.failures.pop((task, cell), None)
        for example in examples:  # of the texts that they had before
            self.scores.pop((task, cell, example.id), None)

    def fail(self, task: str, cell: str, error: str) -> None:
        """Keep that a cell has crashed."""
        append_lines(self.folder / "records.jsonl", [{"task": task, "cell": cell, "error": error}])
        self.failures[task, cell] = error

    def score(self, task: str, cell: str, name: str, scores: Mapping[str, float | None]) -> None:
        """Keep what was found out about texts, by example."""
        said = self.outputs(task, cell)
        lines = [
            {"task": task, "cell": cell, "id": i, "text": _named(said[i]), "name": name, "value": value}
            for i, value in scores.items()
        ]
        append_lines(self.folder / "scores.jsonl", lines)
        self.failures.pop((task, cell), None)
        for example, value in scores.items():
            self.scores[task, cell, example][name] = value

    def texts(self, task: str, cell: str) -> dict[str, str]:
        """What a cell said, by example."""
        return {i: output["text"] for i, output in self.outputs(task, cell).items()}

    def outputs(self, task: str, cell: str) -> dict[str, dict[str, Any]]:
        """What a cell said, by example, as `Timed` has it."""
        groups = [group for (t, c, _), group in sorted(self.groups.items()) if (t, c) == (task, cell)]
        return {i: output for group in groups for i, output in zip(group.ids, group.outputs, strict=True)}

    def check_examples(self, task: str, examples: Iterable[Example]) -> None:
        """Refuse examples that were decoded as something else: texts of different prompts must not be paired.

        Raises:
            SettingError: one has another prompt, or another end, than its records were made with, or there are later
                turns beside records of a version that asked first turns only.
        """
        examples = list(examples)
        now, later = {example.id: digest(example) for example in examples}, any(example.after for example in examples)
        for (name, _, _), group in self.groups.items():
            if later and name == task and any("after" not in output for output in group.outputs):
                raise SettingError(
                    f"{self.folder} holds texts of {task} from before later turns were asked: give another --out, or "
                    "ask first turns only (turns: 1, on the command line --turns 1)"
                )
            for i, prompt in zip(group.ids, group.prompts, strict=True):
                if name == task and now.get(i, prompt) != prompt:
                    raise SettingError(
                        f"{self.folder} holds texts of {task}, example {i}, for another prompt: its data or its task "
                        "has changed since. Give another --out, or the same data"
                    )

    def values(self, task: str, name: str) -> dict[tuple[str, tuple[str, ...]], float | None]:
        """What was found out about texts, by example and the texts of its conversation."""
        return {
            (i, conversation(output)): self.scores[of, cell, i][name]
            for (of, cell, _), group in self.groups.items()
            for i, output in zip(group.ids, group.outputs, strict=True)
            if of == task and name in self.scores.get((of, cell, i), {})
        }

    def keep_plan(self) -> None:
        """Write down what is run, beside what was run here before.

        Raises:
            SettingError: a cell that was run here would not be the same now, since a default has changed.
        """
        path, now = self.folder / "plan.json", asdict(self._plan)
        now["cells"] = {rule: in_full(rule) for rule in self._plan.rules}
        if path.exists():
            before = _read_json(path)
            now["cells"] = before.get("cells", {}) | now["cells"]
            for rule, settings in before.get("cells", {}).items():
                self._check_cell(rule, settings, now["cells"][rule])
            tasks = {task["name"]: task for task in before["tasks"]}
            for task in now["tasks"]:
                old = tasks.get(task["name"], task)
                tasks[task["name"]] = {**task, "limit": _most(old["limit"], task["limit"])}
            now["tasks"] = list(tasks.values())
            now["rules"] = list(dict.fromkeys([*before["rules"], *now["rules"]]))
            now["limit"] = _most(before["limit"], now["limit"])
        write_file(path, json.dumps(now, ensure_ascii=False, indent=1) + "\n")

    def _cells_of_other_defaults(self) -> set[str]:
        """Cells of the folder whose texts are not what they would be now."""
        path = self.folder / "plan.json"
        if not path.exists():
            return set()
        found = set()
        for rule, before in _read_json(path).get("cells", {}).items():
            try:
                now = in_full(rule)
            except SettingError:  # of a rule, say, that is not registered here
                continue
            if any(name in now and now[name] != value for name, value in before.items()):
                found.add(rule)
        return found

    def _name(self, text: str) -> str:
        """How the plan writes a cell of the records."""
        if text not in self._names:
            try:
                known = text if text in self._changed else self._cells.get(meaning(text), text)
            except SettingError:
                known = text
            self._names[text] = known
        return self._names[text]

    def _check_cell(self, rule: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for name, value in before.items():
            if name in now and now[name] != value:
                raise SettingError(
                    f"{self.folder} holds {rule} as it was with {name}={value!r}, whose default has become "
                    f"{now[name]!r}: give another --out, or write {rule}:{name}={value} for the old one"
                )

    def _check_plan(self, plan: Plan) -> None:
        path, now = self.folder / "plan.json", asdict(plan)
        if path.exists():
            before = {"turns": plan.turns} | _read_json(path)  # which older versions did not ask: see check_examples
            for name in (name for name in now if name not in GROWS):
                if before.get(name) != now[name]:
                    raise SettingError(
                        f"{self.folder} holds a benchmark with {name}={before.get(name)!r}, and now it is "
                        f"{now[name]!r}: give another --out, or the same settings"
                    )
            known = {task["name"]: task for task in before["tasks"]}
            for task in now["tasks"]:
                old = known.get(task["name"], task)
                for name in ("data", "fewshot_data", "num_fewshot", "max_tokens", "metric", "filter"):
                    if old.get(name) != task[name]:
                        raise SettingError(
                            f"{self.folder} holds {task['name']} with {name}={old.get(name)!r}, and now it is "
                            f"{task[name]!r}: give another --out, or the same settings"
                        )

    def _load(self) -> None:
        found: dict[Key, list[dict[str, Any]]] = defaultdict(list)
        for line in read_lines(self.folder / "records.jsonl"):
            line["cell"] = self._name(line["cell"])
            if "error" in line:
                self.failures[line["task"], line["cell"]] = line["error"]
            else:
                found[line["task"], line["cell"], line["group"]].append(line)
                self.failures.pop((line["task"], line["cell"]), None)  # it was done after all
        for key, lines in found.items():
            size = lines[-1]["of"]
            lines = lines[-size:]  # a group that was begun before and is complete now
            if len(lines) == size and len({line["id"] for line in lines}) == size:
                ids, prompts = [line["id"] for line in lines], [line["prompt"] for line in lines]
                self.groups[key] = Timed(ids, lines, lines[-1]["group_seconds"], prompts, lines[-1].get("run", ""))
        texts = {
            (task, cell, i): _named(output)
            for (task, cell, _), group in self.groups.items()
            for i, output in zip(group.ids, group.outputs, strict=True)
        }
        for line in read_lines(self.folder / "scores.jsonl"):
            of = line["task"], self._name(line["cell"]), line["id"]
            if texts.get(of) == line["text"]:  # else of a text that was decoded anew since
                self.scores[of][line["name"]] = line["value"]
        for (task, cell), text in list(self.failures.items()):
            if text.startswith(SCORING) and all(self.scores.get((task, cell, i)) for i in self.texts(task, cell)):
                del self.failures[task, cell]  # it was scored after all


def machines(folder: Path) -> dict[str, dict[str, Any]]:
    """What machines a benchmark's folder was written on: versions and the like, by run.

    Raises:
        SettingError: the file cannot be read.
    """
    path = folder / MACHINES
    if not path.exists():
        return {}
    found = _read_json(path)
    # folders of before had the last run's only
    return found if all(isinstance(about, dict) for about in found.values()) else {UNNAMED: found}


def _most(one: int | None, other: int | None) -> int | None:
    """The larger limit; None is none."""
    return None if one is None or other is None else max(one, other)


def conversation(output: Mapping[str, Any]) -> tuple[str, ...]:
    """What was said up to an output of `Timed`, turn by turn, its own text last."""
    return *output.get("after", ()), output["text"]


def _category(example: Example) -> dict[str, Any]:
    return {"category": example.data["category"]} if "category" in example.data else {}


def _named(output: Mapping[str, Any]) -> str:
    """A short name of an output's text, of a later turn with those before it."""
    said = conversation(output)
    return _short_hash(output["text"] if len(said) == 1 else json.dumps(said))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


def write_file(path: Path, text: str) -> None:
    """All of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"cannot read {path}: {error}") from error
