"""The inspection of a model from its config and tokenizer, before any data exist.

Every check is the one that training makes; what it refuses becomes a problem here.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from ..core.errors import OutOfReach, UserError, as_user_error, in_one_line
from ..data import check_template, dataset_of, has_marks, last_visible
from ..optim import Route, build_optimizer, route, routing_table, share_notices, spectral_share
from ..optim.blocks import OF_HEADS, fused_projections, layer_of, split_layout
from ..optim.layout import num_matrices
from ..recipe import OPTIMIZER_SECTIONS, Recipe, is_local, model_problems, parallel
from ..recipe.model import refuse_unreachable
from ..recipe.parallel import NAMES
from ..run.folder import RunFolder
from ..training import build
from ..training.adapters import common_globs
from ..training.model import (
    TWO_ANSWERS,
    generation_notices,
    load_config,
    load_tokenizer,
    starting_checkpoint,
)
from ..training.packing import refuse_mixing
from ..training.setup import check_attention, padding_token, refuse_unembedded
from . import offline
from .flops import build_model, kinds_of_blocks, select_blocks
from .inputs import count_frozen, on_this_machine, outline
from .memory import ModelSizes, Rank
from .step import model_sizes

ALWAYS, CONVERSATIONS, ANSWERS, PACKING = (
    "",
    "conversations",
    "trainer.assistant_only_loss",
    "trainer.packing",
)
"""When a problem stops training: whatever the data and settings; on conversations; with this
setting."""
PARALLEL = tuple(name for name in NAMES if not name.endswith("offload"))
PROBE_VOCAB_SIZE = 64
"""Above the probe's tokens."""
_WIDTH = re.compile(r"(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|n_inner|ffn_hidden_dim)$")
PROBE_MLP_WIDTH = 16
MAX_PROBE_PARAMETERS = 2 * 10**8
"""Of the random model: more would take more than a few seconds."""


def inspect_model(recipe: Recipe, num_ranks: int) -> dict[str, Any]:
    """Return the inspection of the recipe's model as plain data. recipe: its data are not read.

    num_ranks: GPUs that share the model. Raises UserError if no model can be built from the config.
    """
    problems: list[dict[str, str]] = []
    notices: list[str] = []
    name, init_seed = recipe.model.name_or_path, recipe.model.init_seed
    problems += (
        {"when": ALWAYS, "message": message} for message in model_problems(name, init_seed)
    )
    folder = None  # of the config, if it is the one that the package ships
    try:
        config = load_config(recipe)
    except OutOfReach:
        if (own := offline.model_config(name)) is None:
            raise
        notices.append("the hub is out of reach; the config is the one that soren-align ships")
        config, folder = AutoConfig.from_pretrained(own), str(own)
    with _collected(problems, ALWAYS):
        check_attention(recipe, config)
    attention, recipe = recipe.model.attn_implementation, on_this_machine(recipe)
    start, tokenizer_source = starting_checkpoint(recipe, RunFolder(recipe.run.output_dir))
    with torch.device("meta"), as_user_error(f"model {name}"):
        model = outline(recipe, config, start)
        with as_user_error("optimizer", ValueError):
            routes = route(model, **recipe.optimizer.routing)
        with _collected(problems, ALWAYS), as_user_error("optimizer", ValueError):
            build_optimizer(model, **build.optimizer_settings(recipe))
    with _collected(problems, ALWAYS):
        notices += generation_notices(recipe, folder or start)
    if model.config.get_text_config() is not model.config:  # text does not use an image encoder
        head, trained = (
            model.get_output_embeddings(),
            [(n, p) for n, p in model.named_parameters() if p.requires_grad],
        )
        used = {*model.get_decoder().parameters(), *(head.parameters() if head is not None else ())}
        missing, reached = (
            [n for n, p in trained if p not in used],
            [n for n, p in trained if p in used],
        )
        if missing and not recipe.model.lora:
            message = f"text does not use {len(missing)} trained parameters, such as {missing[0]}"
            message += f"; write model.freeze: {common_globs(missing, reached)}"
            problems.append({"when": ALWAYS, "message": message})
    tokens = None
    if folder is not None:
        with _collected(problems, ALWAYS):
            refuse_unreachable(recipe)
    elif (
        not is_local(tokenizer_source)
        or (Path(tokenizer_source) / "tokenizer_config.json").is_file()
    ):
        # Without this file transformers may make an empty tokenizer, by the model's type.
        with _collected(problems, ALWAYS):
            tokenizer: Any = load_tokenizer(recipe, tokenizer_source)
            tokens = _tokens(config, tokenizer, folder or start, problems, notices)
    is_separate, packing = probe_packing(config, model, attention)
    if is_separate is False:
        problems.append({"when": PACKING, "message": packing})

    # tensors of a layer's experts
    experts = [r for r in routes if len(r.shape) == 3 and r.rule == "spectral"]
    numbers = {
        "experts": sorted({r.shape[0] for r in experts}),
        "matrices": sum(r.num_matrices for r in experts),
    }
    names = defaultdict(list)
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(alias)
    table = routing_table(routes)
    notices += share_notices(recipe.optimizer.name, table)
    sizes = model_sizes(recipe, routes, count_frozen(recipe, model))
    dtype = getattr(config, "dtype", None)
    return {
        "model": {
            "name_or_path": name,
            "class": type(model).__name__,
            "model_type": config.model_type,
            "dtype": str(dtype).removeprefix("torch.") if dtype else None,
            "num_parameters": sum(p.numel() for p in model.parameters()),
            "num_trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "max_position_embeddings": getattr(
                config.get_text_config(), "max_position_embeddings", None
            ),
        },
        "problems": problems,
        "notices": notices,
        "optimizer": recipe.optimizer.name,
        "spectral_share": spectral_share(table),
        "routing": table,
        "parameters": _parameters(routes),
        "fused": _fused(routes, config),
        "experts": {"tensors": len(experts), **numbers} if experts else None,
        "tied": [several for several in names.values() if len(several) > 1],
        "optimizer_states": {
            "num_processes": num_ranks,
            "bytes_per_gpu": _states(recipe, sizes, num_ranks),
        },
        "tokens": tokens,
        "packing": {"is_separate": is_separate, "message": packing},
    }


