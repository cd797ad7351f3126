"""Small datasets in the layouts of the paper's two: made-up words under the real names of columns and splits."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ANIMALS = ("otter", "heron", "lynx", "newt", "ibex", "crane", "tapir", "vole")


def ultrachat_200k(folder, num_train=32, num_test=8) -> dict[str, Path]:
    """{'train_sft': a .parquet file, 'test_sft': another}, as HuggingFaceH4/ultrachat_200k has them.

    Columns prompt, prompt_id and messages; two or four turns without a system turn.
    """
    make = {"train_sft": range(num_train), "test_sft": range(num_train, num_train + num_test)}
    return {split: _write(folder, split, [chat_row(i) for i in numbers]) for split, numbers in make.items()}


def ultrafeedback_binarized(folder, num_train=32, num_test=8) -> dict[str, Path]:
    """{'train_prefs': a .parquet file, 'test_prefs': another}, as HuggingFaceH4/ultrafeedback_binarized has them.

    Columns prompt (a text), prompt_id, chosen and rejected (whole conversations), messages and two scores.
    """
    make = {"train_prefs": range(num_train), "test_prefs": range(num_train, num_train + num_test)}
    return {split: _write(folder, split, [pair_row(i) for i in numbers]) for split, numbers in make.items()}


def chat_row(i):
    messages = [turn for part in range(1 + i % 2) for turn in _exchange(i, part)]
    return {"prompt": messages[0]["content"], "prompt_id": f"{i:064x}", "messages": messages}


def pair_row(i):
    chosen = _exchange(i, 0)
    rejected = [chosen[0], {"role": "assistant", "content": "I would rather not say. " * (1 + i % 3)}]
    told = {"prompt": chosen[0]["content"], "prompt_id": f"{i:064x}", "chosen": chosen, "rejected": rejected}
    return {**told, "messages": chosen, "score_chosen": 8.0, "score_rejected": 4.5}


def _exchange(i, part):
    animal = ANIMALS[i % len(ANIMALS)]
    answer = f"The {animal} in house {i} eats {'fish and ' * (i % 5)}grass."
    question = f"What does the {animal} eat in house {i}, part {part}?"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _write(folder, split, rows):
    path = Path(folder) / f"{split}-00000-of-00001.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path
