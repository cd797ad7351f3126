"""Print a plan as text, 80 columns wide."""

from functools import partial
from typing import Any

from rich.console import Console

from ..core.optimizer_settings import MATCH_RMS
from ..core.text import Table, count, estimated_time, print_labelled, with_prefix
from ..data import DatasetStats, show_example
from ..optim import spectral_share
from ..run.record import describe_dropped, describe_held_out
from ..tasks import TASKS
from ..training.packing import Packing
from ..training.report import describe_source
from .flops import UTILIZATION
from .step import GPUS_PER_NODE
from .strategies import GPU, NETWORK, NVLINK, PCIE

SMALL_MODEL = 1e9
"""Parameters below which the assumed utilization is too high."""
PHASES = {"always": "", "forward_backward": "forward/backward", "optimizer_step": "optimizer step"}


NOTICEABLE = 20
"""Seconds of preparation from which they are shown."""


def print_plan(
    plan: dict[str, Any], account: DatasetStats | None, console: Console, full: bool = False
) -> None:
    """Print the return values of `plan.plan_training`, two screens in full; otherwise the first
    sections and totals.
    """
    write = partial(print_labelled, console)
    # Notices first, problems last: what stays on the screen of a terminal is the end.
    for notice in plan["notices"]:
        write("notice", notice)
        console.print()
    _print_model_and_data(plan, account, console)

    optimizer, ranks = plan["optimizer"], plan["processes"]
    console.print()
    _print_steps(plan, console, full)
    has_others = (
        any(group["rule"] == "adamw" for group in plan["routing"]) and optimizer["name"] != "adamw"
    )
    share = f"{spectral_share(plan['routing']):.1%} of the trained parameters"
    others = f", {share}; adamw for the other parameters" if has_others else ""
    write("optimizer", f"{plan['optimizer_description']} for the weight matrices{others}")
    _print_updates(plan, console, full)
    console.print()
    if full or ranks["num_processes"] > 1:
        _print_processes(ranks, console)
    _print_memory(ranks, console, full)
    _print_strategies(plan, console, full)
    _print_compute(plan, console, full)
    _print_evaluation(plan, console)
    console.print()
    if full:
        for number, file in enumerate(plan["files"]):
            write("" if number else "files", file)
    else:
        contents = (
            "learning rates by step, parameter groups, update sizes, memory by component,"
            " operations, files"
        )
        write("more", f"--full: {contents}")
    for problem in plan["problems"]:  # why training would not start
        console.print()
        write("problem", problem)


def _print_steps(plan: dict[str, Any], console: Console, full: bool) -> None:
    """Print the number of steps, and the schedule of the learning rates."""
    write, steps, optimizer = partial(print_labelled, console), plan["steps"], plan["optimizer"]
    epochs = ""
    if steps["per_epoch"]:
        number = "1 epoch" if steps["num_epochs"] == 1 else f"{steps['num_epochs']:g} epochs"
        epochs = f": {number} of {steps['per_epoch']:,} steps"
    write(
        "steps",
        f"{steps['total']:,} optimizer steps{epochs}, global batch size"
        f" {steps['global_batch_size']}",
    )
    warmup = (
        f" after {steps['num_warmup_steps']:,} steps of warmup" if steps["num_warmup_steps"] else ""
    )
    schedule = steps["lr_scheduler_type"] + warmup
    if full:
        rows = [
            [
                f"{rate['step']:,}",
                *(f"{rate[key]:.2e}" if rate[key] else "0" for key in ("lr", "aux_lr")),
            ]
            for rate in plan["learning_rates"]
        ]
        console.print(
            _table(["step", "matrices", "other parameters"], rows, "learning rate", "rrr")
        )
        write("", f"schedule: {schedule}")
        console.print()
    else:
        lr, aux_lr = optimizer["lr"], optimizer.get("aux_lr")
        others = f" ({aux_lr:g} of other parameters)" if aux_lr not in (None, lr) else ""
        write("", f"learning rate {lr:g}{others}, schedule {schedule}")