@contextmanager
def _collected(problems: list[dict[str, str]], when: str) -> Iterator[None]:
    """Within this context, what a check refuses is added to `problems`."""
    try:
        yield
    except UserError as error:
        problems += ({"when": when, "message": message} for message in error.problems)


def _tokens(
    config: Any, tokenizer: Any, start: str, problems: list[dict[str, str]], notices: list[str]
) -> dict[str, Any]:
    """The section "tokens": special tokens, and the chat template with the token that ends a
    turn.
    """
    place, ids = tokenizer.name_or_path or "the tokenizer", []
    examples = dataset_of([{"messages": TWO_ANSWERS}])
    template: dict[str, Any] = {"exists": bool(tokenizer.chat_template)}
    num_problems = len(problems)
    with _collected(problems, CONVERSATIONS):
        of_template = check_template(tokenizer, "sft", False, examples)
        notices += of_template
        ids = tokenizer.apply_chat_template(TWO_ANSWERS, return_dict=True)["input_ids"]
        end = ids[last_visible(ids, tokenizer)]
        template |= {"end": str(tokenizer.convert_ids_to_tokens(end)), "end_id": end}
        template["end_is_eos"] = end == tokenizer.eos_token_id
    if len(problems) == num_problems:
        with _collected(problems, ANSWERS):
            check_template(tokenizer, "sft", True, examples)
            template["answers"] = (
                "marked" if has_marks(tokenizer.get_chat_template()) else "derived"
            )
    with _collected(problems, ALWAYS):
        refuse_unembedded(config, tokenizer, max(ids, default=None))
    try:
        generation: Any = GenerationConfig.from_pretrained(start).eos_token_id
    except OSError:
        generation = None
    pad = padding_token(tokenizer)
    if pad is None:
        message = f"{place}: has neither pad_token nor eos_token; write model.eos_token"
        problems.append({"when": ALWAYS, "message": message})
    return {
        "template": template,
        "eos": tokenizer.eos_token,
        "eos_id": tokenizer.eos_token_id,
        "config_eos_ids": _ids(config.get_text_config().eos_token_id),
        "generation_eos_ids": _ids(generation),
        "pad": pad,
        "pad_id": None if pad is None else tokenizer.convert_tokens_to_ids(pad),
        "pad_is_own": tokenizer.pad_token is not None,
        "num_tokens": len(tokenizer),
        "vocab_size": getattr(config.get_text_config(), "vocab_size", None),
    }


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _parameters(routes: Sequence[Route]) -> list[dict[str, Any]]:
    """One entry per name, with * for numbers, and shape: {"name", "shape", "rule", "reason",
    "tensors", ...}.
    """
    total = sum(math.prod(r.shape) for r in routes)
    rows: dict[Any, dict[str, Any]] = {}
    for r in routes:
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", r.name)
        new = {"name": name, "shape": list(r.shape), "rule": r.rule, "reason": r.reason}
        row = rows.setdefault(
            (name, r.shape, r.rule, r.reason), {**new, "tensors": 0, "matrices": 0, "share": 0.0}
        )
        row["tensors"] += 1
        row["matrices"] += r.num_matrices if r.rule == "spectral" else 0
        row["share"] += math.prod(r.shape) / total
    return list(rows.values())


