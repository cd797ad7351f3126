"""Studies of a few short runs, and run folders as their trainings leave them, made without training."""

import hashlib
import json
from pathlib import Path

from soren_align.core.files import file_sha256
from soren_align.core.version import __version__
from soren_align.recipe import recipe_hash, to_yaml
from soren_align.run.folder import RunFolder
from soren_align.run.held_out import add_values
from soren_align.study import search as study_search
from soren_align.study.config import load_study, recipe_of_run
from soren_align.study.study import ENDED

TINY = """\
recipe: quickstart/sft
set:
  trainer.max_steps: 6
  trainer.eval_steps: 3
  trainer.save_steps: 2
  trainer.warmup_steps: 2
  trainer.logging_steps: 2
  trainer.per_device_train_batch_size: 8
  eval: null
candidates:
  adamw: {set: {optimizer.name: adamw}}
  soren: {}
search:
  space:
    optimizer.lr: {low: 1.0e-3, high: 1.0e-1}
    optimizer.aux_lr: =optimizer.lr
  trials: 3
verdict: {seeds: [101, 102, 103]}
output_dir: runs/tiny
"""


def study_of(folder, *overrides, text=TINY):
    """The study of a file in `folder`, whose runs are below folder/study."""
    file = Path(folder) / "tiny.yaml"
    file.write_text(text)
    return load_study(str(file), [f"output_dir={Path(folder) / 'study'}", *overrides])


def progress_of(study):
    """The Progress of a new or old study."""
    folder = Path(study.output_dir)
    folder.mkdir(exist_ok=True)
    study_search.create(folder, study)
    return study_search.Progress(folder)


def end(study, run, loss, *, seconds=10.0, error=None, diverged=False):
    """Make the folder of a run that ended with this held-out loss, or with an error; the start's is 5."""
    folder = RunFolder(Path(study.output_dir) / run.folder)
    folder.path.mkdir(parents=True, exist_ok=True)
    recipe = recipe_of_run(study, run)
    folder.recipe.write_text(to_yaml(recipe))
    lines = [{"step": 0, "eval_loss": 5.0}]
    speed = {"tokens_per_second": 600 / seconds, "num_tokens": 600.0}
    lines += [{"step": 6, "loss": loss, "relative_change": 0.1, **speed}]
    lines += [{"step": 6, "eval_loss": loss, "eval_num_tokens": 600.0}]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if run.stage == "verdict":
        put_held_out(folder, 5.0, loss)
    status = "training" if error else "finished"
    identity = {"starting_weights": "a" * 16, "batches": f"{run.seed:016}", "data": "b" * 16,
                "recipe": recipe_hash(recipe), "precision": {"weights": ["float32"]}, "processes": 1,
                "global_batch_size": 8, "versions": {"soren-align": __version__}, "device": "cpu"}  # fmt: skip
    trained = {} if error else {"training": {"steps": 6, "first_loss": 5.0, "last_loss": loss},
                                "written": written(folder, recipe, run.folder)}  # fmt: skip
    folder.replace(
        status=status, task=recipe.task, last_error=error, diverged=diverged, versions={"soren-align": __version__},
        seeds={"trainer": run.seed}, identity=identity, **trained,
    )  # fmt: skip


def put_held_out(folder, start, end, examples=40):
    """Write held_out.json: examples around the mean losses at the start and at the end, a little of the run's own."""
    own = 1e-9 * int(hashlib.sha256("/".join(folder.path.parts[-3:]).encode()).hexdigest()[:4], 16)
    for at, mean in (("start", start), ("end", end)):
        values = [mean + 0.1 * ((i % 5) - 2) * (at == "end") for i in range(examples)]
        values[:2] = [values[0] + own, values[1] - own]
        add_values(folder.held_out, at, "e" * 64, [1.0] * examples, None, {"eval_loss": values})


def written(folder, recipe, weights):
    """What run.json has of the files that a training has left. weights: any text, in the place of a model."""
    return {
        "recipe_sha256": recipe_hash(recipe, with_optimizer=True),
        "metrics_sha256": file_sha256(folder.metrics),
        "held_out_sha256": file_sha256(folder.held_out) if folder.held_out.is_file() else None,
        "weights_sha256": hashlib.sha256(weights.encode()).hexdigest(),
    }


def end_all(study, loss_of, *, order=1):
    """End all runs of a study, in the order of `update`, or from behind (-1): the names of their folders."""
    progress, ended = progress_of(study), []
    while waiting := [run for run in progress.update() if run.status not in ENDED][::order]:
        end(study, waiting[0], loss_of(waiting[0]))
        ended.append(waiting[0].folder)
    return ended