def describe_padding(compute: dict[str, Any], task: str) -> str:
    """Return the share of the batches' tokens that is padding, and what would make it smaller."""
    text = f"{compute['padding']:.0%} of the tokens of the batches"
    if compute["padding_if_grouped"] < compute["padding"] - 0.05 and not TASKS[task].keeps_order:
        text += (
            f"; {compute['padding_if_grouped']:.0%} with trainer.train_sampling_strategy:"
            " group_by_length"
        )
    return text


def _print_compute(plan: dict[str, Any], console: Console, full: bool) -> None:
    """Print the FLOPs of training, and its hours on several devices."""
    write = partial(print_labelled, console)
    compute = plan["compute"]
    if full and compute["training_flops_per_step"] is None:
        write("compute", "unknown for this architecture")
    elif full:
        bound = "" if compute["tokens_are_measured"] else " (upper bound)"
        bound = " (the mean of the first ones)" if plan["data"].get("is_streamed") else bound
        per_step, total = (
            with_prefix(compute[key], "FLOP")
            for key in ("training_flops_per_step", "training_flops")
        )
        write("compute", f"forward and backward: {per_step} per step, {total} in total")
        tokens = f"{compute['tokens_per_example']:,.0f} tokens per example{bound}"
        write("", f"with {tokens}, {compute['training_tokens']:,} tokens in all")
    if full and compute["map_share"] is not None:
        write("", f"spectral maps: {compute['map_share']:.2%} of all FLOPs")
    if hours := compute["hours"]:
        own, num = _own_strategy(plan), plan["processes"]["num_processes"]
        if num > 1 and own:
            times = f"{estimated_time(own['hours'])} on {num} {GPU}s with {own['name']}"
        else:
            times = ", ".join(
                f"{estimated_time(number)} on one {name}" for name, number in hours.items()
            )
            if "CPU core" not in hours:
                times += f", {estimated_time(hours['H100'] / 8)} on eight H100s"
        longer = (
            "; a small model takes longer" if plan["model"]["num_parameters"] < SMALL_MODEL else ""
        )
        if compute["padding"] >= 0.005:
            write("padding", describe_padding(compute, plan["task"]))
        write("time", f"about {times} (assumed: {compute['hours_assume']}{longer})")
        if full and not compute["maps_are_counted"]:
            write(
                "",
                "the time of the maps is not included, because the operations of singular value"
                " decompositions are not counted",
            )


def _print_model_and_data(
    plan: dict[str, Any], account: DatasetStats | None, console: Console
) -> None:
    """Print task, model, the counts of examples and tokens, and the first example if `account` has
    it.
    """
    write = partial(print_labelled, console)
    model, data = plan["model"], plan["data"]
    num_trained = model["num_trained_parameters"]
    trained = "" if num_trained == model["num_parameters"] else f", {num_trained:,} of them trained"
    write("task", plan["task"])
    write("model", f"{model['name_or_path']}: {model['num_parameters']:,} parameters{trained}")
    console.print()
    reads = []
    if streamed := data["streamed"]:
        of_eval = (
            f" and {held_out:,} held-out ones"
            if (held_out := streamed["num_eval_examples"])
            else ""
        )
        size = (
            f": {with_prefix(number, 'B')} of compressed files"
            if (number := streamed["bytes"])
            else ""
        )
        reads.append(f"reads {streamed['num_examples']:,} of them{of_eval}{size}")
    if account is None:
        write("data", data["source"]["path"])
        for line in [f"{data['num_examples']:,} examples, from the dataset card", *reads]:
            write("", line)
        return
    write("data", f"{data['source']['path']}: {data['layout']}")
    lines = []
    if data["is_streamed"]:
        unknown = (
            "streamed: the number of examples is unknown; the counts are of the first 1,000 of each"
            " split"
        )
        lines += [unknown, *reads]
    dropped = describe_dropped(data["dropped"]) or "0 dropped"
    counts = f"{data['num_examples']:,} examples: {data['num_kept']:,} kept, {dropped}"
    lines.append(f"{counts}, {account.describe_truncation()}")
    if not data["is_streamed"]:
        sources = zip(data["num_kept_by_source"], data["source"].get("sources", ()), strict=True)
        lines += [describe_source(source, number) for number, source in sources]
    lines += describe_held_out(data["eval"]) if data["eval"] else ()
    lines += Packing(**data["packing"]).describe() if data["packing"] else ()
    lengths = ", ".join(
        f"{name} {value:,}" for name, value in data["token_length_percentiles"].items()
    )
    unknown = f", {data['num_unknown_tokens']:,} are unknown to the tokenizer" * bool(
        data["num_unknown_tokens"]
    )
    lines.append(f"tokens per example: {lengths}")
    lines.append(f"{data['trained_token_share']:.0%} of the tokens are in the loss{unknown}")
    if (seconds := data["prepared_seconds"]) >= NOTICEABLE and not data["is_streamed"]:
        lines.append(
            f"read and tokenized in {estimated_time(seconds / 3600)}, for the training too"
        )
    if not data["stop_token_trained"]:
        lines.append(
            "the EOS token is NOT in the loss: the model will not learn to end its answers"
        )
    for line in lines:
        write("", line)
    colored = console.color_system is not None
    style = "in green" if colored else "in [[double brackets]]"
    console.print(
        f"\nexample   the first example; tokens in the loss are {style}",
        markup=False,
        highlight=False,
    )
    console.print(show_example(account, color=colored))


