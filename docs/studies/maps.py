"""Whether the map's accuracy matters for learning: Soren's maps and Muon at equal update RMS and at
their tuned rates.

    python docs/studies/maps.py docs/studies/maps.jsonl            the missing runs, one JSON line each
    python docs/studies/maps.py docs/studies/maps.jsonl --tasks source --columns muon
    python docs/studies/maps.py docs/studies/maps.jsonl --table    the tables of maps.md, of the runs in the file
    python docs/studies/maps.py docs/studies/maps.jsonl --half --tasks source --columns exact "sns 15"

Two tasks: "quickstart", its SFT cut to 150 of 600 steps, and "source", a Llama of 1.25 million
parameters on the bytes of the standard library. All columns but the last have match_rms_measured,
so that at one learning rate they have one update RMS; embeddings, head and norms have AdamW at a
fixed rate. First five seeds (weights and order of the data) at the rate that all share. Then each
column's own rate: powers of two, by the mean loss of other seeds, extended until the best is
inside, and the five seeds at the best. With --half the rates half a power of two below and above
the best are tried too. The loss is that of the same held-out data for all. An hour on two cores,
one task on each, with OMP_NUM_THREADS=1; without --half.
"""

import argparse
import io
import json
import math
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console
from scipy.stats import ttest_1samp
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from soren_align import recipe
from soren_align.evaluate.stats.paired import holm
from soren_align.launch.preparation import prepare
from soren_align.optim import build_optimizer
from soren_align.run.folder import RunFolder
from soren_align.training import run as training
from soren_align.training import setup

COARSE = {"name": "minimax", "resolution": 0.01}
COLUMNS = {
    "exact": {"name": "soren", "map": {"name": "exact"}},
    "minimax 0.0004": {"name": "soren", "map": {"name": "minimax", "resolution": 0.0004}},
    "minimax 0.001": {"name": "soren", "map": {"name": "minimax", "resolution": 0.001}},
    "minimax 0.01": {"name": "soren", "map": COARSE},
    "sns 15": {"name": "soren", "map": {"name": "sns", "steps": 15}},
    "released": {"name": "soren", "map": {"name": "released"}},
    "muon": {"name": "muon"},
    "minimax 0.01, match_rms_adamw": {
        "name": "soren",
        "map": COARSE,
        "adjust_lr_fn": "match_rms_adamw",
    },
}
SHARED_RATES = {"quickstart": 2**-6, "source": 2**-6}
GRID = (0.5, 1, 2)  # times the shared rate, at first
# more where a large rate may diverge
GRID_SEEDS = {"quickstart": (100, 101, 102, 103), "source": (100, 101)}
SEEDS = (0, 1, 2, 3, 4)
AUX_LR = 3e-3
T_975 = 2.776  # Student's t of 4 degrees of freedom, for 95% intervals

