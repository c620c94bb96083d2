"""Tasks of the harness as files that take their examples from JSONL, for its own command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from dropmatch.errors import SettingError
from dropmatch.evaluation.harness_library import quiet
from dropmatch.evaluation.tasks import harness_data as data_files
from dropmatch.evaluation.tasks.harness_configs import Config, collect, is_class, task_manager

ADVICE = (
    "give a file of such rows (--fewshot_data FILE), ask for no few-shots (--num_fewshot 0), or use a task that "
    "carries its own, as gsm8k_cot does"
)


def write_tasks(
    folder: Path, files: Mapping[str, Path], fewshot_data: Path | None = None, num_fewshot: int | None = None
) -> None:
    """Write what --include_path takes: YAML files that stand for the harness's tasks, and their data.

    Args:
        folder: where to.
        files: JSONL file by name of task or group; rows as in `HarnessTask`.
        fewshot_data: JSONL file that few-shots are drawn from.
        num_fewshot: how many are wanted; None is what a task says.

    Raises:
        SettingError: there is no such task, it cannot have other data, or a file or row is malformed.
    """
    for asked, path in files.items():
        configs = collect(asked)
        rows = data_files.read_examples(path)
        data_files.check_subjects(configs, rows)
        shots = None if fewshot_data is None else data_files.read_examples(fewshot_data)
        alone, written = len(configs) == 1, list[str]()
        for config in configs:
            if is_class(config):
                raise SettingError(f"the task {config['task']} is written in Python and fetches its own data")
            chosen = data_files.rows_of(config, rows, alone)
            if not chosen:
                continue
            docs = data_files.to_docs(config, chosen)
            more = None if shots is None else data_files.to_docs(config, data_files.rows_of(config, shots, alone))
            count = config.get("num_fewshot") if num_fewshot is None else num_fewshot
            parts = data_files.splits(config, docs, more, count or 0, ADVICE)
            _write(folder, config, data_files.dataset(parts, path))
            written.append(config["task"])
        if not written:
            raise SettingError(f"{path}: no row is of the task {asked}")
        if len(written) < len(configs):
            _write_group(folder, asked, written)


def _write_group(folder: Path, name: str, tasks: list[str]) -> None:
    """A group or tag of those tasks only that have data."""
    before = task_manager().task_index[name].cfg or {}
    kept = {key: before[key] for key in ("group_alias", "aggregate_metric_list", "metadata") if key in before}
    group = {"group": name, "task": tasks, **kept}
    (folder / f"{name}-group.yaml").write_text(yaml.safe_dump(group), encoding="utf-8")


def _write(folder: Path, config: Config, parts: Mapping[str, object]) -> None:
    """One task: what it was, with other data."""
    name = config["task"]
    data = {split: str(folder / f"{name}-{split}.parquet") for split in parts}
    with quiet():
        for split, path in data.items():
            parts[split].to_parquet(path)  # type: ignore[attr-defined]
    task = {
        "include": config["metadata"]["config_source"],
        "task": name,
        "custom_dataset": None,
        "dataset_path": "parquet",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": data, "cache_dir": str(folder / "cache")},
        "tag": None,  # the harness's own list of the tag stands
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
