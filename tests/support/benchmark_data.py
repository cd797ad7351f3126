"""Invented data for the eight benchmarks of the shipped suites, in the hub's schemas and layout.

Each is a folder as `hf download --repo-type dataset` leaves it: a README.md whose front matter says which file is which
split, and the files. Most are parquet, as on the hub; two are jsonl, so that both are read.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from datasets import ClassLabel, Features, List, Value

from tests.support import benchmark_questions as questions
from tests.support.benchmark_questions import Row

TASKS = Path(lm_eval.__file__).parent / "tasks"
NUM_TRAIN = 30  # 25 shots are the most that a suite asks for
NUM_DEV = 5  # MMLU's, all of which are shown
MMLU = Features(
    question=Value("string"), subject=Value("string"), choices=List(Value("string")), answer=ClassLabel(names=[*"ABCD"])
)

Make = Callable[[random.Random], Row]
Splits = dict[str, list[Row]]


def write_datasets(root: Path, num_questions: int = 4, seed: int = 0) -> Path:
    """Write the eight below `root`, as <root>/<owner>/<name>, and return `root`: what `--data-root` takes.

    num_questions: of each task, at least 2. MMLU's subjects have from 2 up, about as many in the mean, so that its two
    averages differ. Equal arguments write equal files.
    """
    assert num_questions >= 2, "one question alone has no standard error"

    def splits(make: Make, name: str, **counts: int) -> Splits:
        made = {}
        for split, count in counts.items():
            rng = random.Random(f"{seed}/{name}/{split}")
            made[split] = [make(rng) for _ in range(count)]
        return made

    def hidden(make: Make, name: str, **blank: Any) -> Splits:
        """With a test split like the hub's, which has no answers: asking it is an error."""
        made = splits(make, name, **labelled, test=1)
        return made | {"test": [row | blank for row in made["test"]]}

    labelled = {"train": NUM_TRAIN, "validation": num_questions}
    tested = {**labelled, "test": num_questions}
    arc = {config: splits(questions.arc, config, **tested) for config in ("ARC-Challenge", "ARC-Easy")}
    _write(root / "allenai/ai2_arc", arc)
    _write(root / "allenai/openbookqa", {"main": splits(questions.openbookqa, "openbookqa", **tested)})
    winogrande = hidden(questions.winogrande, "winogrande", answer="")
    _write(root / "allenai/winogrande", {"winogrande_xl": winogrande}, jsonl=True)
    _write(root / "baber/piqa", {"default": hidden(questions.piqa, "piqa", label=-1)}, jsonl=True)
    _write(root / "Rowan/hellaswag", {"default": hidden(questions.hellaswag, "hellaswag", label="")})
    gsm8k = splits(questions.gsm8k, "gsm8k", train=NUM_TRAIN, test=num_questions)
    _write(root / "openai/gsm8k", {"main": gsm8k})
    truths = splits(questions.truthfulqa, "truthfulqa", validation=num_questions)
    _write(root / "truthfulqa/truthful_qa", {"multiple_choice": truths})
    mmlu = {}
    for index, subject in enumerate(subjects()):
        test = 2 + 7 * index % max(2, 2 * num_questions - 3)
        made = splits(questions.mmlu, subject, test=test, validation=2, dev=NUM_DEV)
        mmlu[subject] = {split: [row | {"subject": subject} for row in rows] for split, rows in made.items()}
    _write(root / "cais/mmlu", mmlu, features=MMLU)
    return root


def subjects() -> list[str]:
    """MMLU's 57, as lm-eval spells them."""
    files = sorted((TASKS / "mmlu" / "default").glob("mmlu_*.yaml"))
    return [yaml.safe_load(file.read_text())["dataset_name"] for file in files]


def _write(folder: Path, configs: dict[str, Splits], *, jsonl: bool = False, features: Features | None = None) -> None:
    """A data set's folder. No `dataset_info` in the front matter: it is parsed anew for each of MMLU's subjects, and
    with it the 57 take twice as long to load; what it would say about columns stands in the parquet files."""
    front = []
    for config, splits in configs.items():
        where = "data" if config == "default" else config
        (folder / where).mkdir(parents=True)
        for split, rows in splits.items():
            if jsonl:
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                (folder / where / f"{split}.jsonl").write_text(text, encoding="utf-8")
            else:
                table = pa.Table.from_pylist(rows, features.arrow_schema if features else None)
                pq.write_table(table, folder / where / f"{split}-00000-of-00001.parquet")
        end = ".jsonl" if jsonl else "-*"
        files = [{"split": split, "path": f"{where}/{split}{end}"} for split in splits]
        front.append({"config_name": config, "data_files": files})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': front})}---\nInvented, for tests.\n")
