"""A plan in text, 80 columns wide. Each section is a function, most of which `summary` also uses."""

from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from ..core.text import print_labelled, short_hours, with_prefix
from ..data import DatasetStats, show_example
from ..evaluate.stats.contamination import NGRAM
from ..optim import ADAMW_RMS, spectral_share
from ..run.record import describe_dropped, describe_held_out
from ..training.packing import Packing
from ..training.report import describe_source

SMALL_MODEL = 1e9
"""Parameters below which the assumed utilization is too high."""
PHASES = {"always": "", "forward_backward": "forward/backward", "optimizer_step": "optimizer step"}


def print_plan(plan: dict[str, Any], account: DatasetStats | None, console: Console) -> None:
    """Print the return values of `plan.plan_training`."""
    print_notices(plan, console)
    print_model_and_data(plan, account, console)
    print_steps(plan, console)
    _print_learning_rates(plan, console)
    console.print()
    print_optimizer(plan, console)
    _print_parameter_groups(plan, console)
    _print_update_sizes(plan, console)
    print_lost_updates(plan, console)
    console.print()
    print_processes(plan["processes"], console)
    for location in locations(plan):
        console.print(_memory_table(plan, location))
    print_labelled(console, "", f"not included: {plan['processes']['memory_not_included']}")
    for setting, num_bytes in plan["processes"]["memory_saved"].items():
        print_labelled(console, "", f"{with_prefix(num_bytes, 'B')} more without {setting}")
    console.print()
    _print_compute(plan, console)
    print_hours(plan, console)
    console.print()
    print_evaluation(plan["evaluation"], console)
    console.print()
    for number, file in enumerate(plan["files"]):
        print_labelled(console, "" if number else "files", file)
    print_problems(plan, console)


def locations(plan: dict[str, Any]) -> list[str]:
    """Where the plan's memory is: "device", "cpu", or both."""
    used = {part["location"] for part in plan["processes"]["memory"]}
    return [location for location in ("device", "cpu") if location in used]


def print_notices(plan: dict[str, Any], console: Console) -> None:
    """Print each notice, with an empty line after it."""
    for notice in plan["notices"]:
        print_labelled(console, "notice", notice)
        console.print()


def print_model_and_data(plan: dict[str, Any], account: DatasetStats | None, console: Console) -> None:
    """Print task, model, the counts of examples and tokens, and the first example if `account` has it."""
    write = partial(print_labelled, console)
    model, data = plan["model"], plan["data"]
    num_trained = model["num_trained_parameters"]
    trained = "" if num_trained == model["num_parameters"] else f", {num_trained:,} of them trained"
    write("task", plan["task"])
    write("model", f"{model['name_or_path']}: {model['num_parameters']:,} parameters{trained}")
    console.print()
    if account is None:
        write("data", data["source"]["path"])
        write("", f"{data['num_examples']:,} examples, from the dataset card")
        _print_streamed(data, console)
        return
    write("data", f"{data['source']['path']}: {data['layout']}")
    if data["is_streamed"]:
        write("", "streamed: the number of all examples is unknown; these are of the first 1,000 of each split")
        _print_streamed(data, console)
    dropped = describe_dropped(data["dropped"]) or "0 dropped"
    counts = f"{data['num_examples']:,} examples: {data['num_kept']:,} kept, {dropped}"
    write("", f"{counts}, {account.describe_truncation()}")
    if not data["is_streamed"]:
        for number, source in zip(data["num_kept_by_source"], data["source"].get("sources", ()), strict=True):
            write("", describe_source(source, number))
    for line in describe_held_out(data["eval"]) if data["eval"] else ():
        write("", line)
    for line in Packing(**data["packing"]).describe() if data["packing"] else ():
        write("", line)
    lengths = ", ".join(f"{name} {value:,}" for name, value in data["token_length_percentiles"].items())
    write("", f"tokens per example: {lengths}")
    unknown = f", {data['num_unknown_tokens']:,} are unknown to the tokenizer" * bool(data["num_unknown_tokens"])
    write("", f"{data['trained_token_share']:.0%} of the tokens are in the loss{unknown}")
    if not data["stop_token_trained"]:
        write("", "the EOS token is NOT in the loss: the model will not learn to end its answers")
    colored = console.color_system is not None
    style = "in green" if colored else "in [[double brackets]]"
    console.print(f"\nexample   the first one; tokens in the loss are {style}", markup=False, highlight=False)
    console.print(show_example(account, color=colored))


def _print_streamed(data: dict[str, Any], console: Console) -> None:
    if streamed := data["streamed"]:
        of_eval = f" and {held_out:,} held-out ones" if (held_out := streamed["num_eval_examples"]) else ""
        size = f": {with_prefix(number, 'B')} of compressed files" if (number := streamed["bytes"]) else ""
        print_labelled(console, "", f"reads {streamed['num_examples']:,} of them{of_eval}{size}")


