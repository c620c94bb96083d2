"""Open-ended tasks: any file of prompts or conversations. There is no right answer, so there is no score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dropmatch.errors import SettingError
from dropmatch.evaluation.tasks.base import Example, user_message
from dropmatch.evaluation.tasks.jsonl import check_fields, placed_rows

_FASTCHAT = "fastchat/llm_judge/data/{}/question.jsonl of github.com/lm-sys/FastChat"
# sets that users know by name, and where their files are
_SETS = {
    "mt_bench": _FASTCHAT.format("mt_bench"),
    "vicuna_bench": _FASTCHAT.format("vicuna_bench"),
    "spec_bench": "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench",
    "komt_bench": "FastChat/fastchat/llm_judge/data/mt_bench/question_ko.jsonl of github.com/LG-AI-EXAONE/KoMT-Bench",
    "alpaca_eval": "the data set tatsu-lab/alpaca_eval of the hub, described at github.com/tatsu-lab/alpaca_eval (what "
    "it calls instruction is the prompt)",
}


class Prompts:
    """Prompts of a JSONL file: rows with a `prompt`, or with `turns`, what the user says one after the other.

    `id` (or FastChat's `question_id`) is optional, and so are `category` and `reference` or `reference_turns`: for each
    turn a right answer, or several. All but the id and the prompt may stand in `meta`. Each turn is an example of its
    own, the second of 81 is 81#2; examples have category and references in their data.

    Args:
        path: the file.
        chat: each is a user's message; else a text to be continued.
        name: how reports call it; default: the file's name and its folder's.
        turns: at most so many of each row; None is all.
    """

    metric: str | None = None

    def __init__(self, path: Path, chat: bool = True, name: str | None = None, turns: int | None = None) -> None:
        self.path, self._chat, self._turns = Path(path), chat, turns
        self.name = name or f"{self.path.parent.name}/{self.path.stem}".lstrip("/")

    def examples(self, limit: int | None) -> list[Example]:
        """The first rows of the file, each with its turns one after the other.

        Raises:
            SettingError: a row is malformed, or has several turns where prompts are texts to be continued.
        """
        rows = placed_rows(self.path, {})[:limit]
        return [
            example for number, (place, row) in enumerate(rows, start=1) for example in self._of(row, place, number)
        ]

    def score(self, examples: Sequence[Example], texts: Sequence[str]) -> list[float | None]:
        """None for each."""
        return [None] * len(texts)

    def _of(self, row: dict[str, Any], place: str, number: int) -> list[Example]:
        """The examples of one row, a turn each."""
        said = _turns(row, place)
        references, category = _references(row, place, len(said)), _field(row, "category")
        if category is not None and not isinstance(category, str):
            raise SettingError(f"{place}: the field 'category' must be a text, got {category!r}")
        said = said[: self._turns]
        if len(said) > 1 and not self._chat:
            raise SettingError(
                f"{place}: a conversation of {len(said)} turns needs chat messages: leave raw out, or ask its first "
                "turn only (turns: 1, on the command line --turns 1)"
            )
        first = str(row.get("id", row.get("question_id", number)))
        ids = [first, *(f"{first}#{turn}" for turn in range(2, len(said) + 1))]
        found = []
        for turn, i in enumerate(ids, start=1):
            data: dict[str, Any] = {"references": references[:turn]} if references else {}
            data |= {"category": category} if category else {}
            prompt = [message for text in said[:turn] for message in user_message(text)] if self._chat else said[0]
            found.append(Example(i, prompt, data=data, after=tuple(ids[: turn - 1])))  # type: ignore[arg-type]
        return found


def where_to_find(name: str) -> str | None:
    """What to do about the name of a well-known set of open-ended prompts; None of any other name."""
    meant = {known.replace("_", ""): known for known in _SETS}.get(name.lower().replace("-", "").replace("_", ""))
    if meant is None:
        return None
    return (
        f"{name} is a set of open-ended prompts and no task of lm-evaluation-harness: give dropmatch bench its file, "
        f"as in --task {meant}.jsonl, a line an object with prompt or turns. The public one is {_SETS[meant]}"
    )


def _field(row: Mapping[str, Any], *names: str) -> Any:
    """The first of some fields that a row has, itself or in its `meta`."""
    meta = row.get("meta")
    places = (row, meta if isinstance(meta, Mapping) else {})
    return next((each[name] for name in names for each in places if each.get(name) is not None), None)


def _turns(row: dict[str, Any], place: str) -> list[str]:
    """What the user says, turn by turn."""
    turns = _field(row, "turns")
    if turns is None:
        check_fields(row, place, {"prompt": str})
        return [row["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(text, str) and text for text in turns):
        raise SettingError(f"{place}: the field 'turns' must be a list of non-empty texts, got {str(turns)[:80]}")
    if row.get("prompt", turns[0]) != turns[0]:
        raise SettingError(f"{place}: the fields 'prompt' and 'turns' do not begin alike: leave one of them out")
    return turns


def _references(row: dict[str, Any], place: str, turns: int) -> tuple[str, ...]:
    """A text for each turn that has a reference; where several answers are right, a line for each."""
    given = _field(row, "reference_turns", "reference")
    each = given if isinstance(given, list) else [] if given is None else [given]
    if turns == 1 and len(each) > 1:
        each = [each]
    right = [answer if isinstance(answer, list) else [answer] for answer in each]
    if len(right) > turns or not all(isinstance(text, str) for answers in right for text in answers):
        raise SettingError(
            f"{place}: a reference must be a text, or texts, for each of its {turns} turns, got {str(given)[:80]}"
        )
    return tuple(answers[0] if len(answers) == 1 else "\n".join(f"- {text}" for text in answers) for answers in right)
