"""Made-up results with every key that tables and pictures read."""

import math
import random

COLUMNS = ["arc_challenge", "hellaswag", "mmlu", "truthfulqa_mc2", "winogrande", "gsm8k"]
NAMES = ["base", "SFT", "DPO", "checkpoint-12000", "soren", "muon", "htmuon", "adamw"]


def make_results(num_columns=6, num_rows=2, num_published=0, average=True):
    draw = random.Random(0)
    columns = COLUMNS[:num_columns]
    level = {c: draw.uniform(25, 75) for c in columns}
    rows = []
    for i in range(num_rows):
        scores = {c: score(level[c] + i * draw.uniform(-1, 3), draw.choice([817, 1172, 14042])) for c in columns}
        row = {"name": NAMES[i], "model": f"runs/{NAMES[i]}", "scores": scores}
        if "mmlu" in scores:
            scores["mmlu"]["also"] = {"mean over subjects": {"value": scores["mmlu"]["value"] + 0.4}}
        if average:
            scores["average"] = mean(scores)
        if i:
            row["differences"] = {c: difference(s, rows[0]["scores"][c], draw) for c, s in scores.items()}
        rows.append(row)
    return {
        "format": 1,
        "title": "Open LLM Leaderboard v1",
        "suite": "open-llm-leaderboard-v1",
        "rows": rows,
        "published": [published(f"{name}", columns, level, average) for name in ("AdamW", "Muon", "HTMuon", "Soren")][
            :num_published],
        "settings": {"versions": {"lm-eval": "0.4.13", "transformers": "5.23.0", "torch": "2.13.0",
                                  "datasets": "5.2.0"},
                     "task_versions": {c: 3.0 if c == "gsm8k" else 1.0 for c in columns},
                     "num_fewshot": dict(zip(columns, [25, 10, 5, 0, 5, 5], strict=False)),
                     "metrics": {c: "acc_norm,none" for c in columns},
                     "seeds": {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}, "batch_size": 8,
                     "chat_template": False, "bos": False, "dtype": "bfloat16", "device": "cuda", "backend": "hf",
                     "num_processes": 2},
        "notes": [],
    }  # fmt: skip


def score(value, n):
    return {"value": value, "stderr": math.sqrt(value * (100 - value) / n), "n": n}


def mean(scores):
    num = len(scores)
    stderr = math.sqrt(sum(s["stderr"] ** 2 for s in scores.values())) / num
    return {"value": sum(s["value"] for s in scores.values()) / num, "stderr": stderr}


def difference(later, first, draw):
    value = later["value"] - first["value"]
    half = draw.uniform(0.5, 2.5)
    p = math.erfc(1.96 * abs(value) / half / math.sqrt(2))
    return {"value": value, "low": value - half, "high": value + half, "p": p, "p_holm": min(1, 6 * p)}


def published(name, columns, level, average):
    scores = {c: {"value": level[c] + 1, "stderr": 1.2} for c in columns}
    if average:
        scores["average"] = {"value": sum(s["value"] for s in scores.values()) / len(columns)}
    return {"name": name, "source": "Phi Van et al., Table 3", "scores": scores}
