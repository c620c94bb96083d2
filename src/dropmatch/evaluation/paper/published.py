"""The paper's numbers, to be shown beside those measured here.

"Training-free Dropout Sampling for Semantic Token Acceptance in Speculative Decoding", arXiv 2603.03333v1. Measured
on A100s with targets of 70B and 32B parameters: something to compare with, nothing that another machine should reach.
"""

from __future__ import annotations

from typing import Any

SOURCE = "arXiv 2603.03333v1"
HEADS = 5  # K
DROPOUT = 0.3  # p, of all tables but the first
SMALL_DROPOUT = 0.1  # the other one of Figure 3

# Table 1: HumanEval Pass@1 in % of each head by p; Llama-3.1-70B-Instruct
HEAD_SCORES: dict[float, tuple[float, ...]] = {
    0.1: (81.1, 78.7, 81.1, 86.0, 77.4),
    0.2: (80.5, 81.1, 80.5, 81.1, 78.7),
    0.3: (78.7, 81.1, 75.6, 77.4, 79.9),
    0.4: (76.2, 79.3, 80.5, 73.2, 76.2),
    0.5: (78.7, 65.2, 73.8, 64.0, 70.1),
}
NO_DROPOUT_SCORE = 81.7
DRAFT_SCORE = 72.6  # of its draft, Llama-3.1-8B-Instruct, alone

# Table 2: heads agreeing -> ratio in %, mean probability; the same target on HumanEval
MAJORITY: dict[int, tuple[float, float]] = {
    1: (0.00, 0.255),
    2: (0.14, 0.325),
    3: (0.82, 0.460),
    4: (0.54, 0.517),
    5: (98.40, 0.939),
}

# Table 3: average JS to the centroid, of the draft and of the heads
DIVERGENCE: dict[str, tuple[float, float]] = {"dispersed": (0.0254, 0.0313), "concentrated": (0.0097, 0.0014)}

# Table 4: total ms, ms of the head, its % of the total; 70B, batch 1, 5 input tokens
LATENCY: dict[str, tuple[float, float, float]] = {
    "head": (107.0, 0.05, 0.05),
    "naive": (104.0, 0.17, 0.17),
    "js": (106.0, 1.74, 1.64),
}
INPUT_TOKENS = 5

# Table 5: throughput over that of standard speculative decoding, by batch size; GSM8K, L=10, four GPUs
BATCHES: dict[int, float] = {1: 1.19, 4: 1.18, 16: 1.12, 32: 1.10, 64: 1.15, 128: 1.10}
BATCHES_DRAFT_LENGTH = 10

# Table 6: pair -> (method, L) -> task -> speedup over SD at L=5, tau with the bonus token, accuracy in %
SPECULATIVE: dict[str, dict[tuple[str, int], dict[str, tuple[float, float, float]]]] = {
    "Llama-3.1 8B/70B": {
        ("SD", 5): {
            "gsm8k": (1.00, 4.97, 94.69),
            "mmlu": (1.00, 4.02, 85.94),
            "ifeval": (1.00, 4.12, 85.60),
            "humaneval": (1.00, 5.40, 81.70),
        },
        ("SD+DM", 5): {
            "gsm8k": (1.10, 5.50, 94.29),
            "mmlu": (1.09, 4.43, 85.50),
            "ifeval": (1.10, 4.48, 85.24),
            "humaneval": (1.00, 5.57, 79.89),
        },
        ("SD", 10): {
            "gsm8k": (1.02, 7.62, 95.40),
            "mmlu": (0.86, 5.25, 86.06),
            "ifeval": (0.87, 5.47, 86.86),
            "humaneval": (1.13, 8.87, 81.70),
        },
        ("SD+DM", 10): {
            "gsm8k": (1.22, 9.20, 93.90),
            "mmlu": (1.02, 6.06, 85.34),
            "ifeval": (0.99, 6.34, 86.17),
            "humaneval": (1.12, 9.38, 78.70),
        },
    },
    "Qwen3 4B/32B": {
        ("SD", 5): {
            "gsm8k": (1.00, 5.06, 86.20),
            "mmlu": (1.00, 4.62, 83.21),
            "ifeval": (1.00, 3.40, 80.72),
            "humaneval": (1.00, 5.09, 90.4),
        },
        ("SD+DM", 5): {
            "gsm8k": (1.07, 5.66, 87.49),
            "mmlu": (1.05, 5.15, 82.15),
            "ifeval": (1.19, 4.22, 78.24),
            "humaneval": (1.00, 5.27, 90.9),
        },
        ("SD", 10): {
            "gsm8k": (0.96, 7.87, 86.20),
            "mmlu": (1.12, 6.48, 83.26),
            "ifeval": (0.72, 4.04, 82.31),
            "humaneval": (1.31, 8.11, 92.1),
        },
        ("SD+DM", 10): {
            "gsm8k": (1.13, 9.78, 86.58),
            "mmlu": (1.49, 8.60, 82.06),
            "ifeval": (0.98, 5.67, 81.60),
            "humaneval": (1.39, 8.72, 90.2),
        },
    },
}
SPECULATIVE_DRAFT_LENGTHS = (5, 10)

# its tasks by the names that they have here. The paper used lm-evaluation-harness and EvalPlus and does not say which
# prompts: so all of the harness's that ask the same questions, but no other data (mmlu_pro, gsm8k_platinum, ifeval_es),
# no part of them (mmlu_stem_generative), and not humaneval_plus, whose tests are other ones
SPECULATIVE_TASKS: dict[str, tuple[str, ...]] = {
    "gsm8k": ("gsm8k", "gsm8k_cot", "gsm8k_cot_zeroshot", "gsm8k_llama", "gsm8k_cot_llama"),
    "mmlu": (
        "mmlu",
        "mmlu_generative",
        "mmlu_llama",
        "mmlu_cot_llama",
        "mmlu_flan_cot_fewshot",
        "mmlu_flan_cot_zeroshot",
        "mmlu_flan_n_shot_generative",
    ),
    "ifeval": ("ifeval", "leaderboard_ifeval"),
    "humaneval": ("humaneval",),
}

# Figure 3, read off by eye: similarity of two heads' texts on Spec-Bench; both are higher at p=0.1 than at p=0.3
COSINE = "about 0.9"
ENTAILMENT = "about 0.60 to 0.65"


def for_json() -> dict[str, Any]:
    """All numbers by the name of their analysis."""
    return {
        "source": SOURCE,
        "heads": {"rows": {str(p): list(row) for p, row in HEAD_SCORES.items()}, "no_dropout": NO_DROPOUT_SCORE}
        | {"draft": DRAFT_SCORE},
        "majority": {str(n): {"ratio_pct": a, "probability": b} for n, (a, b) in MAJORITY.items()},
        "divergence": {kind: {"draft": a, "heads": b} for kind, (a, b) in DIVERGENCE.items()},
        "latency": {n: {"total_ms": a, "ms": b, "share_pct": c} for n, (a, b, c) in LATENCY.items()},
        "batches": {str(batch): ratio for batch, ratio in BATCHES.items()},
        "speculative": {
            pair: [{"method": method, "draft_length": length, **tasks} for (method, length), tasks in rows.items()]
            for pair, rows in SPECULATIVE.items()
        },
        "similarity": {"cosine": COSINE, "entailment": ENTAILMENT},
    }


def task_of(name: str) -> str | None:
    """Which of Table 6's tasks a task is, by its name; None if it is none."""
    return next((task for task, names in SPECULATIVE_TASKS.items() if name in names), None)