def print_steps(plan: dict[str, Any], console: Console) -> None:
    """Print the number of steps and of epochs, after an empty line."""
    steps = plan["steps"]
    epochs = ""
    if steps["per_epoch"]:
        number = "1 epoch" if steps["num_epochs"] == 1 else f"{steps['num_epochs']:g} epochs"
        epochs = f": {number} of {steps['per_epoch']:,} steps"
    console.print()
    size = f"global batch size {steps['global_batch_size']}"
    print_labelled(console, "steps", f"{steps['total']:,} optimizer steps{epochs}, {size}")


def _print_learning_rates(plan: dict[str, Any], console: Console) -> None:
    table = _table("\nlearning rate", "step", "matrices", "other parameters", num_text_columns=0)
    for rate in plan["learning_rates"]:
        lr, aux_lr = (f"{rate[key]:.2e}" if rate[key] else "0" for key in ("lr", "aux_lr"))
        table.add_row(f"{rate['step']:,}", lr, aux_lr)
    console.print(table)
    print_labelled(console, "", f"schedule: {schedule(plan['steps'])}")


def schedule(steps: dict[str, Any]) -> str:
    """The learning rate's schedule in words. steps: the plan's section."""
    warmup = f" after {steps['num_warmup_steps']:,} steps of warmup" if steps["num_warmup_steps"] else ""
    return steps["lr_scheduler_type"] + warmup


def print_optimizer(plan: dict[str, Any], console: Console) -> None:
    """Print the optimizer of the matrices, and their share."""
    has_others = any(group["rule"] == "adamw" for group in plan["routing"]) and plan["optimizer"]["name"] != "adamw"
    share = f"{spectral_share(plan['routing']):.1%} of the trained parameters"
    others = f", {share}; adamw for the others" if has_others else ""
    print_labelled(console, "optimizer", f"{plan['optimizer_description']} for the matrices{others}")


def _print_parameter_groups(plan: dict[str, Any], console: Console) -> None:
    table = _table("\nparameter groups", "optimizer", "reason", "tensors", "parameters", num_text_columns=2)
    for group in plan["routing"]:
        optimizer, reason = _optimizer_name(plan, group["rule"]), group["reason"]
        reason += f", {group['matrices']:,} matrices" * (group["matrices"] > group["tensors"])
        table.add_row(optimizer, reason, f"{group['tensors']:,}", f"{group['numel']:,}")
    console.print(table)


def _print_update_sizes(plan: dict[str, Any], console: Console) -> None:
    dtype, weight, sizes = plan["update_dtype"], plan["typical_weight"], plan["update_sizes"]
    of_weight = ("ulps", f"sum / {weight:g}") if weight else ("sum",)
    columns = ("optimizer", "shape", "tensors", "update RMS", *of_weight)
    others = "all parameters" if plan["optimizer"]["name"] == "adamw" else "other parameters"
    table = _table("\nupdate size at the peak learning rate", *columns, num_text_columns=2)
    for size in sizes:
        shape = " x ".join(map(str, size["shape"])) if size["shape"] else others
        values = [f"{size['update_rms']:.1e}"]
        if weight:
            ulps = float(f"{size['ulps']:.2g}")
            values += [f"{ulps:,g}", f"{size['relative_update']:.2g}"]
        else:
            values.append(f"{size['update_sum']:.2g}")
        table.add_row(_optimizer_name(plan, size["rule"]), shape, f"{size['tensors']:,}", *values)
    console.print(table)
    if weight:
        print_labelled(console, "", f"ulps: update RMS / {dtype} spacing near {weight:g}, a typical weight")
        print_labelled(console, "", f"sum / {weight:g}: over all steps, an upper bound of the relative change")
    else:
        print_labelled(console, "", "sum: over all steps, an upper bound of the change; a factor B starts at 0")
    print_labelled(console, "", f"adamw: assumed to be {ADAMW_RMS} x learning rate; larger in the first steps")


def print_lost_updates(plan: dict[str, Any], console: Console) -> None:
    """Print a notice where the updates are too small for bfloat16."""
    weight, sizes = plan["typical_weight"], plan["update_sizes"]
    num_lost = sum(size["tensors"] for size in sizes if weight and size["bfloat16_ulps"] < 0.5)
    if num_lost and not plan["processes"]["num_frozen_parameters"]:
        num_tensors = sum(size["tensors"] for size in sizes)
        print_labelled(
            console,
            "notice",
            f"in {num_lost} of {num_tensors} tensors, all updates together are smaller than half a bfloat16 ulp of a "
            f"weight of {weight:g}: saved or run in bfloat16, most of these weights are unchanged. Use a larger "
            "learning rate",
        )