NUM_STEPS = {"quickstart": 150, "source": 200}
BATCH, LENGTH = 8, 64  # of "source"
MODEL: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 448,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
MODEL |= {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": LENGTH}


def quickstart(settings: dict, lr: float, seed: int) -> tuple[float, float]:
    """The held-out loss and the last logged training loss of the quickstart's SFT, 150 of its 600
    steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {"adjust_lr_fn": "match_rms_measured", **settings}
        sets = [f"optimizer.{key}={json.dumps(value)}" for key, value in settings.items()]
        sets += [
            f"optimizer.lr={lr}",
            f"optimizer.aux_lr={AUX_LR}",
            f"trainer.seed={seed}",
            f"model.init_seed={seed}",
        ]
        sets += [f"trainer.{key}={NUM_STEPS['quickstart']}" for key in ("max_steps", "eval_steps")]
        sets += ["trainer.save_strategy=no", "eval=null", f"run.output_dir={folder}/run"]
        loaded, run = recipe.load("quickstart/sft", sets), RunFolder(Path(folder) / "run")
        prepare(run, loaded)
        assert training.train(setup.set_up_training(loaded, run), run, Console(file=io.StringIO()))
        logs = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return tuple([log[key] for log in logs if key in log][-1] for key in ("eval_loss", "loss"))


def source(settings: dict, lr: float, seed: int) -> tuple[float, float]:
    """The held-out loss and the mean training loss of the last ten steps of a Llama on the standard
    library's bytes.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    settings = {"adjust_lr_fn": "match_rms_measured", **settings}
    optimizer = build_optimizer(model, lr=lr, aux_lr=AUX_LR, **settings)
    num_steps = NUM_STEPS["source"]
    schedule = get_cosine_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    train, held_out = (windows(part, seed) for part in ("train", "held-out"))
    losses = []
    for step in range(num_steps):
        batch = train[step * BATCH : (step + 1) * BATCH]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        batch_losses = [
            float(model(input_ids=batch, labels=batch).loss) for batch in held_out.split(32)
        ]
    return fmean(batch_losses), fmean(losses[-10:])


def windows(part: str, seed: int) -> torch.Tensor:
    """Windows of LENGTH bytes: the held-out ones, always the same 256, of every tenth file; a
    seed's of the others.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files = [file for i, file in enumerate(files) if (i % 10 == 0) == (part == "held-out")]
    text = torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
    ).long()
    generator = torch.Generator().manual_seed(seed if part == "train" else 12345)
    number = NUM_STEPS["source"] * BATCH if part == "train" else 256
    starts = torch.randint(len(text) - LENGTH, (number,), generator=generator)
    return text[starts.unsqueeze(1) + torch.arange(LENGTH)]


def half_powers(lr: float, number: int) -> float:
    """Return a power of two times a number of factors of the square root of 2."""
    return 2.0 ** (math.log2(lr) + number / 2)


class Study:
    """The runs in a file of JSON lines; missing ones are made."""

    def __init__(self, path: Path):
        self.path = path
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        self.runs = {(r["task"], r["column"], r["lr"], r["seed"]): r for r in lines}

    def loss(self, task: str, column: str, lr: float, seed: int) -> float:
        """The held-out loss of one run."""
        key = (task, column, lr, seed)
        if key not in self.runs:
            start = time.perf_counter()
            held_out, train = TASKS[task](COLUMNS[column], lr, seed)
            run = dict(zip(("task", "column", "lr", "seed"), key, strict=True))
            run |= {
                "held_out": held_out,
                "train": train,
                "seconds": round(time.perf_counter() - start, 1),
            }
            with self.path.open("a") as stream:
                stream.write(json.dumps(run) + "\n")
            print(json.dumps(run), file=sys.stderr, flush=True)
            self.runs[key] = run
        return self.runs[key]["held_out"]

    def best_rate(self, task: str, column: str, half: bool) -> float:
        """The rate with the lowest held-out loss on the grid's seeds; the grid is extended until it
        is inside.

        half: try half a power of two to both sides too.
        """

        def mean_loss(lr: float) -> float:
            return fmean(self.loss(task, column, lr, seed) for seed in GRID_SEEDS[task])

        rates = [factor * SHARED_RATES[task] for factor in GRID]
        while (best := min(rates, key=mean_loss)) in (rates[0], rates[-1]):
            rates = [rates[0] / 2, *rates] if best == rates[0] else [*rates, 2 * rates[-1]]
        return (
            min((half_powers(best, number) for number in (-1, 0, 1)), key=mean_loss)
            if half
            else best
        )

    def best_measured(self, task: str, column: str, half: bool) -> float | None:
        """As `best_rate`, of the runs in the file; None if the best is not inside of the grid
        yet.
        """
        rates = {
            key[2] for key in self.runs if key[:2] == (task, column) and key[3] in GRID_SEEDS[task]
        }
        runs_of = {
            lr: [self.runs.get((task, column, lr, seed)) for seed in GRID_SEEDS[task]]
            for lr in sorted(rates)
        }
        losses = {
            lr: fmean(run["held_out"] for run in runs) for lr, runs in runs_of.items() if all(runs)
        }
        powers = [lr for lr in losses if math.log2(lr).is_integer()]
        best = min(powers, key=losses.__getitem__, default=None)
        if best is None or best not in powers[1:-1]:
            return None
        rates = [half_powers(best, number) for number in ((-1, 0, 1) if half else (0,))]
        return min(rates, key=losses.__getitem__) if losses.keys() >= {*rates} else None

    def fresh(self, task: str, column: str, lr: float | None) -> dict[int, float]:
        """The losses of the fresh seeds that the file has, by seed."""
        return {
            seed: self.runs[key]["held_out"]
            for seed in SEEDS
            if (key := (task, column, lr, seed)) in self.runs
        }


TASKS = {"quickstart": quickstart, "source": source}


def interval(values: Sequence[float]) -> str:
    """Mean and half the width of the 95% interval by Student's t; no mean of a part of the
    seeds.
    """
    if len(values) < len(SEEDS):
        return "no result"
    return f"{fmean(values):.4f} ± {T_975 * stdev(values) / len(values) ** 0.5:.4f}"


def table(study: Study, task: str, columns: list[str]) -> None:
    """Print the task's table.
    Differences to the first column are paired by seed, p is Holm's over each half.
    """
    best = {column: study.best_measured(task, column, half=False) for column in columns}
    shared = dict.fromkeys(columns, SHARED_RATES[task])
    cells = [_cells(study, task, columns, rates) for rates in (shared, best)]
    print(
        f"| {task} | at lr {SHARED_RATES[task]:g} | difference | own lr | at its own lr | difference |"
    )
    print("|---|---|---|---|---|---|")
    for column, left, right in zip(columns, *cells, strict=True):
        print(
            "| "
            + " | ".join(
                [column, *left, f"{best[column]:g}" if best[column] else "no result", *right]
            )
            + " |"
        )
    print()


def half_table(study: Study, task: str, columns: list[str]) -> None:
    """Print the columns whose rate is known to half a power of two and has the fresh seeds, each at
    this rate.
    """
    best = {column: study.best_measured(task, column, half=True) for column in columns}
    best = {
        column: rate
        for column, rate in best.items()
        if len(study.fresh(task, column, rate)) == len(SEEDS)
    }
    print(f"| {task}, half powers of 2 | own lr | at its own lr | difference |\n|---|---|---|---|")
    for (column, rate), cells in zip(best.items(), _cells(study, task, [*best], best), strict=True):
        print(f"| {column} | {rate:.4g} | {' | '.join(cells)} |")
    print()


def _cells(
    study: Study, task: str, columns: list[str], rates: Mapping[str, float | None]
) -> list[tuple[str, str]]:
    """(held-out loss, difference to the first column) of every column at its rate."""
    losses = [study.fresh(task, column, rates[column]) for column in columns]
    differences = [
        [each[seed] - losses[0][seed] for seed in each if seed in losses[0]] for each in losses[1:]
    ]
    whole = [i for i, difference in enumerate(differences) if len(difference) == len(SEEDS)]
    p = dict(
        zip(whole, holm([float(ttest_1samp(differences[i], 0).pvalue) for i in whole]), strict=True)
    )
    shown = [
        f"{interval(each)} ({_shown(p[i])})" if i in p else "no result"
        for i, each in enumerate(differences)
    ]
    return [
        (interval([*each.values()]), other)
        for each, other in zip(losses, ["", *shown], strict=True)
    ]


def _shown(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p {p:.3f}"


def main() -> None:
    """Make the runs, or print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--half", action="store_true")
    arguments = parser.parse_args()
    study = Study(arguments.file)
    if arguments.table:
        for task in arguments.tasks:
            (half_table if arguments.half else table)(study, task, arguments.columns)
        return
    pairs = [(task, column) for task in arguments.tasks for column in arguments.columns]
    rates: list[Callable[[str, str], float]] = [
        lambda task, column: study.best_rate(task, column, arguments.half)
    ]
    if not arguments.half:
        rates.insert(0, lambda task, column: SHARED_RATES[task])
    for rate in rates:
        for task, column in pairs:
            lr = rate(task, column)
            for seed in SEEDS:
                study.loss(task, column, lr, seed)


if __name__ == "__main__":
    main()