def _print_updates(plan: dict[str, Any], console: Console, full: bool) -> None:
    """Print the parameter groups and the size of their updates, or its bounds; a notice where
    bfloat16 loses them.
    """
    write = partial(print_labelled, console)
    weight, sizes, name = plan["typical_weight"], plan["update_sizes"], plan["optimizer"]["name"]
    if full:
        optimizers = {"spectral": name, "adamw": "adamw"}
        rows = []
        for group in plan["routing"]:
            reason = group["reason"] + f", {group['matrices']:,} matrices" * (
                group["matrices"] > group["tensors"]
            )
            rows.append(
                [optimizers[group["rule"]], reason, f"{group['tensors']:,}", f"{group['numel']:,}"]
            )
        console.print(
            _table(["optimizer", "reason", "tensors", "parameters"], rows, "parameter groups", "ll")
        )
        rows, others = [], "all parameters" if name == "adamw" else "other parameters"
        for size in sizes:
            shape = " x ".join(map(str, size["shape"])) if size["shape"] else others
            row = [
                optimizers[size["rule"]],
                shape,
                f"{size['tensors']:,}",
                f"{size['update_rms']:.1e}",
            ]
            if weight:
                ulps = float(f"{size['ulps']:.2g}")
                rows.append([*row, f"{ulps:,g}", f"{size['relative_update']:.2g}"])
            else:
                rows.append([*row, f"{size['update_sum']:.2g}"])
        columns = ["optimizer", "shape", "tensors", "update RMS"]
        columns += ["ulps", f"sum / {weight:g}"] if weight else ["sum"]
        console.print(_table(columns, rows, "update size at the peak learning rate", "ll"))
        if weight:
            write(
                "",
                f"ulps: update RMS / {plan['update_dtype']} spacing near {weight:g}, a typical"
                " weight",
            )
            meaning = f"update RMS, summed over all steps and divided by {weight:g}"
            write("", f"sum / {weight:g}: {meaning}; an upper bound of the relative change")
        else:
            write(
                "",
                "sum: update RMS, summed over all steps; an upper bound of the change of a factor",
            )
        write(
            "",
            f"adamw: assumed update RMS {MATCH_RMS} x learning rate; the first updates are larger",
        )
    else:
        # In one line: the smallest and the largest over all shapes.
        changes = sorted(size["relative_update" if weight else "update_sum"] for size in sizes)
        bounds = " to ".join(
            dict.fromkeys(f"{float(f'{change:.2g}'):,g}" for change in (changes[0], changes[-1]))
        )
        relative = (
            f" times a typical weight, {weight:g}" if weight else " (RMS of the change of a factor)"
        )
        write("", f"all updates together: at most {bounds}{relative}")
    # Rounding to nearest loses less than half an ulp. All updates together are compared: a model
    # may be saved in bfloat16 only at the end.
    num_lost = sum(size["tensors"] for size in sizes if weight and size["bfloat16_ulps"] < 0.5)
    if num_lost and not plan["processes"]["num_frozen_parameters"]:
        notice = (
            f"in {num_lost} of {sum(size['tensors'] for size in sizes)} tensors, all updates"
            f" together are smaller than half a bfloat16 ulp of a weight of {weight:g}. If the"
            " model is saved or run in bfloat16, most of these weights do not change; use a larger"
            " learning rate"
        )
        write("notice", notice)