def print_processes(section: dict[str, Any], console: Console) -> None:
    """Print the number of processes, and the work that they share and exchange. section: the plan's."""
    write = partial(print_labelled, console)
    num_processes, num_matrices = section["num_processes"], section["num_matrices"]
    is_alone = num_processes == 1
    launched = "" if is_alone and section["parallel"] == "DDP" else f", {section['parallel']}, started by torchrun"
    write("processes", f"{num_processes:,}{launched}")
    if not is_alone:
        write("", f"global batch size {section['global_batch_size']}: {section['global_batch_size_factors']}")
        if not section["global_batch_size_is_set"]:
            write("", "it grows with the number of processes unless run.global_batch_size is set")
    if not num_matrices:
        return
    each = "" if is_alone else ", each map on one rank"
    flops = section["map_flops"]
    total = f": {with_prefix(flops['all_ranks'], 'FLOP')} in {section['map_precision']}" if flops else ""
    write("", f"spectral maps of {num_matrices:,} matrices per step{total}{each}")
    if is_alone:
        return
    busiest = f"{with_prefix(flops['busiest_rank'], 'FLOP')}, " if flops else ""
    write("", f"maps of the busiest rank: {busiest}{section['max_over_mean_flops']:.3f} x the mean")
    num_exchanged, sent = section["num_exchanged_matrices"], section["bytes_sent"]
    write("", f"matrices exchanged between ranks: {num_exchanged:,}")
    if num_exchanged:
        largest, mean = (with_prefix(sent[key], "B") for key in ("max", "mean"))
        write(
            "",
            f"sent by each rank per optimizer step: {largest}"
            + ("" if mean == largest else f" at most, {mean} on average"),
        )
    gradients = section["gradient_bytes_sent"]
    write("", f"for averaging gradients: {with_prefix(gradients['per_step'], 'B')}, in {gradients['dtype']}")


def _memory_table(plan: dict[str, Any], location: str) -> Table:
    section = plan["processes"]
    total = section["memory_total"][location]
    unit, size = ("GB", 1e9) if total["optimizer_step"] >= 1e9 else ("MB", 1e6)
    title = "\nmemory per rank" + (" (CPU)" if location == "cpu" else "")
    table = Table("component", unit, "dtype or size", "only during", title=title, title_justify="left", box=None)
    table.columns[1].justify = "right"
    for part in section["memory"]:
        if part["location"] == location:
            table.add_row(part["name"], f"{part['num_bytes'] / size:.2f}", part["detail"], PHASES[part["phase"]])
    for phase, num_bytes in total.items():
        if location == "device" or phase == "optimizer_step":
            value = "unknown" if num_bytes is None else f"{num_bytes / size:.2f}"
            table.add_row(f"total, {PHASES[phase]}", value)
    if section["num_matrices"] and total["forward_backward"] is not None:
        with_adamw = section["memory_total_adamw"][location].values()
        table.add_row("peak with adamw instead", f"{max(with_adamw) / size:.2f}")
    return table


def _print_compute(plan: dict[str, Any], console: Console) -> None:
    compute = plan["compute"]
    if compute["training_flops_per_step"] is None:
        print_labelled(console, "compute", "unknown for this architecture")
    else:
        bound = "" if compute["tokens_are_measured"] else " (upper bound)"
        per_step, total = (with_prefix(compute[key], "FLOP") for key in ("training_flops_per_step", "training_flops"))
        bound = " (the mean of the first ones)" if plan["data"].get("is_streamed") else bound
        tokens = f"{compute['tokens_per_example']:,.0f} tokens per example{bound}"
        print_labelled(console, "compute", f"forward and backward: {per_step} per step, {total} in total")
        print_labelled(console, "", f"with {tokens}, {compute['training_tokens']:,} tokens in all")
    if compute["map_share"] is not None:
        print_labelled(console, "", f"spectral maps: {compute['map_share']:.2%} of all FLOPs")


def print_hours(plan: dict[str, Any], console: Console, brief: bool = False) -> None:
    """Print the hours of the run, by device, where its operations are known. brief: without the reasons for more."""
    compute = plan["compute"]
    if (hours := compute["hours"]) is None:
        return
    times = ", ".join(f"{short_hours(number)} of one {name}" for name, number in hours.items())
    eight = "" if "CPU core" in hours else f", {short_hours(hours['H100'] / 8)} of eight H100s"
    print_labelled(console, "hours", f"{times}{eight}, at {compute['hours_assume']}: an assumption")
    if plan["model"]["num_parameters"] < SMALL_MODEL and not brief:
        print_labelled(console, "", "models below a billion parameters take longer: their operations are short")
    if not compute["maps_are_counted"] and not brief:
        print_labelled(console, "", "without the maps, decompositions whose operations are not counted")


