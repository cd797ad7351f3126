"""The small sweep behind the quickstart's learning rates: python recipes/quickstart/sweep.py sft|dpo [--seeds 0 1 2].

Runs the shipped recipe for every optimizer, learning rate and seed into runs/sweep/, skips what is finished, and prints
one Markdown table: mean over seeds (least seed in brackets). SFT runs for 150 of its 600 steps, where the optimizers
still differ; DPO starts from the full SFT recipe. About 20 seconds a run; two at a time.
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
RATES = {"sft": ("1e-3", "3e-3", "1e-2", "3e-2"), "dpo": ("3e-5", "1e-4", "3.5e-4")}
COLUMNS = ("zoo_mc", "zoo_gen", "preference")


def run(task: str, optimizer: str, rate: str, seed: int) -> Path:
    """Train and evaluate one point; returns its run folder. DPO starts from the shipped SFT recipe at the same seed."""
    folder = Path("runs/sweep") / task / f"{optimizer}-{rate}-{seed}"
    sets = [f"run.output_dir={folder}", f"optimizer.name={optimizer}", f"trainer.seed={seed}"]
    sets += [f"optimizer.lr={rate}", f"optimizer.aux_lr={rate}"]
    if task == "sft":
        sets += [f"model.init_seed={seed}", "trainer.max_steps=150"]
    else:
        sets.append(f"model.name_or_path={start(seed) / 'model'}")
    train(task, folder, sets)
    return folder


def start(seed: int) -> Path:
    """The shipped SFT recipe at another seed."""
    folder = Path("runs/sweep/start") / str(seed)
    train("sft", folder, [f"run.output_dir={folder}", f"trainer.seed={seed}", f"model.init_seed={seed}", "eval=null"])
    return folder


def train(task: str, folder: Path, sets: list[str]) -> None:
    """Run the command line, unless the folder is finished already."""
    record = folder / "run.json"
    if record.is_file() and json.loads(record.read_text())["status"] == "finished":
        return
    command = [sys.executable, "-m", "soren_align.cli", task, f"quickstart/{task}"]
    command += [part for text in sets for part in ("--set", text)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)


def scores(folder: Path) -> dict[str, float]:
    """The last row of the run's table, in percent."""
    row = json.loads((folder / "eval/quickstart/results.json").read_text())["rows"][-1]
    return {column: row["scores"][column]["value"] for column in COLUMNS}


def main() -> None:
    """Run the sweep and print its table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=RATES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS)
    arguments = parser.parse_args()
    if arguments.task == "dpo":
        for seed in arguments.seeds:
            start(seed)
    points = list(itertools.product(arguments.optimizers, RATES[arguments.task], arguments.seeds))
    with ThreadPoolExecutor(2) as pool:
        folders = dict(zip(points, pool.map(lambda p: run(arguments.task, *p), points), strict=True))
    print(f"| optimizer | learning rate | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")
    for optimizer, rate in itertools.product(arguments.optimizers, RATES[arguments.task]):
        seeds = [scores(folders[optimizer, rate, seed]) for seed in arguments.seeds]
        cells = [f"{mean(s[c] for s in seeds):.1f} ({min(s[c] for s in seeds):.1f})" for c in COLUMNS]
        print(f"| {optimizer} | {rate} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
