"""`dropmatch paper`: the paper's own analyses, on any models."""

from __future__ import annotations

from pathlib import Path

import typer

from dropmatch.cli import options as o
from dropmatch.cli import paper_options as p
from dropmatch.cli import paper_session as s
from dropmatch.cli.session import quiet_libraries
from dropmatch.errors import SettingError

HELP = """\
The paper's own analyses on any models, each beside the numbers that the paper has: Tables 1 to 6 and Figure 3 of \
arXiv 2603.03333. Heads are the paper's: K dropout masks, drawn anew at every position.

  dropmatch paper latency
  dropmatch paper heads --task humaneval --limit 20
  dropmatch paper divergence --task questions.jsonl --seeds 0,1,2 --json divergence.json
  dropmatch paper speculative --task gsm8k_cot --limit 50 --out results/table6
"""
app = typer.Typer(help=HELP, no_args_is_help=True)
DEFAULT_TASKS = ("gsm8k_cot", "mmlu_generative", "ifeval", "humaneval")


@app.command("heads")
def heads_command(
    ctx: typer.Context,
    task: p.Task = "humaneval",
    limit: p.Limit = None,
    max_tokens: p.MaxTokens = 768,
    raw: o.RawPrompts = False,
    dropout: p.Dropouts = "0.1,0.2,0.3,0.4,0.5",
    heads: p.Heads = 5,
    seeds: p.Seeds = "0",
    target: o.Target = o.DEFAULT_TARGET,
    draft: p.DraftAlone = None,
    dtype: o.DType = "auto",
    device: o.Device = None,
    texts: p.Texts = Path("table1.jsonl"),
    json_file: p.JsonFile = None,
    color: p.Color = None,
) -> None:
    """Table 1: how good the text of each single head is.

    Every example is decoded greedily with head i's choice as the token, the
    masks drawn anew at each position, and without dropout; no draft model
    drafts. Texts of all heads are decoded together. If heads are as good as
    the model itself, what they agree on is worth accepting.

    Example: dropmatch paper heads --task humaneval --dropout 0.1,0.3 --limit 20
    """
    from dropmatch import models
    from dropmatch.evaluation.bench.progress import Bar
    from dropmatch.evaluation.paper.heads import check_task, heads_sheet, score_heads
    from dropmatch.evaluation.paper.kept import Numbers
    from dropmatch.evaluation.paper.paths import NO_DROPOUT, all_paths

    settings = s.checked(ctx.params)
    chosen, examples = s.task_of(settings)
    check_task(chosen)
    if draft is not None:
        models.where(draft)  # a name of no known form shows before the hours of decoding
    dropouts, mask_seeds, run = settings["dropout"], settings["seeds"], s.Run()
    paths, scores = all_paths(dropouts, heads, mask_seeds), Numbers(s.beside(texts, "scores"))
    found = s.decoded(run, target, settings, examples, paths, texts)
    alone = None
    if draft is not None and not run.stopped:
        alone = s.decoded(run, draft, settings, examples, [NO_DROPOUT], s.beside(texts, "draft"))
    if run.stopped:
        examples, alone = found.whole(examples, paths), None
    result = None
    if examples:
        with run, Bar(len(paths) + (alone is not None), "paths scored") as bar:
            result = score_heads(chosen, examples, found, dropouts, heads, mask_seeds, bar, alone, scores)
    if result is not None:
        s.show([heads_sheet(result, chosen.name, len(mask_seeds))], color)
        s.write(json_file, "heads", settings, result, found.kept.machine, run)
    run.leave()


@app.command("majority")
def majority_command(
    ctx: typer.Context,
    task: p.Task = "humaneval",
    limit: p.Limit = None,
    max_tokens: p.MaxTokens = 768,
    raw: o.RawPrompts = False,
    dropout: p.Dropout = 0.3,
    heads: p.Heads = 5,
    draft_length: p.DraftLength = 5,
    seeds: p.Seeds = "0",
    support: p.Support = "full",
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    dtype: o.DType = "auto",
    draft_weights: p.DenseDraftWeights = "dense",
    device: o.Device = None,
    rows: p.Rows = p.TABLES_2_AND_3,
    json_file: p.JsonFile = None,
    color: p.Color = None,
) -> None:
    """Table 2: how many of the K heads agree, and how sure they are then.

    Over all draft tokens of a speculative run by js, exact matches too. The
    paper's ratios are of the rows that eq. 6 does not accept, where eq. 7 (the
    majority) decides; those of all rows stand beside them. The rows are kept,
    and paper divergence with the same settings is made of them too.

    Example: dropmatch paper majority --task humaneval --limit 20 --seeds 0,1,2
    """
    from dropmatch.evaluation.paper.majority import majorities, majority_sheet

    settings, run = s.checked(ctx.params), s.Run()
    chosen, by_seed, where = s.rows_of(run, settings, rows)
    if by_seed:
        result = majorities(by_seed, heads)
        s.show([majority_sheet(result, chosen.name, len(by_seed))], color)
        s.write(json_file, "majority", settings, result, where, run)
    run.leave()


