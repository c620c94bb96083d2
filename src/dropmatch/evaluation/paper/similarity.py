"""Figure 3: how alike the texts of different heads are.

Every example is decoded through each of K heads (see `paths`). For every pair of heads: the cosine of their texts'
sentence embeddings, and how likely a model of natural language inference says that one text entails the other; both
are means over examples. The texts alone are compared, without their prompt, and only as far as the models read.

To read the cosines by: those of a head with the text without dropout, and those of texts of different examples.

K heads, n examples, d units in an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dropmatch.errors import SettingError
from dropmatch.evaluation.bench.runner import Progress
from dropmatch.evaluation.bench.tables import Sheet
from dropmatch.evaluation.paper import published
from dropmatch.evaluation.paper.encoders import Entailment, SentenceEncoder
from dropmatch.evaluation.paper.kept import Numbers
from dropmatch.evaluation.paper.paths import NO_DROPOUT, Path
from dropmatch.evaluation.paper.settings import over_seeds, spread_text
from dropmatch.evaluation.paper.texts import Texts
from dropmatch.evaluation.tasks import Example

Matrix = list[list[float]]


def check_heads(heads: int) -> None:
    """Refuse a number of heads that leaves nothing to compare.

    Raises:
        SettingError: there are no pairs.
    """
    if heads < 2:
        raise SettingError(f"heads (K) must be at least 2 to compare the texts of two, got {heads}")


def similarities(
    examples: Sequence[Example],
    texts: Texts,
    dropouts: Sequence[float],
    heads: int,
    seeds: Sequence[int],
    encoder: SentenceEncoder,
    entailment: Entailment | None,
    progress: Progress,
    entails: Numbers | None = None,
) -> dict[str, Any]:
    """Figure 3.

    Args:
        examples: n of them.
        texts: of all of them through all heads, p and seeds, and without dropout.
        dropouts: p of the panels.
        heads: K.
        seeds: mask seeds.
        encoder: makes embeddings.
        entailment: None leaves it out.
        progress: told of each p and seed.
        entails: what is known of pairs of texts already, and learns of the others.

    Returns:
        For JSON: `rows`, for each p: `cosine` and `entailment` as matrices [K][K], means over examples and seeds;
        over seeds `mean_cosine`, `mean_entailment` (of different heads), `to_no_dropout` and `same_text_pct`; and
        `unrelated`, the cosine of texts of different examples (None if there is one example).
    """
    plain = encoder.embed([texts.of(example, NO_DROPOUT).text for example in examples])  # [n, d]
    rows, entails = [], entails or Numbers()
    for dropout in dropouts:
        runs = []
        for seed in seeds:
            progress.begin(f"comparing texts, p={dropout:g}, mask seed {seed}")
            paths = [Path(dropout, head, seed) if dropout else NO_DROPOUT for head in range(heads)]
            columns = [[texts.of(example, path).text for example in examples] for path in paths]
            runs.append(_run(columns, plain, encoder, entailment, entails))
            progress.done(0, measured=True)
        row: dict[str, Any] = {"dropout": dropout}
        for name in ("cosine", "entailment"):
            matrices = [run[name] for run in runs if run[name] is not None]
            row[name] = torch.stack(matrices).mean(dim=0).tolist() if matrices else None
        for name in ("mean_cosine", "mean_entailment", "to_no_dropout", "same_text_pct"):
            row[name] = over_seeds([run[name] for run in runs])
        rows.append(row)
    return {
        "examples": len(examples),
        "encoder": encoder.name,
        "entailment_model": None if entailment is None else entailment.name,
        "unrelated": _off_diagonal(plain @ plain.T) if len(examples) > 1 else None,
        "rows": rows,
    }


def _run(
    columns: Sequence[Sequence[str]],
    plain: Tensor,
    encoder: SentenceEncoder,
    entailment: Entailment | None,
    known: Numbers,
) -> dict[str, Any]:
    """One p and seed: the texts of each of K heads, and the embeddings [n, d] of those without dropout."""
    heads, count = len(columns), len(columns[0])
    embedded = torch.stack([encoder.embed(column) for column in columns])  # [K, n, d]
    cosine = torch.einsum("knd,lnd->kl", embedded, embedded) / count  # [K, K]
    entails = None
    if entailment is not None:
        entails = torch.tensor(
            [[_mean(_entails(entailment, known, premise, other)) for other in columns] for premise in columns]
        )
    pairs = [(i, j) for i in range(heads) for j in range(i)]
    same = [columns[i][n] == columns[j][n] for i, j in pairs for n in range(count)]
    return {
        "cosine": cosine,
        "entailment": entails,
        "mean_cosine": _off_diagonal(cosine),
        "mean_entailment": None if entails is None else _off_diagonal(entails),
        "to_no_dropout": float((embedded * plain).sum(dim=2).mean()),
        "same_text_pct": 100 * sum(same) / len(same),
    }


def _entails(entailment: Entailment, known: Numbers, premises: Sequence[str], others: Sequence[str]) -> list[float]:
    """How likely each premise entails the other text, asked where it is not known."""
    of = [(entailment.name, premise, other) for premise, other in zip(premises, others, strict=True)]
    values, _ = known.all_of(
        of, lambda rows: entailment.probabilities([premises[i] for i in rows], [others[i] for i in rows])
    )
    return [float(value) for value in values if value is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _off_diagonal(matrix: Tensor) -> float:
    """Mean of what is beside the diagonal: [K, K], K at least 2."""
    size = matrix.shape[0]
    return float((matrix.sum() - matrix.diagonal().sum()) / (size * size - size))


def similarity_sheets(found: dict[str, Any], task: str, seeds: int) -> list[Sheet]:
    """Figure 3 as texts: a summary, then a matrix for each p and measure."""
    rows: list[tuple[str, ...]] = []
    for row in found["rows"]:
        cells = [spread_text(row[name], 3) for name in ("mean_cosine", "mean_entailment", "to_no_dropout")]
        rows.append((f"p={row['dropout']:g}", *cells, spread_text(row["same_text_pct"], 1)))
    rows.append(("paper, p=0.1 and p=0.3", published.COSINE, published.ENTAILMENT, "", ""))
    notes = [f"{found['examples']} examples; cosine by {found['encoder']}, means over pairs of different heads."]
    if found["unrelated"] is not None:
        notes.append(f"Cosine of texts of different examples, without dropout: {found['unrelated']:.3f}.")
    if found["entailment_model"] is None:
        notes.append("Entailment was left out: name a model of natural language inference with --nli.")
    if seeds > 1:
        notes.append(f"Mean over {seeds} mask seeds, and the least and the greatest.")
    notes.append("The paper, read off its figure: Llama-3.1-70B-Instruct, Spec-Bench; both are higher at p=0.1.")
    headings = ("", "cosine", "entailment", "cosine to no dropout", "same text %")
    sheets = [Sheet(f"Figure 3: texts of different heads, {task}", headings, rows, notes)]
    for row in found["rows"]:
        for name in ("cosine", "entailment"):
            if row[name] is not None:
                sheets.append(_matrix_sheet(f"{name}, p={row['dropout']:g}", row[name]))
    return sheets


def _matrix_sheet(title: str, matrix: Matrix) -> Sheet:
    names = tuple(f"H{i}" for i in range(1, len(matrix) + 1))
    rows = [(name, *(f"{value:.3f}" for value in row)) for name, row in zip(names, matrix, strict=True)]
    return Sheet(title, ("", *names), rows, [])
