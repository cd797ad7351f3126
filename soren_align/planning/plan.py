"""What a recipe would do and cost, as plain data: rows, steps, rates, routing, memory, operations, requests.

The model is built from its config alone, without weights; of the data, rows are counted and tokens taken where they
are at hand. Neither a GPU nor, for the shipped recipes, the hub is needed: what is then not known is left out, and
said.
"""

import math
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, get_scheduler

from ..data import Account
from ..errors import OutOfReach
from ..evaluate.suites import load_suite
from ..optim import build_optimizer, route, routing_table
from ..recipe import Recipe, accumulation, rows_per_step
from ..run_folder import RunFolder
from ..sharding.ranks import Ranks
from ..trainers import adapters, build
from ..trainers.library_errors import as_user_error
from ..trainers.training_report import describe_optimizer
from ..trainers.training_setup import TrainingSetup, set_up_training
from ..trainers.trl_arguments import trl_arguments
from . import known, processes
from .compute import UNCUT, compute
from .update_sizes import TYPICAL_WEIGHT, held_in, updates

NO_GPU = "no GPU here: training on this machine needs trainer.use_cpu: true"


@dataclass(frozen=True)
class Sight:
    """What can be seen from here: a config always; tokenizer and rows where they are at hand."""

    config: Any
    start: str
    ready: TrainingSetup | None
    num_rows: int
    """Those that are trained on, or the published number."""
    notices: tuple[str, ...] = ()