@app.command("divergence")
def divergence_command(
    ctx: typer.Context,
    task: p.Task = "humaneval",
    limit: p.Limit = None,
    max_tokens: p.MaxTokens = 768,
    raw: o.RawPrompts = False,
    dropout: p.Dropout = 0.3,
    heads: p.Heads = 5,
    draft_length: p.DraftLength = 5,
    seeds: p.Seeds = "0",
    support: p.Support = "full",
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    dtype: o.DType = "auto",
    draft_weights: p.DenseDraftWeights = "dense",
    device: o.Device = None,
    rows: p.Rows = p.TABLES_2_AND_3,
    json_file: p.JsonFile = None,
    color: p.Color = None,
) -> None:
    """Table 3: how far draft and heads are from the centroid.

    Over all draft tokens of a speculative run by js, exact matches too:
    dispersed rows, which eq. 6 accepts, and concentrated ones, which eq. 7
    alone accepts: there the heads are nearly one, and eq. 6 refuses what is
    hardly farther away. The rows are kept, and paper majority with the same
    settings is made of them too.

    Example: dropmatch paper divergence --task questions.jsonl --limit 20 --seeds 0,1,2
    """
    from dropmatch.evaluation.paper.divergence import divergence_sheet, divergences

    settings, run = s.checked(ctx.params), s.Run()
    chosen, by_seed, where = s.rows_of(run, settings, rows)
    if by_seed:
        result = divergences(by_seed)
        s.show([divergence_sheet(result, chosen.name, len(by_seed))], color)
        s.write(json_file, "divergence", settings, result, where, run)
    run.leave()


@app.command("latency")
def latency_command(
    ctx: typer.Context,
    tokens: p.Tokens = 5,
    rounds: p.Rounds = 20,
    dropout: p.Dropout = 0.3,
    heads: p.Heads = 5,
    target: o.Target = o.DEFAULT_TARGET,
    dtype: o.DType = "auto",
    device: o.Device = None,
    json_file: p.JsonFile = None,
    color: p.Color = None,
) -> None:
    """Table 4: what K heads and their divergences take beside the target's forward.

    Blocks, LM head, K heads, K heads and JS take turns; shares are of the same
    round, so that they mean something on a machine that is busy too. The ways
    of this library (shortlist, denoised) are timed beside the paper's.

    Example: dropmatch paper latency --tokens 5 --rounds 50
    """
    from dropmatch.evaluation.bench.progress import Bar
    from dropmatch.evaluation.paper.latency import check_latency, latency_sheet, measure_latency

    settings = s.checked(ctx.params)
    check_latency(tokens, rounds)
    engine = s.target_alone(target, settings)
    with Bar(rounds, "rounds") as bar:
        result = measure_latency(engine, heads, dropout, tokens, rounds, bar)
    s.show([latency_sheet(result, target)], color)
    s.write(json_file, "latency", settings, result, engine.model.device)


@app.command("batches")
def batches_command(
    ctx: typer.Context,
    task: p.Task = "gsm8k_cot",
    limit: p.Limit = None,
    max_tokens: p.MaxTokens = 768,
    raw: o.RawPrompts = False,
    batches: p.Batches = "1,4,16,32,64,128",
    draft_length: p.DraftLength = 10,
    dropout: p.Dropout = 0.3,
    heads: p.Heads = 5,
    seeds: p.Seeds = "0",
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    dtype: o.DType = "auto",
    out: p.Out = Path("table5"),
    report_only: p.ReportOnly = False,
    json_file: p.JsonFile = None,
    color: p.Color = None,
) -> None:
    """Table 5: throughput of js over standard speculative decoding by batch size, with vLLM.

    Each batch size is a benchmark in a folder of its own under --out, strict
    and js in turns on the same examples; a run that was stopped goes on.

    Example: dropmatch paper batches --task gsm8k_cot --batches 1,4,16 --limit 64 --out results/table5
    """
    from dropmatch.engines.vllm.environment import require_vllm
    from dropmatch.evaluation.bench.plan import parse_tasks
    from dropmatch.evaluation.paper.batches import (
        batch_folder,
        batch_plans,
        batches_sheet,
        batches_table,
        measure_batches,
    )

    if not report_only:
        require_vllm()
    settings, run = s.checked(ctx.params), s.Run()
    values = {"target": target, "draft": draft, "dtype": dtype, "limit": limit, "max_tokens": max_tokens, "raw": raw}
    plans = batch_plans(
        {**values, "tasks": parse_tasks([task])},
        p.integers(batches, "--batches"),
        draft_length,
        heads,
        dropout,
        settings["seeds"],
    )
    if not report_only:
        with run:
            measure_batches(plans, out)
    result = batches_table(plans, out)
    if result["batches"]:
        s.show([batches_sheet(result, len(settings["seeds"]))], color)
        s.write(json_file, "batches", settings, result, batch_folder(out, next(iter(result["batches"]))), run)
    elif report_only:
        raise SettingError(f"{out} holds no benchmark of these batch sizes")
    run.leave()


