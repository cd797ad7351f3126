"""lm-eval's own simple_evaluate, the reference for our evaluation."""

import tempfile
from pathlib import Path
from typing import Any

import lm_eval
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

TASKS = Path(lm_eval.__file__).parent / "tasks"
FOLDERS = ("arc", "hellaswag", "mmlu/default", "truthfulqa", "winogrande", "gsm8k", "piqa", "openbookqa",
           "super_glue/boolq")  # fmt: skip
DATASETS = {"arc_challenge": "allenai/ai2_arc", "arc_easy": "allenai/ai2_arc", "hellaswag": "Rowan/hellaswag",
            "mmlu": "cais/mmlu", "truthfulqa_mc2": "truthfulqa/truthful_qa", "winogrande": "allenai/winogrande",
            "gsm8k": "openai/gsm8k", "piqa": "baber/piqa", "openbookqa": "allenai/openbookqa",
            "boolq": "aps/super_glue"}  # fmt: skip
# Shots by task: the two suites.
LEADERBOARD = {"arc_challenge": 25, "hellaswag": 10, "mmlu": 5, "truthfulqa_mc2": 0, "winogrande": 5, "gsm8k": 5}
ZERO_SHOT = dict.fromkeys(("arc_challenge", "arc_easy", "piqa", "hellaswag", "openbookqa", "winogrande"), 0)


def plain(
    model: Path, tasks: dict[str, int], data_root: Path, limit: int | None = None, batch_size: int = 16, **settings: Any
) -> dict[str, Any]:
    """simple_evaluate's results, with samples, of lm-eval's shipped tasks at these shots and with its default seeds.

    tasks: shots by name; mmlu is the group of 57. One suite at a time: a name stands for one number of shots.
    settings: more of simple_evaluate's arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        manager, group = load(tasks, data_root, Path(folder))
        lm = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
                  tokenizer=AutoTokenizer.from_pretrained(model), batch_size=batch_size)  # fmt: skip
        found = lm_eval.simple_evaluate(lm, tasks=[group], task_manager=manager, limit=limit, **settings)
    assert found is not None
    return found


def load(tasks: dict[str, int], data_root: Path, folder: Path) -> tuple[TaskManager, Any]:
    """lm-eval's manager and its group of these tasks, loaded with their data; `folder` holds the group's file.

    A file, since lm-eval lets only files inherit; `group: mmlu`, since `task: mmlu` loads one subject of the 57.
    """
    # datasets' cache knows a folder by its last name and its README, not by its path or its rows: from one cache, a
    # second root of the same layout gets the first one's questions (test_datasets_confuses_two_roots_in_one_cache).
    cache = str(data_root.with_name(data_root.name + "-cache"))
    members = [{"group" if task == "mmlu" else "task": task, "num_fewshot": shots,
                "dataset_path": str(data_root / DATASETS[task]), "dataset_kwargs": {"cache_dir": cache}}
               for task, shots in tasks.items()]  # fmt: skip
    (folder / "group.yaml").write_text(yaml.safe_dump({"group": "suite", "task": members}))
    manager = TaskManager(include_path=[*(str(TASKS / name) for name in FOLDERS), str(folder)], include_defaults=False)
    return manager, manager.load(["suite"])["groups"]["suite"]
