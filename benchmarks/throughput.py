"""Training throughput of whole SFT runs, in pairs: our trainer with AdamW against plain TRL's,
Soren against Muon.

    python -m benchmarks throughput       prints the table of research/benchmarks.md; ten minutes on one core

In one process and on one thread, in rounds A B C D, A B C D, ...: the model and data of the
quickstart, and a Llama of 10 million parameters on the same data. Each run takes STEPS steps; the
first WARM_UP are not counted. Seconds are the process's CPU time, which other processes change
little; a ratio is the median over the rounds of one pair's.
"""

import contextlib
import io
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from transformers import PrinterCallback, TrainerCallback
from trl import SFTTrainer

from soren_align import recipe
from soren_align.core.files import resolve_path
from soren_align.run.folder import RunFolder
from soren_align.sharding.ranks import Ranks
from soren_align.training.build import build_trainer
from soren_align.training.model import load_model
from soren_align.training.setup import set_up_training, trl_arguments

ROUNDS, STEPS, WARM_UP = 7, 65, 5
BASE = "shipped:recipes/quickstart/base"
SIZES = {  # name: (changes of the model's config, examples per step)
    "quickstart, 0.1M parameters": ({}, 64),
    "10M parameters": ({"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 8}, 8),
}
PLAIN = "plain TRL, AdamW"
SUBJECTS = {PLAIN: "adamw", "adamw": "adamw", "muon": "muon", "soren": "soren"}
PAIRS = {"AdamW, plain TRL": ("adamw", PLAIN), "Soren, Muon": ("soren", "muon")}
TITLE = "| model | first and second training | ratio of tokens per second | ms per step, first and second training |"


class Clock(TrainerCallback):
    """CPU seconds and tokens of the counted steps."""

    def __init__(self):
        self.began = self.seconds = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        """Start after the warm-up, and stop after the last step."""
        if state.global_step == WARM_UP:
            self.began = time.process_time()
        elif state.global_step == STEPS:
            self.seconds = time.process_time() - self.began


def model_folder(folder: Path, changes: dict) -> Path:
    """The quickstart's model with another config."""
    target = folder / "-".join(["base", *map(str, changes.values())])
    if not target.exists():
        shutil.copytree(resolve_path(BASE), target)
        config = json.loads((target / "config.json").read_text()) | changes
        (target / "config.json").write_text(json.dumps(config))
    return target


def seconds(folder: Path, size: str, subject: str) -> float:
    """CPU seconds of one run."""
    changes, batch = SIZES[size]
    run_folder = RunFolder(str(folder / "run"))
    sets = [
        f"optimizer.name={SUBJECTS[subject]}",
        f"model.name_or_path={model_folder(folder, changes)}",
    ]
    sets += [
        f"trainer.max_steps={STEPS}",
        "trainer.save_strategy=no",
        "trainer.eval_strategy=no",
        "data.eval=null",
    ]
    sets += [
        f"trainer.per_device_train_batch_size={batch}",
        f"run.output_dir={run_folder.path}",
        "eval=null",
    ]
    loaded = recipe.load("quickstart/sft", sets)
    clock = Clock()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        setup = set_up_training(loaded, run_folder)
        if subject == PLAIN:
            trainer = SFTTrainer(
                model=load_model(loaded, setup.start),
                args=trl_arguments(loaded, run_folder.checkpoints, Ranks()),
                train_dataset=setup.splits.train.dataset,
                processing_class=setup.tokenizer,
            )
        else:
            trainer = build_trainer(setup, run_folder)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
    return clock.seconds


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    console = Console(width=120)
    console.print(TITLE + "\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for size in SIZES:
            times = {subject: [] for subject in SUBJECTS}
            for _ in range(ROUNDS):
                for subject in SUBJECTS:
                    times[subject].append(seconds(Path(name), size, subject))
            for pair, (one, other) in PAIRS.items():
                ratios = sorted(b / a for a, b in zip(times[one], times[other], strict=True))
                steps = " and ".join(
                    f"{1e3 * statistics.median(times[subject]) / (STEPS - WARM_UP):.1f}"
                    for subject in (one, other)
                )
                shown = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
                console.print(f"| {size} | {pair} | {shown} | {steps} |")