def _table(title: str, *columns: str, num_text_columns: int) -> Table:
    """Without lines; columns after the first `num_text_columns` are numbers."""
    table = Table(title=title, title_justify="left", box=None)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_text_columns else "right")
    return table


def _optimizer_name(plan: dict[str, Any], rule: str) -> str:
    return plan["optimizer"]["name"] if rule == "spectral" else "adamw"


# ---
# The lines of a plan about its evaluation.


def print_evaluation(evaluation: dict[str, Any] | None, console: Console) -> None:
    """Print suite and size of the evaluation, and its questions in the training examples."""
    text = "none: the recipe has no eval section"
    if evaluation:
        requests = evaluation["num_requests_per_model"]
        loaded = evaluation["num_questions"]
        number = f"{loaded:,} question{'s' * (loaded != 1)}" if loaded else "all questions"
        if requests:
            number = f"{requests:,} requests, one per choice of a multiple-choice question"
        if evaluation["limit"]:
            number = f"the first {evaluation['limit']} questions of each task"
        text = f"{evaluation['suite']}, of the trained model and its starting checkpoints. Per model: {number}"
    print_labelled(console, "eval", text)
    _print_contamination(evaluation, console)


def _print_contamination(evaluation: dict[str, Any] | None, console: Console) -> None:
    columns = (evaluation or {}).get("contamination")
    if not columns:
        return
    number = next(iter(columns.values()))["examples_read"]
    print_labelled(
        console, "", f"questions in this run's {number:,} training examples (as a whole, or {NGRAM} words in a row):"
    )
    for column, each in columns.items():
        whole = f", {each['exact']:,} as a whole" if each["exact"] else ""
        print_labelled(console, "", f"  {column}: {each['overlapping']:,} of {each['questions']:,}{whole}")


def print_problems(plan: dict[str, Any], console: Console) -> None:
    """Print why training would not start, after an empty line each."""
    for problem in plan["problems"]:
        console.print()
        print_labelled(console, "problem", problem)


# ---
# What to look at in a plan before training: half a screen or one, where the whole plan has two.


def print_summary(plan: dict[str, Any], account: DatasetStats | None, console: Console) -> None:
    """Print the first sections of `display.print_plan`, and of the others the totals."""
    print_notices(plan, console)
    print_model_and_data(plan, account, console)
    print_steps(plan, console)
    _print_learning_rate(plan, console)
    print_optimizer(plan, console)
    _print_change(plan, console)
    print_lost_updates(plan, console)
    console.print()
    if plan["processes"]["num_processes"] > 1:
        print_processes(plan["processes"], console)
    for location in locations(plan):
        _print_memory(plan["processes"]["memory_total"][location].values(), location, console)
    if plan["processes"]["is_on_cpu"]:
        print_labelled(console, "", f"not included: {plan['processes']['memory_not_included']}")
    print_hours(plan, console, brief=True)
    console.print()
    print_evaluation(plan["evaluation"], console)
    console.print()
    print_labelled(
        console,
        "more",
        "--full: learning rates by step, parameter groups, update sizes, memory by component, operations, files",
    )
    print_problems(plan, console)


def _print_learning_rate(plan: dict[str, Any], console: Console) -> None:
    lr, aux_lr = plan["optimizer"]["lr"], plan["optimizer"].get("aux_lr")
    others = f" ({aux_lr:g} of other parameters)" if aux_lr not in (None, lr) else ""
    print_labelled(console, "", f"learning rate {lr:g}{others}, schedule {schedule(plan['steps'])}")


def _print_change(plan: dict[str, Any], console: Console) -> None:
    """Print the bounds of the updates' sum over all steps, smallest and largest by kind of tensor."""
    weight = plan["typical_weight"]
    changes = sorted(size["relative_update" if weight else "update_sum"] for size in plan["update_sizes"])
    bounds = " to ".join(dict.fromkeys(f"{change:.2g}" for change in (changes[0], changes[-1])))
    relative = f" x a weight of {weight:g}" if weight else " (RMS of the factors' change)"
    print_labelled(console, "", f"all updates together: at most {bounds}{relative}")


def _print_memory(totals: Any, location: str, console: Console) -> None:
    known = [num_bytes for num_bytes in totals if num_bytes is not None]
    unknown = ", without activations, which are unknown" * (len(known) < len(totals))
    where = "in the CPU's memory" if location == "cpu" else "at the peak"
    print_labelled(console, "memory", f"{with_prefix(max(known), 'B')} per rank {where}{unknown}")
