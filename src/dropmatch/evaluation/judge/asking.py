"""Puts questions to a judge: what is missing, several at a time, each answer kept as it comes."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dropmatch.errors import DropMatchError, SettingError
from dropmatch.evaluation.bench.plan import Plan, TaskChoice, baseline
from dropmatch.evaluation.bench.runner import Progress, examples_of
from dropmatch.evaluation.bench.store import Store, conversation
from dropmatch.evaluation.judge.endpoint import Endpoint
from dropmatch.evaluation.judge.judgements import Judge, Judgement, Judgements, digest
from dropmatch.evaluation.judge.prompts import PAIRWISE, TIE, Verdict, question, verdict
from dropmatch.evaluation.tasks import Example, Task
from dropmatch.evaluation.tasks.base import Prompt

HOPELESS = 20  # a judge whose first so many answers have no verdict is asked no more


@dataclass(frozen=True)
class Question:
    """Something to judge.

    Attributes:
        task, id: the example.
        prompt: what the texts are replies to; of a later turn, what the user said in each.
        shown: the cell, or the two in the order shown.
        talks: what they said, each turn by turn; the last text is judged.
        references: right answers turn by turn, as far as there are some.
    """

    task: str
    id: str
    prompt: Prompt
    shown: tuple[str, ...]
    talks: tuple[tuple[str, ...], ...]
    references: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All that was said."""
        return tuple(text for talk in self.talks for text in talk)

    @property
    def reference_digest(self) -> str:
        """Names the references."""
        return digest(self.references) if self.references else ""

    def judged(self, outcome: Outcome) -> Judgement:
        """With what came of it."""
        about = self.task, self.shown, self.id, digest(self.texts)
        return Judgement(*about, outcome.answers, outcome.verdict, self.reference_digest)


@dataclass(frozen=True)
class Outcome:
    """What came of a question.

    Attributes:
        answers: of the judge; none where it was not asked.
        verdict: None if no answer has one.
        tokens: of the answers.
    """

    answers: tuple[str, ...]
    verdict: Verdict | None
    tokens: int = 0


@dataclass(frozen=True)
class Work:
    """Questions about the same texts, which need one answer.

    Attributes:
        questions: of different cells.
        known: the answer, where the judge need not be asked.
    """

    questions: list[Question]
    known: Outcome | None


def questions(
    plan: Plan, store: Store, tasks: Sequence[tuple[Task, TaskChoice]], cells: Sequence[str], kind: str
) -> list[Question]:
    """All that is to be judged, example by example, so that a run that is stopped has judged the same of every cell.

    Args:
        plan, store: the benchmark.
        tasks: those of its tasks that are wanted.
        cells: likewise; strict is judged with them.
        kind: "single" or "pairwise".

    Raises:
        SettingError: there is nothing, or an example cannot be found.
    """
    found = []
    for task, choice in tasks:
        said = {cell: store.outputs(task.name, cell) for cell in dict.fromkeys([*map(baseline, cells), *cells])}
        ids = list(dict.fromkeys(i for outputs in said.values() for i in outputs))
        examples = _examples(task, plan.task(choice), store, ids) if ids else {}
        for i in ids:
            for shown in _shown(list(said), kind):
                if all(i in said[cell] for cell in shown):
                    talks = tuple(conversation(said[cell][i]) for cell in shown)
                    references = tuple(examples[i].data.get("references", ()))
                    found.append(Question(task.name, i, examples[i].prompt, shown, talks, references))
    if not found:
        more = " of a lossy cell and of strict on the same examples" if kind == PAIRWISE else ""
        raise SettingError(f"{store.folder} holds no texts{more} to judge: finish the benchmark first")
    return found


def _shown(cells: Sequence[str], kind: str) -> list[tuple[str, ...]]:
    """What is shown of an example's texts: each, or each with strict's in both orders."""
    if kind != PAIRWISE:
        return [(cell,) for cell in cells]
    pairs = [(baseline(cell), cell) for cell in cells if baseline(cell) != cell]
    return [shown for base, cell in pairs for shown in ((base, cell), (cell, base))]


