"""Table 1: how good the texts of each single head are.

Every example is decoded through head i alone (see `paths`), for each p; without dropout as the reference. The score is
the task's: Pass@1 in the paper.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dropmatch.errors import SettingError
from dropmatch.evaluation.bench.runner import Progress
from dropmatch.evaluation.bench.tables import Sheet
from dropmatch.evaluation.paper import published
from dropmatch.evaluation.paper.kept import Numbers
from dropmatch.evaluation.paper.paths import NO_DROPOUT, Path
from dropmatch.evaluation.paper.settings import over_seeds, spread_text
from dropmatch.evaluation.paper.texts import Texts
from dropmatch.evaluation.statistics import mean_interval, paired, share_interval
from dropmatch.evaluation.tasks import Example, Task, digest

Scored = tuple[list[str], list[float]]  # texts and their scores, by example


def check_task(task: Task) -> None:
    """Refuse a task without a score.

    Raises:
        SettingError: it has none.
    """
    if task.metric is None:
        raise SettingError(f"{task.name} has no right answers, so heads cannot be scored on it: choose a scored task")


def score_heads(
    task: Task,
    examples: Sequence[Example],
    texts: Texts,
    dropouts: Sequence[float],
    heads: int,
    seeds: Sequence[int],
    progress: Progress,
    draft: Texts | None = None,
    scores: Numbers | None = None,
) -> dict[str, Any]:
    """Table 1.

    Args:
        task: scores texts.
        examples: n of them.
        texts: of all of them through all heads, p and seeds, and without dropout.
        dropouts: p of the rows.
        heads: K.
        seeds: mask seeds.
        progress: told of each path that is scored; there are `all_paths` of them, and one of the draft.
        draft: the texts of the draft model alone, without dropout.
        scores: what is known of texts already, and learns of the others.

    Returns:
        For JSON: `no_dropout` and `draft` (None if it was not asked for) with their score; `rows`, for each p the
        heads with their score over seeds, and the mean over all heads and seeds.
    """
    known: dict[Path, Scored] = {}
    scores = scores or Numbers()
    names = [_name(task, example) for example in examples]

    def scored(path: Path) -> Scored:
        if path not in known:
            known[path] = _scored(task, examples, names, texts, path, progress, scores)
        return known[path]

    plain = scored(NO_DROPOUT)
    rows = []
    for dropout in dropouts:
        columns = []
        for head in range(heads):
            paths = [Path(dropout, head, seed) if dropout else NO_DROPOUT for seed in seeds]
            columns.append(_column(head, seeds, [scored(path) for path in paths], plain))
        values = [run["score"]["value"] for column in columns for run in column["seeds"].values()]
        rows.append({"dropout": dropout, "heads": columns, "score": over_seeds(values)})
    alone = None if draft is None else _entry(_scored(task, examples, names, draft, NO_DROPOUT, progress, scores))
    return {
        "metric": task.metric,
        "examples": len(examples),
        "no_dropout": _entry(plain),
        "draft": alone,
        "rows": rows,
    }


def _name(task: Task, example: Example) -> str:
    """What a score of its text is kept under: with other data it may be another one."""
    data = hashlib.sha256(repr(dict(example.data)).encode("utf-8", errors="surrogatepass")).hexdigest()[:16]
    return " ".join((task.name, str(task.metric), digest(example), data, example.id))


def _scored(
    task: Task,
    examples: Sequence[Example],
    names: Sequence[str],
    texts: Texts,
    path: Path,
    progress: Progress,
    scores: Numbers,
) -> Scored:
    """Texts and scores of one path."""
    progress.begin(f"scoring p={path.dropout} H{path.head + 1}" if path.dropout else "scoring no dropout")
    found = [texts.of(example, path).text for example in examples]
    values, measured = scores.all_of(
        list(zip(names, found, strict=True)),
        lambda rows: task.score([examples[i] for i in rows], [found[i] for i in rows]),
    )
    progress.done(0, measured)
    return found, [0.0 if value is None else value for value in values]


def _entry(scored: Scored) -> dict[str, Any]:
    """The score with its 95 % interval, which does not shrink to a point where all texts are right."""
    scores = scored[1]
    right = set(scores) <= {0.0, 1.0}
    return {"score": asdict(share_interval(round(sum(scores)), len(scores)) if right else mean_interval(scores))}


def _column(head: int, seeds: Sequence[int], found: Sequence[Scored], plain: Scored) -> dict[str, Any]:
    """One head at one p: its score for each seed, with what it loses and gains against no dropout."""
    runs = {}
    for seed, scored in zip(seeds, found, strict=True):
        same = sum(ours == theirs for ours, theirs in zip(scored[0], plain[0], strict=True))
        against = asdict(paired(plain[1], scored[1]))
        runs[str(seed)] = {**_entry(scored), "against_no_dropout": against, "same_text": same}
    return {"head": head + 1, "score": over_seeds([run["score"]["value"] for run in runs.values()]), "seeds": runs}


def heads_sheet(found: dict[str, Any], task: str, seeds: int) -> Sheet:
    """Table 1 as texts, the paper's rows below."""
    count = len(found["rows"][0]["heads"]) if found["rows"] else 0
    columns = max(count, published.HEADS)
    rows: list[tuple[str, ...]] = []
    for row in found["rows"]:
        cells = [spread_text(each["score"], 1, 100) for each in row["heads"]]
        mean = f"{100 * row['score']['value']:.1f}"
        rows.append((f"p={row['dropout']:g}", *cells, *[""] * (columns - count), mean))
    rows.append(("no dropout", *[""] * columns, _percent(found["no_dropout"])))
    if found["draft"]:
        rows.append(("draft alone", *[""] * columns, _percent(found["draft"])))
    empty = [""] * (columns - published.HEADS)
    for dropout, scores in published.HEAD_SCORES.items():
        mean = f"{sum(scores) / len(scores):.1f}"
        rows.append((f"paper, p={dropout:g}", *(f"{score:.1f}" for score in scores), *empty, mean))
    rows.append(("paper, no dropout", *[""] * columns, f"{published.NO_DROPOUT_SCORE:.1f}"))
    rows.append(("paper, draft alone", *[""] * columns, f"{published.DRAFT_SCORE:.1f}"))
    interval = found["no_dropout"]["score"]
    notes = [
        f"{found['examples']} examples; 95 % interval of the score without dropout: {100 * interval['low']:.1f} to "
        f"{100 * interval['high']:.1f}. Heads that differ by less say nothing about p.",
        "The paper: Pass@1 on HumanEval (164 problems), Llama-3.1-70B-Instruct, draft Llama-3.1-8B-Instruct.",
    ]
    if seeds > 1:
        notes.insert(1, f"Mean over {seeds} mask seeds, and the least and the greatest.")
    headings = ("", *(f"H{i}" for i in range(1, columns + 1)), "all")
    return Sheet(f"Table 1: {found['metric']} % of each head, {task}", headings, rows, notes)


def _percent(entry: dict[str, Any]) -> str:
    return f"{100 * entry['score']['value']:.1f}"
