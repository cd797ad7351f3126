"""Print the inspection of a model as text, 80 columns wide, the most important first."""

from functools import partial
from typing import Any

from rich.console import Console

from ..core.text import Table, count, join_words, print_labelled, with_prefix


def print_inspection(inspection: dict[str, Any], console: Console) -> None:
    """Print the return value of `inspection.inspect_model`."""
    write = partial(print_labelled, console)
    for problem in inspection["problems"]:
        when = f"with {problem['when']}: " if problem["when"].startswith("trainer.") else ""
        when = "on conversations: " if problem["when"] == "conversations" else when
        write("problem", when + problem["message"].removeprefix("trainer.packing: "))
    for notice in inspection["notices"]:
        write("notice", notice)
    if not inspection["problems"]:
        write("problems", "none that would stop training")
    console.print()

    model = inspection["model"]
    num_trained = model["num_trained_parameters"]
    trained = "" if num_trained == model["num_parameters"] else f", {num_trained:,} of them trained"
    write(
        "model",
        f"{model['name_or_path']}: {model['class']}, {model['num_parameters']:,} parameters{trained}",
    )
    positions = f", {number:,} positions" if (number := model["max_position_embeddings"]) else ""
    write("", f"saved in {model['dtype'] or 'float32'}{positions}")
    console.print()
    _print_routing(inspection, console)
    console.print()
    states = inspection["optimizer_states"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for row in states["bytes_per_gpu"]:
        sizes = [value for key, value in row.items() if key not in ("optimizer", "states")]
        cells = (
            row["states"],
            *("-" if size is None else with_prefix(size, "B") for size in sizes),
        )
        rows.setdefault(cells, []).append(row["optimizer"])
    strategies = [key for key in states["bytes_per_gpu"][0] if key not in ("optimizer", "states")]
    table = [[", ".join(names), *cells] for cells, names in rows.items()]
    title = f"optimizer states per GPU, {count(states['num_processes'], 'GPU')}"
    console.print(
        Table(["optimizer", "states", *strategies], table, title, "ll").rich(pad_edge=True)
    )
    console.print()
    tokens = inspection["tokens"]
    if tokens is None:
        write("template", "unknown, because the tokenizer cannot be loaded")
    else:
        template = tokens["template"]
        if "end" not in template:
            write("template", "cannot be used" if template["exists"] else "the tokenizer has none")
        else:
            ends = "the EOS token: answers end the turn"
            ends = ends if template["end_is_eos"] else f"not the EOS token {tokens['eos']}"
            write(
                "template",
                f"answers end with {template['end']} (token {template['end_id']:,}), {ends}",
            )
            marks = {
                "marked": "the template marks the answers",
                "derived": "the answers are derived from the template",
            }
            if "answers" in template:
                write("", f"with trainer.assistant_only_loss, {marks[template['answers']]}")
        own = f"{tokens['eos']} (token {tokens['eos_id']})" if tokens["eos"] else "none"
        sources = (
            ("config.json", "config_eos_ids"),
            ("generation_config.json", "generation_eos_ids"),
        )
        others = (
            f"; {file}: {', '.join(map(str, tokens[ids])) or 'none'}" for file, ids in sources
        )
        write("tokens", f"EOS {own}{''.join(others)}")
        pad = f"{tokens['pad']} (token {tokens['pad_id']})" if tokens["pad"] else "none"
        reason = (
            "" if tokens["pad_is_own"] or not tokens["pad"] else ", because there is no pad token"
        )
        write("", f"padding {pad}{reason}")
        if tokens["vocab_size"]:
            write("", f"{tokens['num_tokens']:,} tokens, {tokens['vocab_size']:,} embeddings")
    is_mixed = inspection["packing"]["is_separate"] is False
    write(
        "packing",
        "refused, see the problem above" if is_mixed else inspection["packing"]["message"],
    )


def _print_routing(inspection: dict[str, Any], console: Console) -> None:
    """Print which optimizer updates which parameters, and fused, expert and tied weights."""
    write, name = partial(print_labelled, console), inspection["optimizer"]
    optimizers = {"spectral": name, "adamw": "adamw"}
    others = (
        ""
        if name == "adamw"
        else f"; adamw updates the other {1 - inspection['spectral_share']:.1%}"
    )
    share = (
        "all parameters"
        if name == "adamw"
        else f"{inspection['spectral_share']:.1%} of the trained parameters"
    )
    write("optimizer", f"{name} updates {share}{others}")
    rows, groups = [], inspection["routing"]
    for group in groups:
        number = (
            count(group["matrices"], "matrix", "matrices")
            if group["matrices"]
            else count(group["tensors"], "tensor")
        )
        rows.append([f"{optimizers[group['rule']]}: {group['reason']}, {number}", "", "", ""])
        rows += (
            [
                "  " + p["name"].removesuffix(".weight"),
                " x ".join(map(str, p["shape"])),
                f"{p['tensors']:,}",
                f"{p['share']:.2%}",
            ]
            for p in inspection["parameters"]
            if (p["rule"], p["reason"]) == (group["rule"], group["reason"])
        )
    console.print(
        Table(["parameters", "shape", "number", "share"], rows, "", "l").rich(pad_edge=True)
    )
    for row in inspection["fused"]:
        verb = (
            "each mapped by itself" if row["is_split"] else f"mapped as one matrix; {row['split']}"
        )
        tensors = count(row["tensors"], "weight")
        write("fused", f"{row['layer']}, {tensors}: {join_words(row['projections'])}, {verb}")
    if experts := inspection["experts"]:
        numbers = join_words([f"{number:,}" for number in experts["experts"]], "or")
        tensors = count(experts["tensors"], "tensor")
        write(
            "experts",
            f"{tensors} of {numbers} experts each: {experts['matrices']:,} matrices, each mapped by itself",
        )
    for names in inspection["tied"]:
        write("tied", f"{join_words(names)} are one weight")