def _print_processes(section: dict[str, Any], console: Console) -> None:
    """Print the number of processes, and the work that they share and exchange.
    section: the plan's.
    """
    write = partial(print_labelled, console)
    num_processes, num_matrices = section["num_processes"], section["num_matrices"]
    is_alone = num_processes == 1
    launched = (
        ""
        if is_alone and section["parallel"] == "DDP"
        else f", {section['parallel']}, started by torchrun"
    )
    write("processes", f"{num_processes:,}{launched}")
    if not is_alone:
        write(
            "",
            f"global batch size {section['global_batch_size']}:"
            f" {section['global_batch_size_factors']}",
        )
        if not section["global_batch_size_is_set"]:
            write("", "without run.global_batch_size, this size grows with the number of processes")
    if not num_matrices:
        return
    each = "" if is_alone else ", each map on one rank"
    flops = section["map_flops"]
    total = (
        f": {with_prefix(flops['all_ranks'], 'FLOP')} in {section['map_precision']}"
        if flops
        else ""
    )
    write("", f"spectral maps of {num_matrices:,} matrices per step{total}{each}")
    if is_alone:
        return
    busiest = f"{with_prefix(flops['busiest_rank'], 'FLOP')}, " if flops else ""
    waits = section["num_exchanged_matrices"] and section["parallel"] != "DDP"
    rank = "busiest rank in each bucket" if waits else "busiest rank"
    write("", f"maps of the {rank}: {busiest}{section['max_over_mean_flops']:.3f} x the mean")
    write("", f"matrices exchanged between ranks: {section['num_exchanged_matrices']:,}")
    if section["num_exchanged_matrices"]:
        largest, mean = (with_prefix(section["bytes_sent"][key], "B") for key in ("max", "mean"))
        on_average = "" if mean == largest else f" at most, {mean} on average"
        write("", f"sent by each rank per optimizer step: {largest}{on_average}")
    gradients = section["gradient_bytes_sent"]
    write(
        "",
        f"for averaging gradients: {with_prefix(gradients['per_step'], 'B')}, in"
        f" {gradients['dtype']}",
    )


def _print_memory(section: dict[str, Any], console: Console, full: bool) -> None:
    """Print the memory of a rank: its components, or its peak.
    section: the plan's, of the processes.
    """
    write = partial(print_labelled, console)
    used = {part["location"] for part in section["memory"]}
    # With offload the states are in the CPU's memory, which is a limit of its own.
    for location in [location for location in ("device", "cpu") if location in used]:
        totals = section["memory_total"][location]
        if not full:
            known = [num_bytes for num_bytes in totals.values() if num_bytes is not None]
            unknown = ", without activations, which are unknown" * (len(known) < len(totals))
            where = "in the CPU's memory" if location == "cpu" else "at the peak"
            write("memory", f"{with_prefix(max(known), 'B')} per rank {where}{unknown}")
            continue
        unit, size = ("GB", 1e9) if totals["optimizer_step"] >= 1e9 else ("MB", 1e6)
        rows = [
            [part["name"], f"{part['num_bytes'] / size:.2f}", part["detail"], PHASES[part["phase"]]]
            for part in section["memory"]
            if part["location"] == location
        ]
        # On the CPU the passes add nothing to what is always there: one total is enough.
        for phase, num_bytes in totals.items():
            if location == "device" or phase == "optimizer_step":
                value = "unknown" if num_bytes is None else f"{num_bytes / size:.2f}"
                rows.append([f"total, {PHASES[phase]}", value, "", ""])
        if section["num_matrices"] and totals["forward_backward"] is not None:
            with_adamw = section["memory_total_adamw"][location].values()
            rows.append(["peak with adamw instead", f"{max(with_adamw) / size:.2f}", "", ""])
        title = "memory per rank" + (" (CPU)" if location == "cpu" else "")
        console.print(
            _table(["component", unit, "dtype or size", "only during"], rows, title, "lrll")
        )
    if section["num_processes"] > 1 and not section["is_on_cpu"]:
        host = section["host_bytes_while_loading"]
        node = min(section["num_processes"], GPUS_PER_NODE)
        text = f"{with_prefix(host, 'B')} of CPU memory on a node of {node}, while the weights load"
        if host:
            write("", text)
    if full or section["is_on_cpu"]:
        write("", f"not included: {section['memory_not_included']}")
    if full:
        for setting, num_bytes in section["memory_saved"].items():
            write("", f"{with_prefix(num_bytes, 'B')} more without {setting}")
        console.print()