@app.command("speculative")
def speculative_command(
    ctx: typer.Context,
    task: p.Tasks = None,
    limit: p.Limit = None,
    max_tokens: p.MaxTokens = 768,
    raw: o.RawPrompts = False,
    draft_length: p.Lengths = "5,10",
    dropout: p.Dropout = 0.3,
    heads: p.Heads = 5,
    seeds: p.Seeds = "0",
    evaluation: p.Evaluation = "lazy",
    target: o.Target = o.DEFAULT_TARGET,
    draft: o.Draft = None,
    dtype: o.DType = "auto",
    draft_weights: o.DraftWeights = "auto",
    device: o.Device = None,
    engine: p.EngineName = "hf",
    batch: p.Batch = 1,
    out: p.Out = Path("table6"),
    report_only: p.ReportOnly = False,
    json_file: p.JsonFile = None,
    color: p.Color = None,
) -> None:
    """Table 6: speedup, acceptance length and accuracy of SD and SD+DropMatch.

    A benchmark of strict and js at each draft length, in turns on the same
    examples. A run that was stopped goes on where it was; dropmatch bench
    --out DIR --report-only writes its full reports.

    Example: dropmatch paper speculative --task gsm8k_cot --task humaneval --limit 50 --out results/table6
    """
    from dropmatch.evaluation.bench.plan import parse_tasks
    from dropmatch.evaluation.bench.store import Store
    from dropmatch.evaluation.bench.worker import run as run_benchmark
    from dropmatch.evaluation.bench.worker import tasks_of
    from dropmatch.evaluation.paper.speculative import speculative_plan, speculative_sheets, speculative_table

    settings = s.checked(ctx.params)
    values = {name: settings[name] for name in ("target", "draft", "dtype", "device", "engine")}
    values |= {"draft_weights": draft_weights, "limit": limit, "max_tokens": max_tokens, "raw": raw}
    if engine == "vllm" or batch > 1:  # else the plan refuses it, as one that its engine would not look at
        values["batch"] = batch
    values["tasks"] = parse_tasks(task or DEFAULT_TASKS)
    lengths = p.integers(draft_length, "--draft-length")
    plan = speculative_plan(values, lengths, heads, dropout, settings["seeds"], evaluation)
    tasks = tasks_of(plan)
    run = s.Run()
    if report_only and not (out / "plan.json").exists():
        raise SettingError(f"{out} holds no benchmark")
    if not report_only:
        with run:
            run_benchmark(plan, out, tasks)
    result = speculative_table(plan, Store(out, plan), {each.name: each.metric for each in tasks})
    s.show(speculative_sheets(result, len(settings["seeds"])), color)
    s.write(json_file, "speculative", settings, result, out, run)
    run.leave()


@app.command("similarity")
def similarity_command(
    ctx: typer.Context,
    task: p.TextsTask,
    limit: p.Limit = None,
    max_tokens: p.MaxTokens = 256,
    raw: o.RawPrompts = False,
    dropout: p.Dropouts = "0.1,0.3",
    heads: p.Heads = 5,
    seeds: p.Seeds = "0",
    target: o.Target = o.DEFAULT_TARGET,
    dtype: o.DType = "auto",
    device: o.Device = None,
    encoder: p.Encoder = None,
    nli: p.Nli = None,
    texts: p.Texts = Path("figure3.jsonl"),
    json_file: p.JsonFile = None,
    color: p.Color = None,
) -> None:
    """Figure 3: how alike the texts of different heads are.

    Texts are decoded through each head as in paper heads and compared in
    pairs: cosine of sentence embeddings, and entailment where --nli names a
    model for it.

    Example: dropmatch paper similarity --task questions.jsonl --limit 20
    """
    from dropmatch.evaluation.bench.progress import Bar
    from dropmatch.evaluation.paper.encoders import Entailment, SentenceEncoder
    from dropmatch.evaluation.paper.kept import Numbers
    from dropmatch.evaluation.paper.paths import all_paths
    from dropmatch.evaluation.paper.similarity import check_heads, similarities, similarity_sheets

    settings = s.checked(ctx.params)
    check_heads(heads)
    chosen, examples = s.task_of(settings)
    quiet_libraries()
    # before the hours of decoding: a name that cannot be had shows at once
    comparer = SentenceEncoder(encoder, device)
    entailment = None if nli is None else Entailment(nli, device)
    dropouts, mask_seeds, run = settings["dropout"], settings["seeds"], s.Run()
    paths, entails = all_paths(dropouts, heads, mask_seeds), Numbers(s.beside(texts, "entailment"))
    found = s.decoded(run, target, settings, examples, paths, texts)
    if run.stopped:
        examples = found.whole(examples, paths)
    result = None
    if examples:
        with run, Bar(len(dropouts) * len(mask_seeds), "sets of texts compared") as bar:
            result = similarities(examples, found, dropouts, heads, mask_seeds, comparer, entailment, bar, entails)
    if result is not None:
        s.show(similarity_sheets(result, chosen.name, len(mask_seeds)), color)
        s.write(json_file, "similarity", settings, result, found.kept.machine, run)
    run.leave()
