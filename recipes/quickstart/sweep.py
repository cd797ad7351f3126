"""The small sweep behind the quickstart's learning rates: python recipes/quickstart/sweep.py sft|dpo [--seeds 0 1 2].

Runs the shipped recipe for every optimizer, learning rate and seed into runs/sweep/, skips what is finished, and prints
one Markdown table: mean over seeds (least seed in brackets; of the held-out loss the largest). DPO starts from the
shipped SFT recipe. A minute a run of SFT's 600 steps; `--steps 150` is faster.
"""

import argparse
import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

OPTIMIZERS = ("adamw", "muon", "htmuon", "soren")
RATES = {"sft": ("2.5e-3", "5e-3", "1e-2"), "dpo": ("1e-4", "2e-4", "4e-4", "5.5e-4", "8e-4")}
STEPS = {"sft": 600, "dpo": 100}
COLUMNS = ("zoo_mc", "zoo_gen", "preference")


def run(task: str, steps: int, optimizer: str, rate: str, seed: int) -> Path:
    """Train and evaluate one point; returns its run folder. DPO starts from the shipped SFT recipe at the same seed."""
    folder = Path("runs/sweep") / f"{task}-{steps}" / f"{optimizer}-{rate}-{seed}"
    sets = [f"run.output_dir={folder}", f"optimizer.name={optimizer}", f"trainer.seed={seed}"]
    sets += [f"optimizer.lr={rate}", f"optimizer.aux_lr={rate}", f"trainer.max_steps={steps}"]
    if task == "sft":
        sets.append(f"model.init_seed={seed}")
    else:
        sets.append(f"model.name_or_path={start(seed) / 'model'}")
    train(task, folder, sets)
    return folder


def start(seed: int) -> Path:
    """The shipped SFT recipe at another seed."""
    folder = Path("runs/sweep/start") / str(seed)
    train(
        "sft",
        folder,
        [
            f"run.output_dir={folder}",
            f"trainer.seed={seed}",
            f"model.init_seed={seed}",
            "eval=null",
        ],
    )
    return folder


def train(task: str, folder: Path, sets: list[str]) -> None:
    """Run the command line, unless the folder is finished already."""
    record = folder / "run.json"
    if record.is_file() and json.loads(record.read_text())["status"] == "finished":
        return
    command = [sys.executable, "-m", "soren_align", task, f"quickstart/{task}"]
    command += [part for text in sets for part in ("--set", text)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)


def scores(folder: Path) -> dict[str, float]:
    """The last held-out loss, and the last row of the run's table, in percent."""
    logs = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    loss = [log["eval_loss"] for log in logs if "eval_loss" in log][-1]
    row = json.loads((folder / "eval/quickstart/results.json").read_text())["rows"][-1]
    return {"held-out loss": loss, **{column: row["scores"][column]["value"] for column in COLUMNS}}


def main() -> None:
    """Run the sweep and print its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=RATES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS)
    parser.add_argument(
        "--steps", type=int, help="the recipe's own, 600 and 100, if it is not given"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    arguments = parser.parse_args()
    steps = arguments.steps or STEPS[arguments.task]
    if arguments.task == "dpo":
        for seed in arguments.seeds:
            start(seed)
    points = list(itertools.product(arguments.optimizers, RATES[arguments.task], arguments.seeds))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        folders = dict(
            zip(points, pool.map(lambda p: run(arguments.task, steps, *p), points), strict=True)
        )
    columns = ("held-out loss", *COLUMNS)
    print(
        f"| optimizer | learning rate | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}"
    )
    for optimizer, rate in itertools.product(arguments.optimizers, RATES[arguments.task]):
        seeds = [scores(folders[optimizer, rate, seed]) for seed in arguments.seeds]
        losses = [s["held-out loss"] for s in seeds]
        cells = [f"{mean(losses):.4f} ({max(losses):.4f})"]
        cells += [
            f"{mean(s[c] for s in seeds):.1f} ({min(s[c] for s in seeds):.1f})" for c in COLUMNS
        ]
        print(f"| {optimizer} | {rate} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
