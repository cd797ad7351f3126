"""Inspect a model, for `plan MODEL`: how it would be trained, and what would stop it, before any
data.

Every check is the one that training makes; what it refuses becomes a problem here. The model is
built from its config on the meta device, so neither weights nor a GPU are needed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, GenerationConfig

from ..core.errors import OutOfReach, UserError, as_user_error
from ..core.text import Table, count, join_words, print_labelled, with_prefix
from ..data import check_template, dataset_of, has_marks, last_visible
from ..optim import Route, build_optimizer, route, routing_table, share_notices, spectral_share
from ..optim.blocks import OF_HEADS, fused_projections, layer_of, split_layout
from ..recipe import OPTIMIZER_SECTIONS, Recipe, is_local, parallel, refuse_unusable
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
from ..training.setup import check_attention, padding_token, refuse_unembedded
from . import offline
from .inputs import count_frozen, on_this_machine, outline
from .memory import ModelSizes, Rank
from .step import model_sizes

ALWAYS, CONVERSATIONS, ANSWERS = "", "conversations", "trainer.assistant_only_loss"
"""The conditions under which a problem stops training: always; on conversations; with this
setting."""
PARALLEL = tuple(name for name in NAMES if not name.endswith("offload"))


def inspect_model(recipe: Recipe, num_ranks: int) -> dict[str, Any]:
    """Return the inspection of the recipe's model as plain data. recipe: its data are not read.

    num_ranks: GPUs that share the model. Raises UserError if no model can be built from the config.
    """
    problems: list[dict[str, str]] = []
    notices: list[str] = []
    name, init_seed = recipe.model.name_or_path, recipe.model.init_seed
    # Collected, not raised: whoever asks about a model wants all that would stop it, and what is
    # known about it all the same.
    with _collected(problems, ALWAYS):
        refuse_unusable(name, init_seed)

    # The config, from its folder, the hub or its cache; else the one that the package ships.
    folder = None
    try:
        config = load_config(recipe)
    except OutOfReach:
        if (own := offline.model_config(name)) is None:
            raise
        notices.append("the hub is out of reach; the config is the one that soren-align ships")
        config, folder = AutoConfig.from_pretrained(own), str(own)

    # Model and optimizer, built as training builds them, without memory for weights and states.
    with _collected(problems, ALWAYS):
        check_attention(recipe, config)
    recipe = on_this_machine(recipe)
    start, tokenizer_source = starting_checkpoint(recipe, RunFolder(recipe.run.output_dir))
    with torch.device("meta"), as_user_error(f"model {name}"):
        model = outline(recipe, config, start)
        with as_user_error("optimizer", ValueError):
            routes = route(model, **recipe.optimizer.routing)
        with _collected(problems, ALWAYS), as_user_error("optimizer", ValueError):
            build_optimizer(model, **build.optimizer_settings(recipe))
    with _collected(problems, ALWAYS):
        notices += generation_notices(recipe, folder or start)
    if (unused := _unused_by_text(recipe, model)) is not None:
        problems.append({"when": ALWAYS, "message": unused})

    # Tokenizer and template. Without tokenizer_config.json, transformers may make an empty
    # tokenizer by the model's type, which would pass every check.
    tokens = None
    if folder is not None:
        with _collected(problems, ALWAYS):
            refuse_unreachable(recipe)
    elif (
        not is_local(tokenizer_source)
        or (Path(tokenizer_source) / "tokenizer_config.json").is_file()
    ):
        with _collected(problems, ALWAYS):
            tokenizer: Any = load_tokenizer(recipe, tokenizer_source)
            tokens = _tokens(config, tokenizer, folder or start, problems, notices)

    # A tied weight is one parameter of several names.
    names = defaultdict(list)
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(alias)
    table = routing_table(routes)
    sizes = model_sizes(recipe, routes, count_frozen(recipe, model))
    dtype = getattr(config, "dtype", None)
    return {
        "model": {
            "name_or_path": name,
            "class": type(model).__name__,
            "dtype": str(dtype).removeprefix("torch.") if dtype else None,
            "num_parameters": sum(p.numel() for p in model.parameters()),
            "num_trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "max_positions": getattr(config.get_text_config(), "max_position_embeddings", None),
        },
        "problems": problems,
        "notices": [*notices, *share_notices(recipe.optimizer.name, table)],
        "optimizer": recipe.optimizer.name,
        "spectral_share": spectral_share(table),
        "routing": table,
        "matrices": _matrices(routes),
        "fused": _fused(routes, config),
        "tied": [several for several in names.values() if len(several) > 1],
        "num_processes": num_ranks,
        "state_bytes_per_gpu": _states(recipe, sizes, num_ranks),
        "tokens": tokens,
    }


@contextmanager
def _collected(problems: list[dict[str, str]], when: str) -> Iterator[None]:
    """Add what a check refuses within this context to `problems`."""
    try:
        yield
    except UserError as error:
        problems += ({"when": when, "message": message} for message in error.problems)


def _unused_by_text(recipe: Recipe, model: Any) -> str | None:
    """Return the problem of a model of text and images whose image encoder would be trained: text
    does not use it, so that its gradients are missing.
    """
    if model.config.get_text_config() is model.config or recipe.model.lora:
        return None
    # By use, not by name: image encoders have other names in each architecture.
    head = model.get_output_embeddings()
    used = {*model.get_decoder().parameters(), *(head.parameters() if head is not None else ())}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    missing = [name for name, p in trained if p not in used]
    if not missing:
        return None
    globs = common_globs(missing, [name for name, p in trained if p in used])
    number = f"{len(missing)} trained parameters, such as {missing[0]}"
    return f"text does not use {number}; write model.freeze: {globs}"


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
        # If the token that ends an answer is no EOS token, generation does not stop there.
        end = ids[last_visible(ids, tokenizer)]
        template |= {"end": str(tokenizer.convert_ids_to_tokens(end)), "end_id": end}
        template["end_is_eos"] = end == tokenizer.eos_token_id
    # A template that fails on conversations would fail again, for the same reason.
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


def _matrices(routes: Sequence[Route]) -> list[dict[str, Any]]:
    """Return {"layers", "shape", "number"} of the matrices of each shape, in the order of the
    model.
    """
    numbers: Counter[tuple[int, int]] = Counter()
    layers = defaultdict(dict)
    for r in (r for r in routes if r.rule == "spectral"):
        for shape, number in r.matrix_shapes.items():
            numbers[shape] += number
            layers[shape][layer_of(r.name)] = True
    return [
        {"layers": [*layers[shape]], "shape": [*shape], "number": number}
        for shape, number in numbers.items()
    ]


def _fused(routes: Sequence[Route], config: Any) -> list[dict[str, Any]]:
    """Return an entry per layer whose matrix has several projections: whether each is mapped by
    itself, or the key that does so.
    """
    rows: dict[Any, dict[str, Any]] = {}
    for r in routes:
        layer, projections = layer_of(r.name), fused_projections(r.name)
        if r.rule != "spectral" or not projections:
            continue
        is_split, remedy = r.layout.num_matrices > 1, None
        if not is_split:
            blocks = projections
            try:
                split_layout(r.name, r.shape, r.layout, projections, config)
            except ValueError:  # rows of the projections alternate by head
                blocks = ["heads"] if layer in OF_HEADS else []
            if blocks:
                remedy = f'write optimizer.split: {{"*{layer}": [{", ".join(blocks)}]}}'
        row = {
            "layer": layer,
            "projections": [*projections],
            "is_split": is_split,
            "remedy": remedy,
        }
        rows.setdefault((layer, is_split, remedy), {**row, "tensors": 0})["tensors"] += 1
    return list(rows.values())


def _states(recipe: Recipe, sizes: ModelSizes, num_ranks: int) -> list[dict[str, Any]]:
    """Return {"optimizer", and bytes per GPU by sharding strategy} of every optimizer."""
    rows = []
    for name, section in OPTIMIZER_SECTIONS.items():
        optimizer, row = section(name=name, lr=recipe.optimizer.lr), {}
        for strategy in PARALLEL:
            rank = Rank(sizes, parallel(strategy), num_ranks, optimizer)
            row[strategy] = rank.optimizer_states("", "device").num_bytes
        rows.append({"optimizer": name, **row})
    return rows


def print_inspection(inspection: dict[str, Any], console: Console) -> None:
    """Print the return value of `inspect_model`, 80 columns wide: first what stops training."""
    write = partial(print_labelled, console)
    for problem in inspection["problems"]:
        when = {ALWAYS: "", CONVERSATIONS: "on conversations: "}
        write(
            "problem", when.get(problem["when"], f"with {problem['when']}: ") + problem["message"]
        )
    for notice in inspection["notices"]:
        write("notice", notice)
    if not inspection["problems"]:
        write("problems", "none that would stop training")
    console.print()

    model, num_trained = inspection["model"], inspection["model"]["num_trained_parameters"]
    trained = "" if num_trained == model["num_parameters"] else f", {num_trained:,} of them trained"
    number = f"{model['num_parameters']:,} parameters{trained}"
    write("model", f"{model['name_or_path']}: {model['class']}, {number}")
    positions = f", {model['max_positions']:,} positions" if model["max_positions"] else ""
    write("", f"saved in {model['dtype'] or 'float32'}{positions}")
    console.print()
    _print_routing(inspection, console)

    console.print()
    rows = [
        [row["optimizer"], *(with_prefix(row[name], "B") for name in PARALLEL)]
        for row in inspection["state_bytes_per_gpu"]
    ]
    title = f"optimizer states per GPU, {count(inspection['num_processes'], 'GPU')}"
    console.print(Table(["optimizer", *PARALLEL], rows, title).rich(pad_edge=True))
    console.print()
    _print_tokens(inspection["tokens"], console)


def _print_routing(inspection: dict[str, Any], console: Console) -> None:
    """Print which optimizer updates which parameters, and fused and tied weights."""
    write, name = partial(print_labelled, console), inspection["optimizer"]
    share = inspection["spectral_share"]
    if name == "adamw":
        write("optimizer", "adamw updates all parameters")
    else:
        others = f"adamw updates the other {1 - share:.1%}"
        write("optimizer", f"{name} updates {share:.1%} of the trained parameters; {others}")
    for group in inspection["routing"]:
        matrices = group["matrices"]
        number = (
            count(matrices, "matrix", "matrices") if matrices else count(group["tensors"], "tensor")
        )
        optimizer = name if group["rule"] == "spectral" else "adamw"
        write("", f"{optimizer}: {group['reason']}, {number}, {group['numel']:,} parameters")
    for row in inspection["fused"]:
        how = "each mapped by itself" if row["is_split"] else "mapped as one matrix"
        if row["remedy"]:
            how += f"; to split it, {row['remedy']}"
        projections = join_words(row["projections"])
        write("fused", f"{row['layer']}, {count(row['tensors'], 'weight')}: {projections}, {how}")
    for names in inspection["tied"]:
        write("tied", f"{join_words(names)} are one weight")


def _print_tokens(tokens: dict[str, Any] | None, console: Console) -> None:
    """Print the chat template with the token that ends an answer, and the special tokens."""
    write = partial(print_labelled, console)
    if tokens is None:
        write("template", "unknown, because the tokenizer cannot be loaded")
        return
    template = tokens["template"]
    if "end" not in template:
        write("template", "cannot be used" if template["exists"] else "the tokenizer has none")
    else:
        eos = "the EOS token: answers end the turn"
        if not template["end_is_eos"]:
            eos = f"not the EOS token {tokens['eos']}"
        write(
            "template", f"answers end with {template['end']} (token {template['end_id']:,}), {eos}"
        )
    if "answers" in template:
        marks = {
            "marked": "the template marks the answers",
            "derived": "the answers are derived from the template",
        }
        write("", f"with {ANSWERS}, {marks[template['answers']]}")
    own = f"{tokens['eos']} (token {tokens['eos_id']})" if tokens["eos"] else "none"
    files = {"config.json": "config_eos_ids", "generation_config.json": "generation_eos_ids"}
    for file, key in files.items():
        own += f"; {file}: {', '.join(map(str, tokens[key])) or 'none'}"
    write("tokens", f"EOS {own}")
    pad = f"{tokens['pad']} (token {tokens['pad_id']})" if tokens["pad"] else "none"
    reason = "" if tokens["pad_is_own"] or not tokens["pad"] else ", because there is no pad token"
    write("", f"padding {pad}{reason}")
    if tokens["vocab_size"]:
        write("", f"{tokens['num_tokens']:,} tokens, {tokens['vocab_size']:,} embeddings")