def _examples(task: Task, choice: TaskChoice, store: Store, ids: Sequence[str]) -> dict[str, Example]:
    """Examples by id."""
    wanted, (examples, _) = set(ids), examples_of(task, choice)
    found = {example.id: example for example in examples if example.id in wanted}
    store.check_examples(task.name, found.values())
    lost = [i for i in ids if i not in found]
    if lost:
        raise SettingError(f"{task.name} has no example {lost[0]!r} any more: restore the data that was benchmarked")
    return found


def missing(wanted: Sequence[Question], judge: Judge, judgements: Judgements) -> list[Work]:
    """What has still to be judged; what had no verdict is judged again.

    The judge is asked once about the same texts of several cells, and not at all where the two that are compared are
    the same: that is a tie.
    """
    groups: dict[tuple[str, str, tuple[str, ...]], list[Question]] = defaultdict(list)
    known: dict[tuple[str, str, tuple[str, ...]], Outcome] = {}
    for each in wanted:
        about = each.task, each.id, each.texts
        found = judgements.get(judge, (each.task, each.shown, each.id), each.texts)
        if found is not None and found.verdict is not None and found.references == each.reference_digest:
            known[about] = Outcome(found.answers, found.verdict)
        else:
            groups[about].append(each)
        if judge.kind == PAIRWISE and each.talks[0] == each.talks[1]:
            known[about] = Outcome((), TIE)
    return [Work(group, known.get(about)) for about, group in groups.items()]


def ask(
    work: Sequence[Work],
    judge: Judge,
    judgements: Judgements,
    endpoint: Endpoint | None,
    concurrency: int,
    progress: Progress,
) -> None:
    """Judge what is missing, and keep each judgement as it comes, also when this ends early.

    Args:
        work: from `missing`.
        judge: who judges.
        judgements: where they go.
        endpoint: of the judge; needed if an answer is not known.
        concurrency: questions at once.
        progress: is told.

    Raises:
        SettingError: the endpoint refuses the key or does not know the model.
        DropMatchError: it cannot be reached, or its answers have no verdicts.
    """
    waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
    arrived: queue.SimpleQueue[tuple[Work, Outcome | Exception]] = queue.SimpleQueue()
    stop = threading.Event()
    for each in work:
        waiting.put(each)

    def run() -> None:
        while not stop.is_set():
            try:
                each = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                arrived.put((each, each.known or _judge(each.questions[0], judge.kind, endpoint, stop)))
            except Exception as error:
                arrived.put((each, error))

    def keep(each: Work, outcome: Outcome) -> None:
        judgements.add(judge, [one.judged(outcome) for one in each.questions])
        progress.done(outcome.tokens, measured=each.known is None)

    # daemons, since Ctrl-C must not wait for answers that take minutes
    for _ in range(min(concurrency, len(work))):
        threading.Thread(target=run, daemon=True).start()
    asked = 0
    hopeless = True
    try:
        for _ in range(len(work)):
            each, outcome = arrived.get()
            if isinstance(outcome, Exception):
                raise outcome
            progress.begin(f"{each.questions[0].task}, {each.questions[0].id}")
            keep(each, outcome)
            if each.known is None:
                asked += 1
                hopeless = hopeless and outcome.verdict is None
                if hopeless and asked == HOPELESS:
                    raise DropMatchError(f"{asked} of {asked} answers have no verdict: {advice(outcome.answers)}")
    finally:
        stop.set()
        while not arrived.empty():
            each, outcome = arrived.get()
            if isinstance(outcome, Outcome):
                keep(each, outcome)


def advice(answers: Sequence[str]) -> str:
    """What to do about a judge that gives no verdicts, with one of its answers."""
    line = " ".join("".join(c if c.isprintable() else " " for c in answers[-1]).split())
    shown = line if len(line) <= 160 else f"{line[:60]} ... {line[-90:]}"
    return f"take another judge, or give it more --max-tokens; it says, for example, {shown!r}"


def _judge(each: Question, kind: str, endpoint: Endpoint | None, stop: threading.Event) -> Outcome:
    """Ask, and once more if the answer has no verdict."""
    assert endpoint is not None
    answers: list[str] = []
    tokens = 0
    for again in (False, True):
        reply = endpoint.ask(question(kind, each.prompt, each.talks, each.references, again=again), stop)
        answers.append(reply.text)
        tokens += reply.tokens
        found = None if reply.rejected else verdict(kind, reply.text)
        if found is not None or reply.rejected:
            return Outcome(tuple(answers), found, tokens)
    return Outcome(tuple(answers), None, tokens)
