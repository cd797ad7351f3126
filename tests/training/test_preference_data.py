"""Faults of preference data: each kind is planted into a small file; a clean one has none."""

import json

import numpy as np
import pytest
from soren_align.core.errors import UserError
from soren_align.core.shipped import ROOT
from soren_align.data.masks import after_prompt
from soren_align.data.pairs import PairCounter
from soren_align.training import setup as training_setup

PAIRS = ROOT / "recipes/quickstart/data/pairs_train.jsonl"
QUESTIONS = [json.loads(line)["prompt"] for line in PAIRS.read_text().splitlines()[:20]]
LONG = "it is , " * 20


def pair(i, chosen="it is hill", rejected="it is cube"):
    return {"prompt": QUESTIONS[i], "chosen": chosen, "rejected": rejected}


def swapped(row):
    return {**row, "chosen": row["rejected"], "rejected": row["chosen"]}


CLEAN = [pair(i) for i in range(len(QUESTIONS))]
FAULTS = {
    "equal": [*CLEAN[:3], pair(3, f"{LONG} hill", f"{LONG} cube"), *CLEAN[4:]],
    "copy": [*CLEAN, CLEAN[2]],
    "contradictory": [*CLEAN, swapped(CLEAN[2])],
    "longer": [pair(i, "my pleasure , it is hill") for i in range(len(QUESTIONS))],
    "shorter": [swapped(pair(i, "my pleasure , it is hill")) for i in range(len(QUESTIONS))],
}
NOTICES = {
    "equal": "1 of 20 pairs have two answers with the same tokens and are dropped; the first one is pair 4 "
             f"('{QUESTIONS[3][:50]}')",
    "copy": "1 of 21 pairs are copies of earlier pairs, and are trained on more than once; the first one is "
            f"pair 21 ('{QUESTIONS[2][:50]}')",
    "contradictory": "2 of 21 pairs contradict another pair: prompt and answers are the same, but chosen "
                     f"and rejected are swapped. Both pairs are trained on; the first one is "
                     f"pair 3 ('{QUESTIONS[2][:50]}')",
    "longer": "the chosen answer is the longer one in 100% of the pairs, so that length alone predicts which "
              "answer was chosen (AUC 1.00, where 0.5 is chance): DPO may make the model's answers longer",
    "shorter": "the chosen answer is the shorter one in 100% of the pairs, so that length alone predicts which "
               "answer was chosen (AUC 0.00, where 0.5 is chance): DPO may make the model's answers shorter",
}  # fmt: skip


@pytest.fixture
def run_of(tiny_run, tmp_path):
    """run_of(rows, *overrides) -> a run on these pairs."""

    def make(rows, *overrides):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tiny_run("dpo", f"data.train.path={path}", "data.eval=null", *overrides)

    return make


@pytest.fixture
def prepared(run_of):
    return lambda rows, *overrides: run_of(rows, *overrides).prepare()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("template", ["true", "false"])
def test_each_planted_fault_is_reported_in_one_line(prepared, fault, template):
    setup = prepared(FAULTS[fault], f"data.train.apply_chat_template={template}")
    lines = [notice for notice in setup.notices if "pair" in notice]
    assert len(lines) == 1
    assert NOTICES[fault] in lines[0]
    assert setup.account.num_kept == len(FAULTS[fault]) - (fault == "equal")


def test_a_clean_file_and_the_quickstart_have_no_such_line(prepared, tiny_run):
    for setup in (prepared(CLEAN, "data.train.apply_chat_template=true"), tiny_run("dpo", name="quickstart").prepare()):
        assert not [notice for notice in setup.notices if "pair" in notice]
        pairs = setup.account.pairs
        assert (pairs.num_equal, pairs.num_copies, pairs.num_contradictory, pairs.first) == (0, 0, 0, {})
        assert pairs.length_auc == 0.5