def _fused(routes: Sequence[Route], config: Any) -> list[dict[str, Any]]:
    """Matrices with several projections, by the name of their layer: whether they are split, or how
    to split them.
    """
    rows: dict[Any, dict[str, Any]] = {}
    for r in routes:
        layer, projections = layer_of(r.name), fused_projections(r.name)
        if r.rule != "spectral" or not projections:
            continue
        is_split, remedy = "blocks" in r.layout or num_matrices(r.layout) > 1, None
        if not is_split:
            blocks, remedy = projections, ""
            try:
                split_layout(r.name, r.shape, r.layout, projections, config)
            except ValueError as error:
                blocks, remedy = (
                    ["heads"],
                    str(error).removeprefix(f"split: {r.name}: ").partition(";")[0],
                )
            if not remedy or layer in OF_HEADS:
                remedy = (
                    f'to split it, write optimizer.split: {{"*{layer}": [{", ".join(blocks)}]}}'
                )
        row = {"layer": layer, "projections": [*projections], "is_split": is_split, "split": remedy}
        rows.setdefault((layer, is_split, remedy), {**row, "tensors": 0})["tensors"] += 1
    return list(rows.values())


def _states(recipe: Recipe, sizes: ModelSizes, num_ranks: int) -> list[dict[str, Any]]:
    """{"optimizer", "states", and bytes per GPU by sharding strategy} of every optimizer; None
    where it is refused.
    """
    rows = []
    for states in ("float32", "8bit"):
        for name, section in OPTIMIZER_SECTIONS.items():
            optimizer, row = section(name=name, lr=recipe.optimizer.lr, states=states), {}
            for strategy in PARALLEL:
                is_refused = states == "8bit" and strategy == "fsdp2"
                rank = Rank(sizes, parallel(strategy), num_ranks, optimizer)
                row[strategy] = (
                    None if is_refused else rank.optimizer_states("", "device").num_bytes
                )
            rows.append({"optimizer": name, "states": states, **row})
    return rows


def probe_packing(config: Any, model: Any, attention: str | None = None) -> tuple[bool | None, str]:
    """Return whether packed examples stay separate, and a sentence; None if this cannot be probed.

    Training probes the model itself before its first step (`training.packing`). Here the same probe
    runs on a random model of the architecture with one block of each type, few tokens and narrow
    MLPs, none of which decides how a model separates examples. config: the model's. model: the
    whole one without weights. attention: see `build_model`.
    """
    small = deepcopy(config)
    text_config = small.get_text_config()
    types = getattr(text_config, "layer_types", None)
    firsts: dict[Any, int] = {}
    for number, positions in enumerate(kinds_of_blocks(model)):
        for position in positions:
            firsts.setdefault((number, types and types[position]), position)
    blocks = sorted(firsts.values()) if types else [*range(1 + max(firsts.values(), default=0))]
    try:
        if firsts:
            select_blocks(text_config, blocks)
        _shrink(small)
        with torch.device("meta"):
            numel = sum(
                p.numel()
                for p in build_model(small, None, torch.float32, (), attention).parameters()
            )
        if numel > MAX_PROBE_PARAMETERS:
            return (
                None,
                f"not tested here, because a model of one block of each type already has {numel:,} parameters",
            )
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            refuse_mixing(build_model(small, None, torch.float32, (), attention), "trainer.packing")
    except UserError as error:
        return (
            (False, str(error))
            if str(error).startswith("trainer.packing")
            else (None, f"not tested here: {error}")
        )
    # an architecture's code need not run with these sizes; training may work
    except Exception as error:
        return None, f"not tested here: {in_one_line(error, 120)}"
    return (
        True,
        "packed examples stay separate (tested with random weights and one block of each type)",
    )


def _shrink(config: Any) -> None:
    """Narrow the MLPs and the vocabulary of a config and of those inside, in place."""
    for key, value in [*vars(config).items()]:
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            _shrink(value)
        elif _WIDTH.search(key) and isinstance(value, int | None):
            setattr(config, key, PROBE_MLP_WIDTH)
        elif key == "vocab_size":
            setattr(config, key, PROBE_VOCAB_SIZE)
        elif key.endswith("_token_id") and isinstance(value, int | list):
            setattr(config, key, 0)
