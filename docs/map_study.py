"""Whether the map's accuracy matters for learning: Soren's maps and Muon at equal update RMS and at their tuned rates.

    python docs/map_study.py docs/map_study.jsonl            the missing runs, one JSON line each
    python docs/map_study.py docs/map_study.jsonl --tasks source --columns muon
    python docs/map_study.py docs/map_study.jsonl --table    the tables of docs/optimizers.md, of the runs in the file

Two tasks: "quickstart", its SFT cut to 150 of 600 steps, and "source", a Llama of 1.25 million parameters on the bytes
of the standard library. All columns but the last have match_rms_measured, so that at one learning rate they have one
update RMS; embeddings, head and norms have AdamW at a fixed rate. First five seeds (weights and order of the data) at
the rate that all share. Then each column's own rate: powers of two, on another seed, extended until the best is inside,
and the five seeds at the best. The loss is that of the same held-out data for all. Forty minutes of one core.
"""

import argparse
import io
import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from soren_align import recipe
from soren_align.launch.preparation import prepare
from soren_align.optim import build_optimizer
from soren_align.run_folder import RunFolder
from soren_align.trainers import training, training_setup

COARSE = {"name": "minimax", "resolution": 0.01}
COLUMNS = {
    "exact": {"name": "soren", "map": {"name": "exact"}},
    "minimax 0.0004": {"name": "soren", "map": {"name": "minimax", "resolution": 0.0004}},
    "minimax 0.001": {"name": "soren", "map": {"name": "minimax", "resolution": 0.001}},
    "minimax 0.01": {"name": "soren", "map": COARSE},
    "sns 15": {"name": "soren", "map": {"name": "sns", "steps": 15}},
    "muon": {"name": "muon"},
    "minimax 0.01, match_rms_adamw": {"name": "soren", "map": COARSE, "adjust_lr_fn": "match_rms_adamw"},
}
SHARED_RATES = {"quickstart": 2**-6, "source": 2**-6}
GRID = (0.5, 1, 2)  # times the shared rate, at first
GRID_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
AUX_LR = 3e-3
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t by the number of seeds, for 95% intervals