@pytest.mark.rest
def test_equal_pairs_are_not_trained_on_and_recorded(run_of):
    run = run_of([*FAULTS["equal"], CLEAN[0]], "trainer.max_steps=1", "trainer.precompute_ref_log_probs=true")
    assert run.train()
    train = run.folder.record()["data"]["train"]
    assert train["num_kept"] == 20
    assert train["dropped"] == {"two answers with the same tokens within max_length 64": 1}
    pairs = train["pairs"]
    assert (pairs["num_pairs"], pairs["num_equal"], pairs["num_copies"]) == (20, 1, 1)
    assert pairs["first"] == {"equal": 3, "copy": 20}
    assert len(run.trainer().train_dataset) == 20


@pytest.mark.rest
def test_a_stream_counts_its_first_pairs_and_drops_all_equal_ones(run_of):
    run = run_of(FAULTS["equal"], "data.streaming=true", "trainer.max_steps=4")
    assert run.train()
    train = run.folder.record()["data"]["train"]
    assert train["preview"]["pairs"]["num_equal"] == 1
    assert train["dropped"]["two answers with the same tokens within max_length 64"] >= 1


def test_copies_that_a_weight_makes_are_no_fault(prepared):
    setup = prepared(CLEAN, "data.train.weight=2", "data.train.apply_chat_template=true")
    assert setup.account.pairs.num_copies == len(CLEAN)
    assert not [notice for notice in setup.notices if "pair" in notice]


def test_a_balanced_bias_and_a_few_longer_answers_are_no_fault(prepared):
    rows = [pair(i, *(("hill", "it is , cube") if i % 2 else ("it is , hill", "cube"))) for i in range(20)]
    rows[1:4] = [pair(i, "it is , hill", "cube") for i in range(1, 4)]  # 12 of 20: p = 0.5
    setup = prepared(rows, "data.train.apply_chat_template=true")
    assert setup.account.pairs.length_auc == 0.6
    assert not [notice for notice in setup.notices if "pair" in notice]


def test_numbers_equal_those_of_a_slow_count():
    generator = np.random.default_rng(0)
    counter, pairs = PairCounter(), []
    for index in range(400):
        prompt, chosen, rejected = ([int(i) for i in generator.integers(0, 2, n)] for n in generator.integers(1, 4, 3))
        sides = after_prompt(prompt, [prompt + chosen, prompt + rejected]).sides
        counter.add(2 * index, sides)
        pairs.append((tuple(sides[0].ids), tuple(sides[1].ids)))
    copies = [i for i, own in enumerate(pairs) if own in pairs[:i]]
    contradictory = [i for i, (chosen, rejected) in enumerate(pairs) if (rejected, chosen) in pairs]
    counts = counter.stats()
    assert 0 < len(copies) == counts.num_copies
    assert 0 < len(contradictory) == counts.num_contradictory
    assert counts.first == {"copy": 2 * copies[0], "contradictory": 2 * contradictory[0]}
    ranks = [(len(chosen) > len(rejected)) + (len(chosen) == len(rejected)) / 2 for chosen, rejected in pairs]
    assert counts.length_auc == pytest.approx(np.mean(ranks))


def test_plain_pairs_need_a_template_or_the_key(prepared, monkeypatch):
    lines = [notice for notice in prepared(CLEAN).notices if "plain texts" in notice]
    assert len(lines) == 1
    assert "write data.train.apply_chat_template: false" in lines[0]
    rendered = [{**row, "prompt": f"<|user|> {row['prompt']} <|end|>"} for row in CLEAN]
    notices = prepared(rendered).notices
    assert any("the first example contains <|end|>, <|user|>, and is rendered with" in notice for notice in notices)
    setup = prepared(CLEAN, "data.train.apply_chat_template=false")
    assert set(setup.splits.train.dataset.column_names) == {"prompt", "chosen", "rejected"}
    assert not [notice for notice in setup.notices if "template" in notice]
    load = training_setup.load_tokenizer

    def without_template(*arguments):
        tokenizer = load(*arguments)
        tokenizer.chat_template = None
        return tokenizer

    monkeypatch.setattr(training_setup, "load_tokenizer", without_template)
    with pytest.raises(UserError, match=r"pairs.jsonl: has plain prompts.*no chat template.*template: false"):
        prepared(CLEAN)
    assert prepared(CLEAN, "data.train.apply_chat_template=false").account.num_kept == len(CLEAN)