def _print_strategies(plan: dict[str, Any], console: Console, full: bool) -> None:
    """Print memory and time of a step for each value of run.parallel, of several processes or where
    it does not fit.
    """
    choices, num = plan["strategies"], plan["processes"]["num_processes"]
    own = _own_strategy(plan)
    if not choices or not (full or num > 1 or (own and not own["fits"])):
        return
    rows = []
    for each in choices:
        memory = each["memory_bytes"]
        remark = "" if each["fits"] else "does not fit"
        if each["is_rounded"] and each["fits"]:
            remark = "bfloat16 sums"
        if each["name"] == plan["fastest"]:
            remark = "fastest that fits"
        rows.append([
            each["name"] + (" *" if each is own else ""),
            "-" if memory is None else f"{memory / 1e9:.1f}",
            f"{each['bytes_sent'] / 1e9:.1f}",
            f"{each['exposed_seconds']:.2f}",
            f"{each['step_seconds']:.2f}",
            f"{each['hours']:.2f}",
            remark,
        ])  # fmt: skip
    head = ["run.parallel", "GB", "GB sent", "s waiting", "s a step", "hours", ""]
    gpus = f"{num} x {GPU} of {plan['gpu_memory_bytes'] / 1e9:.0f} GB"
    console.print(_table(head, rows, gpus, "lrrrrrl"))
    nodes = f", {NETWORK / 1e9:.0f} between nodes of {GPUS_PER_NODE}" * (num > GPUS_PER_NODE)
    rates = f"{UTILIZATION:.0%} of the peak, {NVLINK / 1e9:.0f} GB/s within a node{nodes}"
    write = partial(print_labelled, console)
    write("", f"* the recipe's. Assumed: {rates}, {PCIE / 1e9:.0f} to the CPU's memory")
    if any(each["is_rounded"] for each in choices):
        write(
            "", "bfloat16 sums: of gradients; the maps amplify their rounding (docs/distributed.md)"
        )
    console.print()


def _own_strategy(plan: dict[str, Any]) -> dict[str, Any] | None:
    """The recipe's own, if it is one of the table."""
    return next((each for each in plan["strategies"] if each["name"] == plan["parallel"]), None)


def _table(head: list[str], rows: list[list[str]], title: str, align: str) -> Any:
    return Table(head, rows, title, align).rich(pad_edge=True)


def _print_evaluation(plan: dict[str, Any], console: Console) -> None:
    """Print suite and size of the evaluation."""
    write, evaluation = partial(print_labelled, console), plan["evaluation"]
    console.print()
    if evaluation is None:
        write("eval", "none: the recipe has no eval section")
        return
    loaded, requests = evaluation["num_questions"], evaluation["num_requests_per_model"]
    number = count(loaded, "question") if loaded else "all questions"
    if requests:
        number = f"{requests:,} requests, one per choice of a multiple-choice question"
    if evaluation["limit"]:
        number = f"the first {evaluation['limit']} questions of each task"
    write(
        "eval",
        f"{evaluation['suite']}, of the trained model and its starting checkpoints. Per model:"
        f" {number}",
    )
