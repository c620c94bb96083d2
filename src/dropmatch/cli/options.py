"""The options that commands share, each declared once. Names are those of the settings they fill."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

DEFAULT_TARGET = "demo:qwen2.5-coder"


def _option(panel: str, *names: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)


MODELS, JUDGING, DRAFTING, SAMPLING, PROMPTING, OUTPUT = (
    "Models",
    "Acceptance: which draft tokens are accepted",
    "Drafting",
    "Sampling and length",
    "Prompt",
    "Output",
)

# models
Target = Annotated[
    str,
    _option(
        MODELS,
        "--target",
        metavar="MODEL",
        help="The model whose text is wanted: a hub id (owner/name), a local folder, a .gguf file, or a demo "
        "model (see: dropmatch models list).",
    ),
]
Draft = Annotated[
    str | None,
    _option(
        MODELS,
        "--draft",
        metavar="MODEL",
        show_default="the demo target's own",
        help="The smaller model that proposes tokens, of the target's family and named likewise; or "
        "prompt-lookup, which copies from earlier in the text and needs no model.",
    ),
]
DType = Annotated[
    str,
    _option(
        MODELS,
        "--dtype",
        metavar="TYPE",
        help="Number format of both models: auto (as stored), bfloat16, float16 or float32.",
    ),
]
DraftWeights = Annotated[
    str,
    _option(
        MODELS,
        "--draft-weights",
        metavar="KIND",
        help="Weights of the draft model on a CPU: int4 (a 4-bit copy: faster drafts, and strict decoding stays "
        "lossless), dense, or auto (int4 where it can be had).",
    ),
]
Device = Annotated[
    str | None,
    _option(
        MODELS,
        "--device",
        metavar="DEVICE",
        show_default="a GPU if there is one",
        help="Where both models run: cpu, cuda, cuda:1, ...",
    ),
]

# acceptance
Rule = Annotated[
    str,
    _option(
        JUDGING,
        "--rule",
        metavar="RULE",
        help="How a draft token is judged. strict: only the target's own token (lossless). naive: a token that "
        "one of the heads chose. js: the draft's distribution is no farther from the heads' centroid than the "
        "farthest head, or its token is their majority. All rules: dropmatch rules. Settings may stand behind it, as "
        "in js:p=0.2:K=3 or typical:threshold=0.1.",
    ),
]
Heads = Annotated[
    int,
    _option(
        JUDGING,
        "--heads",
        "-K",
        metavar="K",
        help="K, how many heads the rule looks at (1 to 1024).",
    ),
]
Dropout = Annotated[
    float,
    _option(
        JUDGING,
        "--dropout",
        "-p",
        metavar="P",
        help="p, the probability that a unit of the hidden state is dropped (0 to below 1). Larger is more "
        "permissive; 0 accepts exact matches only.",
    ),
]
Verdict = Annotated[
    str,
    _option(
        JUDGING,
        "--verdict",
        metavar="HOW",
        help="sampled: one set of K random heads decides, as in the paper. denoised: accept where the probability of "
        "acceptance over sets of K heads is at least --strictness; no randomness, no seed. auto: denoised, or sampled "
        "where --mask-seed, --support or --heads-mode dropout ask for the paper's heads, or the LM head is quantised.",
    ),
]
Strictness = Annotated[
    float,
    _option(
        JUDGING,
        "--strictness",
        metavar="P",
        help="The probability of acceptance that a denoised verdict asks for (above 0, to 1). Larger is stricter.",
    ),
]
HeadsMode = Annotated[
    str,
    _option(
        JUDGING,
        "--heads-mode",
        metavar="HOW",
        help="How heads are made. dropout: by masks on the hidden state, as in the paper. gaussian: drawn for the "
        "likeliest tokens from the distribution that dropout gives their logits, at a fraction of the cost. auto: "
        "gaussian for a denoised verdict, dropout for a sampled one.",
    ),
]
TokenFloor = Annotated[
    float | None,
    _option(
        JUDGING,
        "--token-floor",
        metavar="P",
        show_default="0.1 for denoised verdicts of heads, else 0",
        help="A lossy acceptance also needs this probability in the heads' centroid (0 to 1); 0 is the paper.",
    ),
]
Support = Annotated[
    str,
    _option(
        JUDGING,
        "--support",
        metavar="WHICH",
        help="Tokens that dropout heads are evaluated on. shortlist: the likeliest ones, and one bucket for the "
        "rest; full: the whole vocabulary; auto: the shortlist where the LM head allows it.",
    ),
]
Evaluation = Annotated[
    str,
    _option(
        JUDGING,
        "--evaluation",
        metavar="WHEN",
        help="lazy asks the rule only where the draft is no exact match; eager about every draft token, as the "
        "paper's statistics do.",
    ),
]
MaskSeed = Annotated[
    int | None,
    _option(
        JUDGING,
        "--mask-seed",
        metavar="N",
        show_default="the value of --seed, or 0",
        help="Seed of the heads of a sampled verdict.",
    ),
]

# drafting
DraftLength = Annotated[
    int,
    _option(
        DRAFTING,
        "--draft-length",
        "-L",
        metavar="L",
        help="L, the most tokens proposed per round (0 to 128); 0 is plain decoding.",
    ),
]
DraftStopProbability = Annotated[
    float,
    _option(
        DRAFTING,
        "--draft-stop-probability",
        metavar="P",
        help="End a draft after a token that the draft model itself gives less than this (0 to below 1); 0 "
        "always drafts L tokens.",
    ),
]

# sampling and length
Seed = Annotated[int, _option(SAMPLING, "--seed", metavar="N", help="Seed of every random number.")]
Temperature = Annotated[
    float, _option(SAMPLING, "--temperature", metavar="T", help="T, 0 or more; 0 takes the likeliest token.")
]
TopK = Annotated[int, _option(SAMPLING, "--top-k", metavar="N", help="Sample from the N likeliest tokens; 0 is all.")]
TopP = Annotated[
    float,
    _option(
        SAMPLING,
        "--top-p",
        metavar="P",
        help="Sample from the fewest tokens that together have this probability (above 0, to 1); 1 is all.",
    ),
]
MaxTokens = Annotated[
    int, _option(SAMPLING, "--max-tokens", metavar="N", help="The most tokens to generate, 1 or more.")
]
MinTokens = Annotated[
    int,
    _option(SAMPLING, "--min-tokens", metavar="N", help="No end of text before this many tokens (0 to --max-tokens)."),
]
Stop = Annotated[
    list[str] | None,
    _option(
        SAMPLING,
        "--stop",
        metavar="TEXT",
        show_default=False,
        help="End after this text; may be given several times.",
    ),
]

# prompt
System = Annotated[
    str | None,
    _option(
        PROMPTING,
        "--system",
        metavar="TEXT",
        show_default=False,
        help="System message before the prompt; needs a model with a chat template.",
    ),
]
Raw = Annotated[
    bool,
    _option(
        PROMPTING,
        "--raw",
        help="Continue the prompt as it is. Otherwise it is sent as a user's message where the model has a "
        "chat template.",
    ),
]
RawPrompts = Annotated[
    bool,
    _option(
        PROMPTING,
        "--raw",
        help="A task's prompts are texts to be continued, for models without a chat template. Otherwise they are chat "
        "messages.",
    ),
]

# output
Color = Annotated[
    bool | None,
    _option(
        OUTPUT,
        "--color/--no-color",
        show_default="if the terminal can",
        help="Colour each token by why it was accepted.",
    ),
]
LogProbs = Annotated[
    bool,
    _option(
        OUTPUT,
        "--logprobs",
        help="Log-probability of each token under the target without dropout: in --json and --trace, and its "
        "mean in the summary.",
    ),
]
Trace = Annotated[
    Path | None,
    _option(
        OUTPUT,
        "--trace",
        metavar="FILE",
        show_default=False,
        help="Write one line of JSON per round: every draft token with its verdict, the reason and the numbers "
        "behind it.",
    ),
]
Json = Annotated[
    bool,
    _option(
        OUTPUT,
        "--json",
        help="Print one JSON object instead of the text: tokens with reasons, statistics, settings, versions.",
    ),
]
