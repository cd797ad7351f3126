"""The invented datasets are as odd as the real ones, and the tiny model reads them."""

import filecmp
import json

import datasets
import torch
from tests.support.benchmark_data import NUM_TRAIN, subjects, texts, write_datasets
from tests.support.lm_eval_reference import DATASETS, plain
from tests.support.tiny_models import make_reader, nudge
from transformers import AutoModelForCausalLM, AutoTokenizer


def rows(root, task, config, split):
    cache = str(root.with_name("rows"))
    return datasets.load_dataset(str(root / DATASETS[task]), config, split=split, cache_dir=cache).to_list()


def test_equal_arguments_write_equal_files_and_another_seed_other_rows(data_root, tmp_path):
    again, other = write_datasets(tmp_path / "again"), write_datasets(tmp_path / "other", seed=1)
    names = [str(file.relative_to(data_root)) for file in data_root.rglob("*") if file.is_file()]
    assert filecmp.cmpfiles(data_root, again, names, shallow=False) == (names, [], [])
    assert not set(texts(data_root)) & set(texts(other))


def test_no_two_rows_are_equal(data_root):
    found = list(texts(data_root))
    assert len(found) == len(set(found)) > 800


def test_mmlu_has_57_subjects_of_uneven_size_with_class_labels(data_root):
    assert len(subjects()) == 57
    cache = str(data_root.with_name("rows"))
    data = datasets.load_dataset(str(data_root / DATASETS["mmlu"]), "anatomy", cache_dir=cache)
    assert {split: len(data[split]) for split in data} == {"test": 4, "validation": 2, "dev": 5}
    assert data["test"].features["answer"].names == [*"ABCD"]
    assert set(data["test"]["subject"]) == {"anatomy"}


def test_the_oddities_of_the_real_ones_are_there(data_root):
    arc = rows(data_root, "arc_challenge", "ARC-Challenge", "train")
    assert len(arc) == NUM_TRAIN
    assert {len(row["choices"]["text"]) for row in arc} == {3, 4, 5}
    assert {row["choices"]["label"][0] for row in arc} == {"A", "1"}
    truths = rows(data_root, "truthfulqa_mc2", "multiple_choice", "validation")
    assert len({tuple(row["mc2_targets"]["labels"]) for row in truths}) > 1
    assert [row["label"] for row in rows(data_root, "hellaswag", None, "test")] == [""]
    assert [row["answer"] for row in rows(data_root, "winogrande", "winogrande_xl", "test")] == [""]
    assert [row["label"] for row in rows(data_root, "piqa", None, "test")] == [-1]


def test_datasets_confuses_two_roots_in_one_cache(tmp_path):
    """Why plain.load gives each root a cache of its own. When this fails, datasets has been repaired."""
    first, second = (write_datasets(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    name, cache = DATASETS["winogrande"], tmp_path / "cache"
    shared = [
        datasets.load_dataset(str(root / name), "winogrande_xl", split="validation", cache_dir=str(cache)).to_list()
        for root in (first, second)
    ]
    assert shared[0] == shared[1]
    apart = rows(second, "winogrande", "winogrande_xl", "validation")
    assert apart != shared[1]
    written = (second / name / "winogrande_xl" / "validation.jsonl").read_text().splitlines()
    assert apart == [json.loads(line) for line in written]


def test_the_reader_reads_any_text_and_25_shots_fit(reader, data_root):
    tokenizer = AutoTokenizer.from_pretrained(reader)
    text = "Ω → 40 °C\n\tnaïve 🙂  ####<<3*4=12>>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    found = plain(reader, {"arc_challenge": 25}, data_root, limit=2)
    prompt = found["samples"]["arc_challenge"][0]["arguments"][0][0]
    assert 500 < len(tokenizer(prompt)["input_ids"]) < 2048


def test_a_seed_is_a_model_and_a_nudge_its_neighbour(reader, tmp_path):
    def weights(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()

    again, other = make_reader(tmp_path / "again"), make_reader(tmp_path / "other", seed=1)
    near, near_again = (nudge(reader, tmp_path / name, scale=0.01) for name in ("near", "near_again"))
    assert filecmp.cmpfiles(reader, again, ["model.safetensors", "tokenizer.json"], shallow=False)[1:] == ([], [])
    assert filecmp.cmp(near / "model.safetensors", near_again / "model.safetensors", shallow=False)
    first = weights(reader)
    for folder, least, most in ((near, 0.005, 0.02), (other, 0.5, 2)):
        name = "model.embed_tokens.weight"
        moved = weights(folder)[name] - first[name]
        assert least < moved.norm() / first[name].norm() < most


def test_a_chat_template_is_there_where_asked_for(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_reader(tmp_path / "chat", chat_template=True))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert AutoTokenizer.from_pretrained(make_reader(tmp_path / "base")).chat_template is None
