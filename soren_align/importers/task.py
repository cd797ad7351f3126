"""Whether a file is for SFT or DPO. TRL has one command for each, so its files need not contain it."""

import re
from typing import Any

from ..core.errors import UserError
from ..recipe import trl
from ..tasks import TaskName
from .data_keys import ROOTS
from .key_tables import OTHER_TASKS


def task_of_source(flat: dict[str, Any], name: str, folder: str) -> TaskName:
    """The source's task: by its keys, else by its columns, else by the names of file and folder.

    flat: the source's keys; name, folder: the file's, without suffix. Raises UserError if the task is neither SFT nor
    DPO, or cannot be determined.
    """
    others, rl, stage = OTHER_TASKS.split(), flat.get("rl"), flat.get("stage")
    named = (name, folder, flat.get("output_dir"), flat.get("hub_model_id"), rl, stage, flat.get("pref_loss"))
    around = [str(part) for part in named if part]
    words = {word for part in around for word in re.split(r"[^a-z0-9]+", part.lower())}
    flags = {key.removesuffix("_model") for key in ("reward_model", "process_reward_model") if flat.get(key)}
    if other := next((word for word in others if word in words | flags), None) or next(iter(flags), None):
        raise UserError(
            f"this trains by {other.upper()}; only SFT and DPO are supported (--task dpo converts what fits DPO)"
        )
    if stage in ("sft", "dpo"):
        return stage
    if rl or "base_model" in flat:
        return "dpo" if rl else "sft"
    sft, dpo = trl.fields("sft").keys(), trl.fields("dpo").keys()
    keys_of = {
        "sft": (sft - dpo | {"max_seq_length"}) & flat.keys(),
        "dpo": (dpo - sft | {"max_prompt_length"}) & flat.keys(),
    }
    if "loss_type" in flat:
        losses = trl.fields("dpo")["loss_type"].choices
        loss = flat["loss_type"]
        loss = loss[0] if isinstance(loss, list) and loss else loss
        keys_of["dpo" if loss in losses else "sft"].add("loss_type")
    if keys_of["sft"] and keys_of["dpo"]:
        raise UserError(
            f"SFT or DPO? {', '.join(sorted(keys_of['sft']))} are SFT keys, {', '.join(sorted(keys_of['dpo']))} DPO "
            "keys: write --task sft or --task dpo"
        )
    if keys_of["sft"] or keys_of["dpo"]:
        return "sft" if keys_of["sft"] else "dpo"
    if task := _task_of_data(flat):
        return task
    for place in (name, folder):
        tasks = {"sft", "dpo"} & set(re.split(r"[^a-z0-9]+", place.lower()))
        if len(tasks) == 1:
            return "sft" if "sft" in tasks else "dpo"
    raise UserError("SFT or DPO? Neither its keys nor its name determine it: write --task sft or --task dpo")


def _task_of_data(source: dict[str, Any]) -> TaskName | None:
    """The task by the names of columns and splits; None if they fit both."""
    signs: tuple[tuple[TaskName, str], ...] = (("dpo", r"'chosen'|_prefs\b"), ("sft", r"'messages'|_sft\b"))
    for root in ROOTS:
        text = f"{source.get(root)} {source.get('dataset_splits')} {source.get('dataset_train_split')}"
        for task, pattern in signs:
            if source.get(root) and re.search(pattern, text):
                return task
    return None