NUM_STEPS, BATCH, LENGTH = 100, 8, 64  # of "source"
MODEL: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": 4, "num_attention_heads": 4}
MODEL |= {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": LENGTH}


def quickstart(settings: dict, lr: float, seed: int) -> tuple[float, float]:
    """The held-out loss and the last logged training loss of the quickstart's SFT, 150 of its 600 steps."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"adjust_lr_fn": "match_rms_measured", **settings}
        sets = [f"optimizer.{key}={json.dumps(value)}" for key, value in settings.items()]
        sets += [f"optimizer.lr={lr}", f"optimizer.aux_lr={AUX_LR}", f"trainer.seed={seed}", f"model.init_seed={seed}"]
        sets += ["trainer.max_steps=150", "trainer.eval_steps=150"]
        sets += ["trainer.save_strategy=no", "eval=null", f"run.output_dir={folder}/run"]
        loaded, run = recipe.load("quickstart/sft", sets), RunFolder(Path(folder) / "run")
        prepare(run, loaded)
        assert training.train(training_setup.set_up_training(loaded, run), run, Console(file=io.StringIO()))
        logs = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return tuple([log[key] for log in logs if key in log][-1] for key in ("eval_loss", "loss"))


def source(settings: dict, lr: float, seed: int) -> tuple[float, float]:
    """The held-out loss and the mean training loss of the last ten steps of a Llama on the standard library's bytes."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    settings = {"adjust_lr_fn": "match_rms_measured", **settings}
    optimizer = build_optimizer(model, lr=lr, aux_lr=AUX_LR, **settings)
    schedule = get_cosine_schedule_with_warmup(optimizer, NUM_STEPS // 10, NUM_STEPS)
    train, held_out = (windows(part, seed) for part in ("train", "held-out"))
    losses = []
    for step in range(NUM_STEPS):
        batch = train[step * BATCH : (step + 1) * BATCH]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        batch_losses = [float(model(input_ids=batch, labels=batch).loss) for batch in held_out.split(32)]
    return fmean(batch_losses), fmean(losses[-10:])


def windows(part: str, seed: int) -> torch.Tensor:
    """Windows of LENGTH bytes: the held-out ones, always the same 256, of every tenth file; a seed's of the others."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files = [file for i, file in enumerate(files) if (i % 10 == 0) == (part == "held-out")]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed if part == "train" else 12345)
    number = NUM_STEPS * BATCH if part == "train" else 256
    starts = torch.randint(len(text) - LENGTH, (number,), generator=generator)
    return text[starts.unsqueeze(1) + torch.arange(LENGTH)]


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
            run |= {"held_out": held_out, "train": train, "seconds": round(time.perf_counter() - start, 1)}
            with self.path.open("a") as stream:
                stream.write(json.dumps(run) + "\n")
            print(json.dumps(run), file=sys.stderr, flush=True)
            self.runs[key] = run
        return self.runs[key]["held_out"]

    def best_rate(self, task: str, column: str) -> float:
        """The rate with the lowest held-out loss on the grid's seed; the grid is extended until it is inside."""
        rates = [factor * SHARED_RATES[task] for factor in GRID]
        while True:
            losses = {lr: self.loss(task, column, lr, GRID_SEED) for lr in rates}
            best = min(rates, key=losses.__getitem__)
            if best not in (rates[0], rates[-1]):
                return best
            rates = [rates[0] / 2, *rates] if best == rates[0] else [*rates, 2 * rates[-1]]

    def grid(self, task: str, column: str) -> dict[float, float]:
        """The losses of the grid's seed that the file has, by rate."""
        return {
            lr: r["held_out"] for (*of, lr, seed), r in self.runs.items() if (*of, seed) == (task, column, GRID_SEED)
        }

    def fresh(self, task: str, column: str, lr: float | None) -> dict[int, float]:
        """The losses of the fresh seeds that the file has, by seed."""
        return {seed: self.runs[key]["held_out"] for seed in SEEDS if (key := (task, column, lr, seed)) in self.runs}


TASKS = {"quickstart": quickstart, "source": source}


def interval(values: list[float]) -> str:
    """Mean and half the width of the 95% interval."""
    if len(values) < 2:
        return "no result"
    return f"{fmean(values):.4f} ± {T_975[len(values)] * stdev(values) / len(values) ** 0.5:.4f}"


def table(study: Study, task: str, columns: list[str]) -> None:
    """Print the task's table; every column is compared with the first, seed by seed."""
    print(
        f"| {task} | seeds | lr {SHARED_RATES[task]:g} | difference | best lr | seeds | at its best lr | difference |"
    )
    print("|---|---|---|---|---|---|---|---|")
    references: list[dict[int, float]] = []
    for column in columns:
        grid = study.grid(task, column)
        best = min(grid, key=grid.__getitem__) if len(grid) >= len(GRID) else None
        cells = []
        for part, rate in enumerate((SHARED_RATES[task], best)):
            losses = study.fresh(task, column, rate)
            references += [losses] if column == columns[0] else []
            differences = [losses[seed] - references[part][seed] for seed in losses if seed in references[part]]
            difference = "" if column == columns[0] else interval(differences)
            cells += [str(len(losses)), interval([*losses.values()]), difference]
        cells.insert(3, f"{best:g}" if best else "no result")
        print(f"| {column} | {' | '.join(cells)} |")
    print()


def main() -> None:
    """Make the runs, or print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    study = Study(arguments.file)
    if arguments.table:
        for task in arguments.tasks:
            table(study, task, arguments.columns)
        return
    pairs = [(task, column) for task in arguments.tasks for column in arguments.columns]
    rates: list[Callable[[str, str], float]] = [lambda task, _: SHARED_RATES[task], study.best_rate]
    for rate in rates:
        for task, column in pairs:
            lr = rate(task, column)
            for seed in SEEDS:
                study.loss(task, column, lr, seed)


if __name__ == "__main__":
    main()