def plan(
    recipe: Recipe, on_rows: Callable[[int], object] | None = None, num_ranks: int = 1
) -> tuple[dict[str, Any], Account | None]:
    """Everything that `text.show` prints, as plain data, and the account that holds the example, if rows are seen."""
    here = _as_seen_here(recipe)
    with tempfile.TemporaryDirectory() as scratch:  # not the run's folder: nothing is to be left there
        sight = _look(here, RunFolder(scratch), on_rows)
        args: Any = trl_arguments(here, Path(scratch), Ranks())

    def build_model(num_blocks: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
        return adapters.add_empty_adapter(_model(sight.config, num_blocks, dtype), recipe, sight.start)

    with torch.device("meta"), as_user_error(f"model {recipe.model.name_or_path}"):
        model = build_model()
    with as_user_error("optimizer", ValueError):
        routes = route(model, recipe.optimizer.aux)
        build_optimizer(model, **build.optimizer_settings(recipe))
    counted = sight.ready.account if sight.ready else None
    batch, _ = rows_per_step(recipe, num_ranks)
    rows = _rows_of_steps(recipe, sight.num_rows, counted, args.max_length)
    per_epoch = processes.steps_per_epoch(
        rows, args.per_device_train_batch_size, accumulation(recipe, num_ranks), num_ranks
    )
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    rates = _rates(recipe, args, steps)
    weight = getattr(sight.config, "initializer_range", None) or TYPICAL_WEIGHT
    costs = compute(recipe, build_model, _num_blocks(sight.config), counted, batch, args.max_length)
    shared = processes.processes(recipe, routes, _frozen(recipe, model), num_ranks, costs)
    found = {
        "task": recipe.task,
        "model": {
            "start": recipe.model.name_or_path,
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        },
        "data": _data(recipe, sight, counted),
        "steps": {"batch": batch, "per_epoch": per_epoch, "total": steps, "epochs": round(steps / per_epoch, 2)},
        "learning_rates": [rate for rate in rates if rate["step"] in _shown(args, steps)],
        "kind": describe_optimizer(recipe.optimizer),
        "optimizer": recipe.optimizer.model_dump(exclude_none=True),
        "routing": routing_table(routes),
        "updates": updates(recipe, routes, rates, weight),
        "typical_weight": weight,
        "weights_held_in": held_in(recipe),
        "processes": shared,
        "compute": costs.as_data(shared["map_flops"], steps),
        "evaluation": _evaluation(recipe),
        "files": _files(recipe, args, steps),
        "notices": [
            *sight.notices,
            *_of_lengths(recipe, rows, counted, args.max_length),
            *(
                [f"activations and operations are not known for this architecture: {costs.unknown}"]
                * bool(costs.unknown)
            ),
            *([] if here.trainer.get("use_cpu") == recipe.trainer.get("use_cpu") else [NO_GPU]),
        ],
    }
    return found, counted


def _look(here: Recipe, folder: RunFolder, on_rows: Callable[[int], object] | None) -> Sight:
    """The recipe's config and rows, or what the tree knows of them where the hub is out of reach."""
    name, sources = here.model.name_or_path, here.data.sources
    try:
        ready = set_up_training(here, folder, on_rows)
        base, revision = adapters.base_model(ready.start, here.model.revision)
        with as_user_error(f"model {name}"):
            config = AutoConfig.from_pretrained(base, trust_remote_code=False, revision=revision)
    except OutOfReach:
        ours, published = known.model_config(name), known.num_rows(sources)
        if ours is None or published is None:
            raise
    else:
        return Sight(config, ready.start, ready, ready.account.num_kept, ready.notices)
    paths = " or ".join([name, *dict.fromkeys(source.path for source in sources)])
    notice = (
        f"the hub is out of reach, and {paths} not in its cache: sizes and rows are the published ones, tokens are not "
        "counted, and the chat template is not tried"
    )
    return Sight(AutoConfig.from_pretrained(ours), name, None, published, (notice,))


def _model(config: Any, num_blocks: int | None, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a config, with fewer blocks if told."""
    config = deepcopy(config)
    if num_blocks is not None:
        blocks = config.get_text_config()  # of a model of text and images, the text's
        blocks.num_hidden_layers = num_blocks
        if kinds := getattr(blocks, "layer_types", None):
            blocks.layer_types = [kinds[i % len(kinds)] for i in range(num_blocks)]  # FEW may be more than there are
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _num_blocks(config: Any) -> int:
    return getattr(config.get_text_config(), "num_hidden_layers", 0)


def _frozen(recipe: Recipe, model: Any) -> tuple[int, int]:
    """Numbers of a model that are held and not trained, and their bytes.

    Four bits of NF4 come with a scale of 8 bits per 64 numbers, and 32 bits per 256 of these.
    """
    linear = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    head = model.get_output_embeddings()
    quantizes = recipe.model.lora is not None and recipe.model.lora.quantize == "4bit"
    each, narrow = getattr(torch, recipe.model.dtype).itemsize, 0.5 + 1 / 64 + 4 / (64 * 256)
    numel, num_bytes = 0, 0.0
    for parameter in (p for p in model.parameters() if not p.requires_grad):
        is_narrow = quantizes and id(parameter) in linear and parameter is not head.weight
        numel += parameter.numel()
        num_bytes += parameter.numel() * (narrow if is_narrow else each)
    return numel, round(num_bytes)


def _as_seen_here(recipe: Recipe) -> Recipe:
    """The recipe for one process on this machine, with or without a GPU, and without random weights to be made."""
    trainer = recipe.trainer
    if not (trainer.get("use_cpu") or torch.accelerator.is_available()):
        trainer = {**trainer, "use_cpu": True, "bf16": False, "fp16": False, "tf32": None}
    model, run = recipe.model, recipe.run
    return recipe.model_copy(
        update={
            "model": model.model_copy(update={"init_seed": None}),
            "trainer": trainer,
            "run": run.model_copy(update={"parallel": "ddp"}),
        }
    )


def _data(recipe: Recipe, sight: Sight, counted: Account | None) -> dict[str, Any]:
    if sight.ready is None or counted is None:
        named = " + ".join(f"{source.path} {source.split}" for source in recipe.data.sources)
        return {"source": {"path": named}, "rows": sight.num_rows, "counted": False}
    split = sight.ready.splits["train"]
    return {
        "source": split.source,
        "counted": True,
        "layout": split.layout,
        "rows": split.num_rows,
        "kept": counted.num_kept,
        "dropped": split.dropped | counted.dropped,
        "truncated": counted.num_truncated,
        "token_length_percentiles": counted.lengths,
        "trained_token_share": counted.trained_share,
        "stop_token_trained": counted.stop_token_trained,
        "example": [{"text": text, "trained": trained} for text, trained in counted.example],
    }


def _rows_of_steps(recipe: Recipe, rows: int, counted: Account | None, max_length: int | None) -> int:
    """The rows that steps are made of: packing makes about so many full ones of those that are counted."""
    if recipe.trainer.get("packing") and max_length and counted:
        return math.ceil(counted.num_tokens / max_length)
    return rows


def _of_lengths(recipe: Recipe, rows: int, counted: Account | None, max_length: int | None) -> list[str]:
    """What to say where rows are not as long as they are counted, or no length is known."""
    if max_length is None:
        guess = f"trainer.max_length is null: activations and operations are for rows of {UNCUT:,} tokens, a guess"
        return [] if counted else [guess]
    if not recipe.trainer.get("packing"):
        return []
    if counted:
        return [f"trainer.packing makes about {rows:,} rows of {max_length} tokens of these; steps are by them"]
    return ["trainer.packing makes fewer and longer rows of these: the steps are the most that they can be"]


def _rates(recipe: Recipe, args: Any, steps: int) -> list[dict[str, float]]:
    """Both learning rates at every step."""
    peaks = [recipe.optimizer.lr, recipe.optimizer.aux_lr or recipe.optimizer.lr]
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in peaks], lr=peaks[0])
    with as_user_error("trainer.lr_scheduler_type", ValueError, TypeError, ArithmeticError):
        schedule: Any = get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            args.get_warmup_steps(steps),
            steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs or {},
        )
    follows_loss = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)  # shown as if it never fell
    rates = []
    for step in range(1, steps + 1):
        lr, aux_lr = (group["lr"] for group in optimizer.param_groups)
        rates.append({"step": step, "lr": lr, "aux_lr": aux_lr})
        optimizer.step()
        if not follows_loss:
            schedule.step()
    return rates


def _shown(args: Any, steps: int) -> set[int]:
    """The start, the end of the warm-up, the middle and the last step."""
    return {1, args.get_warmup_steps(steps) + 1, steps // 2, steps}


def _evaluation(recipe: Recipe) -> dict[str, Any] | None:
    """What the evaluation will ask of how many models: the trained one and those that it came from, at least one."""
    if recipe.eval is None:
        return None
    tasks = load_suite(recipe.eval.suite).tasks
    limit = recipe.eval.limit
    requests = None if limit or any(t.requests is None for t in tasks) else sum(t.requests or 0 for t in tasks)
    return {
        "suite": recipe.eval.suite,
        "tasks": len(tasks),
        "limit": limit,
        "models": 2,
        "requests_per_model": requests,
    }


def _files(recipe: Recipe, args: Any, steps: int) -> list[str]:
    folder = RunFolder(recipe.run.output_dir)
    kept = f", the last {args.save_total_limit} kept" if args.save_total_limit else ""
    words = {"steps": f"every {args.save_steps:g} steps", "epoch": "every epoch", "best": "at the best so far"}
    every = words.get(str(args.save_strategy.value), "none on the way") + kept
    files = [str(folder.recipe), str(folder.path / "run.json"), str(folder.metrics)]
    files += [f"{folder.start} (random starting weights)"] if recipe.model.init_seed is not None else []
    files += [f"{folder.checkpoints} ({every})", str(folder.model)]
    files += [str(folder.evaluation(recipe.eval.name))] if recipe.eval else []
    return files
