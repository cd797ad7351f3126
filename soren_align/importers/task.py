"""SFT or DPO: what another tool's file is for. TRL has a command for each, so that its files need not say it."""

import re
from typing import Any, get_args

from ..errors import UserError
from ..recipe import trl_config
from ..recipe.sections import Task
from .data_keys import ROOTS
from .key_tables import OTHER_TASKS


def told_task(flat: dict[str, Any], name: str, folder: str) -> Task:
    """What the source trains by: its keys say it, else its columns, else the names around it.

    flat: the source's keys; name, folder: the file's, without suffix.
    UserError where it is something else, and where it cannot be told.
    """
    others, rl = OTHER_TASKS.split(), flat.get("rl")
    around = [str(part) for part in (name, folder, flat.get("output_dir"), flat.get("hub_model_id"), rl) if part]
    words = {word for part in around for word in re.split(r"[^a-z0-9]+", part.lower())}
    flags = {key.removesuffix("_model") for key in ("reward_model", "process_reward_model") if flat.get(key)}
    if other := next((word for word in others if word in words | flags), None) or next(iter(flags), None):
        raise UserError(f"this trains by {other.upper()}; here it is SFT or DPO (--task dpo takes what of it fits DPO)")
    if rl or "base_model" in flat:
        return "dpo" if rl else "sft"
    sft, dpo = trl_config.fields("sft").keys(), trl_config.fields("dpo").keys()
    said = {
        "sft": (sft - dpo | {"max_seq_length"}) & flat.keys(),
        "dpo": (dpo - sft | {"max_prompt_length"}) & flat.keys(),
    }
    if "loss_type" in flat:
        losses = trl_config.fields("dpo")["loss_type"].choices
        loss = flat["loss_type"]
        loss = loss[0] if isinstance(loss, list) and loss else loss
        said["dpo" if loss in losses else "sft"].add("loss_type")
    if said["sft"] and said["dpo"]:
        raise UserError(
            f"SFT or DPO? {', '.join(sorted(said['sft']))} are keys of the one, {', '.join(sorted(said['dpo']))} of "
            "the other: write --task sft or --task dpo"
        )
    for task in get_args(Task):
        if said[task]:
            return task
    if task := _task_of_data(flat):
        return task
    for place in (name, folder):
        found = {"sft", "dpo"} & set(re.split(r"[^a-z0-9]+", place.lower()))
        if len(found) == 1:
            return "sft" if "sft" in found else "dpo"
    raise UserError("SFT or DPO? Neither a key nor the file's name says it: write --task sft or --task dpo")


def _task_of_data(source: dict[str, Any]) -> Task | None:
    """What the named columns and splits are for, if they say it."""
    signs: tuple[tuple[Task, str], ...] = (("dpo", r"'chosen'|_prefs\b"), ("sft", r"'messages'|_sft\b"))
    for root in ROOTS:
        text = f"{source.get(root)} {source.get('dataset_splits')} {source.get('dataset_train_split')}"
        for task, pattern in signs:
            if source.get(root) and re.search(pattern, text):
                return task
    return None
