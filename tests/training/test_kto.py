"""KTO: TRL's loss and steps, equal on any number of ranks and after a resume, and what is wrong with labels."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from safetensors.torch import load_file
from soren_align.core.errors import UserError
from soren_align.core.shipped import ROOT
from soren_align.data.masks import Tokens
from soren_align.data.pairs import LabelCounter, auc, auc_error
from soren_align.recipe import load
from soren_align.run.record import describe_losses
from soren_align.training.setup import trl_arguments
from tests.support.tiny_run import TinyRun, flip_bit
from tests.support.trainer_jobs import LABELLED
from tests.support.trainer_parity import furthest, logged, ranks_do
from transformers import AutoModelForCausalLM

ROWS = [json.loads(line) for line in (ROOT / "recipes/quickstart/data/thumbs_train.jsonl").read_text().splitlines()]


@pytest.fixture
def run_of(tiny_run, tmp_path):
    """run_of(rows, *overrides) -> a run on these examples."""

    def make(rows, *overrides, name="run"):
        path = tmp_path / "thumbs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        where = (f"data.train.path={path}", "data.eval=null", "trainer.eval_on_start=false")
        return tiny_run("kto", *where, *overrides, name=name)

    return make


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("precomputed", ["false", "true"])
def test_on_the_same_examples_tokens_and_steps_are_plain_trls(run_of, tmp_path, loss, precomputed):
    run = run_of(
        ROWS[:40],
        *("trainer.per_device_train_batch_size=4", "trainer.max_steps=10", "trainer.save_strategy=no"),
        *("optimizer.name=adamw", "optimizer.weight_decay=0", f"trainer.loss_type={loss}"),
        *(f"trainer.precompute_ref_log_probs={precomputed}", "trainer.desirable_weight=1.5"),
    )
    setup = run.prepare()
    args = trl_arguments(run.recipe, tmp_path / "out", run.ranks)
    args.learning_rate, args.weight_decay = run.recipe.optimizer.lr, 0.0
    model = AutoModelForCausalLM.from_pretrained(setup.start, dtype=torch.float32)
    rows = Dataset.from_list([dict(row) for row in setup.splits.train.dataset])
    theirs = trl.KTOTrainer(model, None, args, train_dataset=rows, processing_class=setup.tokenizer)
    trainer = run.trainer()
    for ours, others in zip(trainer.train_dataset, theirs.train_dataset, strict=True):
        columns = ("prompt_ids", "completion_ids", "label", *["KL_completion_ids"] * (loss == "kto"))
        assert {name: ours[name] for name in columns} == {name: others[name] for name in columns}
    theirs.train()
    trainer.train()
    mine, plain = ([log for log in each.state.log_history if "loss" in log] for each in (trainer, theirs))
    assert len(mine) == 10
    for key in ("loss", "kl", "rewards/chosen", "rewards/rejected", "logps/chosen"):
        ours, others = ([log[key] for log in logs if key in log] for logs in (mine, plain))
        assert ours[0] == pytest.approx(others[0], rel=1e-6, abs=1e-7)
        # Both sum the norm of the gradients for clipping in an order of their own.
        assert ours == pytest.approx(others, rel=2e-5, abs=2e-5)


@pytest.fixture(scope="module")
def on_ranks(rank_pools, tmp_path_factory):
    """The folder of the runs alone, ddp-2, zero2-2, zero3-2, fsdp2-2 and ddp-3."""
    folder = tmp_path_factory.mktemp("kto")
    run = TinyRun(folder / "alone", "kto", *LABELLED, "trainer.per_device_train_batch_size=12")
    trainer = run.trainer()
    trainer.train()
    trainer.save_model(str(folder / "alone/model"))
    for number in (2, 3):
        ranks_do(rank_pools(number), "kto", folder)
    return folder


@pytest.mark.parametrize("name", ["ddp-2", "zero2-2", "zero3-2", "fsdp2-2", "precomputed-2", "ddp-3"])
def test_ranks_take_the_ten_steps_of_one_process(on_ranks, name):
    alone, found = (load_file(on_ranks / each / "model/model.safetensors") for each in ("alone", name))
    assert furthest(alone, found) <= 2e-6
    evaluations = [
        [json.loads(line) for line in (on_ranks / each / "metrics.jsonl").read_text().splitlines()]
        for each in ("alone", name)
    ]
    values = [
        next(line["eval_thumbs_accuracy"] for line in lines if "eval_thumbs_accuracy" in line) for lines in evaluations
    ]
    assert values[0] == pytest.approx(values[1], abs=0.01)


@pytest.mark.rest
@pytest.mark.parametrize("keys", [(), ("trainer.precompute_ref_log_probs=true",)])
def test_a_resumed_run_has_the_weights_and_losses_of_an_uninterrupted_one(resumed, keys):
    whole, run = resumed(3, "kto", *keys)
    assert logged(whole.folder) == logged(run.folder)


def test_log_probabilities_are_computed_once_and_a_damaged_file_again(tiny_run, monkeypatch, capsys):
    keys = ("trainer.precompute_ref_log_probs=true", "data.eval=null", "trainer.eval_on_start=false")
    first = tiny_run("kto", *keys, name="first").trainer().train_dataset
    with monkeypatch.context() as patch:
        patch.setattr(trl.KTOTrainer, "compute_ref_log_probs", None)  # it would be called
        second = tiny_run("kto", *keys, name="second").trainer().train_dataset
    names = ("ref_logps", "ref_KL_logps")
    values = [first[name][:] for name in names]
    assert [second[name][:] for name in names] == values
    files = [Path(entry["filename"]) for entry in second.cache_files]
    (file,) = (file for file in files if file.name.startswith("cache-") and file.with_suffix(".json").exists())
    flip_bit(file)
    third = tiny_run("kto", *keys, name="third").trainer().train_dataset
    assert "itismadeagain" in "".join(capsys.readouterr().err.split())  # a notice is wrapped
    assert [third[name][:] for name in names] == values


def test_the_accuracy_is_that_of_a_plain_computation_at_the_start_and_at_the_end(tiny_run):
    run = tiny_run("kto", "trainer.eval_strategy=steps", "trainer.eval_steps=6", "trainer.per_device_eval_batch_size=5")
    start_folder = run.prepare().start
    trainer = run.trainer()
    held_out = trainer.eval_dataset

    def plain(model):
        values = []
        for row in held_out:
            ids, start = torch.tensor([row["prompt_ids"] + row["completion_ids"]]), len(row["prompt_ids"])
            with torch.no_grad():
                logps = model(ids).logits.log_softmax(-1)[0, start - 1 : -1]
            values.append(float(logps.gather(1, ids[0, start:, None]).mean()))
        good = [value for value, label in zip(values, held_out["label"], strict=True) if label]
        bad = [value for value, label in zip(values, held_out["label"], strict=True) if not label]
        return np.mean([(a > b) + (a == b) / 2 for a in good for b in bad])

    # TRL's fused head is the model's own forward from here on
    start = plain(AutoModelForCausalLM.from_pretrained(start_folder))
    trainer.train()
    trainer.save_model(str(run.folder.model))
    end = plain(AutoModelForCausalLM.from_pretrained(run.folder.model))
    logs = [log["eval_thumbs_accuracy"] for log in trainer.state.log_history if "eval_thumbs_accuracy" in log]
    assert logs == pytest.approx([start, end], abs=1e-12)
    assert len(held_out) % 5  # the last batch is smaller
    assert start != end


def test_a_run_reports_the_thumbs_before_and_after(tiny_run):
    run = tiny_run("kto", "trainer.eval_strategy=steps", "trainer.eval_steps=6")
    assert run.train()
    thumbs = run.folder.record()["training"]["thumbs"]
    assert thumbs["num_good"] + thumbs["num_bad"] == len(run.prepare().tokens.eval) == 72
    assert thumbs["error"] == auc_error(thumbs["num_good"], thumbs["num_bad"])
    said = " ".join(run.said.getvalue().split())
    end = f"{thumbs['evaluations'][1]['accuracy']:.0%}"
    assert "of all comparisons, before training in " in said
    assert (
        f"good and {thumbs['num_bad']} bad held-out answers, a good one is likelier than a bad one in {end} of all"
        in said
    )


def test_auc_and_its_error_are_those_of_scipy():
    from scipy.stats import mannwhitneyu

    draw = np.random.default_rng(0)
    for m, n in ((1, 1), (7, 3), (40, 25)):
        values, labels = draw.integers(0, 9, m + n), np.arange(m + n) < m
        expected = mannwhitneyu(values[labels], values[~labels]).statistic / (m * n)
        assert auc(values.tolist(), labels.tolist()) == pytest.approx(expected, rel=1e-12)
        assert auc_error(m, n) == pytest.approx(np.sqrt((m + n + 1) / (12 * m * n)))
    assert auc([1.0, 2.0], [True, True]) == 0.5


def refused(run):
    with pytest.raises(UserError) as error:
        run.prepare()
    return str(error.value)


def test_labels_of_one_kind_or_of_none_are_one_sentence(run_of):
    text = refused(run_of([{**row, "label": True} for row in ROWS[:30]]))
    assert "all 30 labels are true, but KTO needs good and bad answers" in text
    text = refused(run_of([*ROWS[:30], {**ROWS[30], "label": "4 stars"}]))
    assert "1 of 31 examples cannot be used for kto" in text
    assert "thumbs.jsonl:31: label is '4 stars'; write true for a good answer, false for a bad one" in text
    text = refused(run_of([*ROWS[:30], {**ROWS[30], "label": None}]))
    assert "thumbs.jsonl:31: no 'label'" in text
    text = refused(run_of([{"prompt": row["prompt"], "completion": row["completion"]} for row in ROWS[:30]]))
    assert "but kto needs 'prompt', 'completion' and 'label', true for a good answer" in text


@pytest.mark.parametrize("words", [(1, 0), (1.0, -1), ("👍", "👎"), (" Thumbs Up", "down"), ("TRUE", "FALSE")])
def test_thumbs_are_read_as_people_write_them(run_of, words):
    rows = [{**row, "label": words[not row["label"]]} for row in ROWS[:30]]
    assert run_of(rows).prepare().splits.train.dataset["label"][:] == run_of(ROWS[:30], name="other").prepare(
    ).splits.train.dataset["label"][:]  # fmt: skip


SHAPES = {
    "turns": lambda row: {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["completion"]}],
    },
    "messages": lambda row: {
        "messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    },
    "sharegpt": lambda row: {
        "conversations": [{"from": "human", "value": row["prompt"]}, {"from": "gpt", "value": row["completion"]}]
    },
    "alpaca": lambda row: {"instruction": row["prompt"], "output": row["completion"]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_tokens(run_of, shape):
    rows = [{**SHAPES[shape](row), "label": row["label"]} for row in ROWS[:30]]
    plain, found = (run_of(each, name=name).prepare().tokens.train for each, name in ((ROWS[:30], "a"), (rows, "b")))
    for name in ("prompt_ids", "completion_ids", "label"):
        assert found[name][:] == plain[name][:]


def test_a_sorted_file_is_shuffled_once(run_of):
    rows = sorted(ROWS[:60], key=lambda row: row["label"])
    labels = run_of(rows).prepare().splits.train.dataset["label"][:]
    assert sorted(labels) == [row["label"] for row in rows]
    assert 5 < sum(labels[:30]) < 25


FAULTS = {
    "balance": (
        [row for i, row in enumerate(ROWS[:80]) if not row["label"] or i % 4 == 0],
        "to balance them, write trainer.desirable_weight: 2",
    ),
    "contradictory": (
        [*ROWS[:40], {**ROWS[3], "label": not ROWS[3]["label"]}],
        "2 of 41 answers contradict another example: prompt and answer are the same, but one is labelled good and "
        "one bad. All are trained on; the first one is example ",
    ),
    "copy": ([*ROWS[:40], ROWS[2]], "1 of 41 examples are copies of earlier ones, and are trained on more than once"),
    "longer": (
        [{**row, "completion": row["completion"] + " it is , it is" * row["label"]} for row in ROWS[:40]],
        "good answers are longer than bad ones, so that length alone predicts the label (AUC 1.00",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_one_notice(run_of, fault):
    rows, expected = FAULTS[fault]
    notices = run_of(rows, "data.train.apply_chat_template=true").prepare().notices
    assert [expected in notice for notice in notices].count(True) == 1
    clean = run_of(ROWS[:40], "data.train.apply_chat_template=true", name="clean").prepare().notices
    assert not [notice for notice in clean if "label" in notice or "copies" in notice or "contradict" in notice]


def test_the_proposed_weight_ends_the_notice(run_of):
    rows, _ = FAULTS["balance"]
    notices = run_of(rows, "trainer.desirable_weight=2").prepare().notices
    assert not [notice for notice in notices if "balance" in notice]


def test_numbers_equal_those_of_a_slow_count():
    draw, counter, rows = np.random.default_rng(1), LabelCounter(), []
    for index in range(200):
        ids, label = draw.integers(0, 3, draw.integers(2, 4)).tolist(), bool(draw.integers(0, 2))
        rows.append((tuple(ids), label))
        counter.add(index, Tokens(ids, [True] * len(ids)), label)
    stats = counter.stats()
    assert stats.num_copies == sum(row in rows[:i] for i, row in enumerate(rows))
    contradictory = [i for i, (ids, label) in enumerate(rows) if (ids, not label) in rows]
    assert (stats.num_contradictory, stats.first["contradictory"]) == (len(contradictory), contradictory[0])
    assert stats.num_good + stats.num_bad == 200
    pairs = [(len(a), len(b)) for a, good in rows if good for b, other in rows if not other]
    assert stats.length_auc == pytest.approx(np.mean([(a > b) + (a == b) / 2 for a, b in pairs]))


@pytest.mark.parametrize(("override", "text"), [
    ("trainer.train_sampling_strategy=group_by_length", "train_sampling_strategy: KTO estimates a divergence from"),
    ("trainer.per_device_train_batch_size=1", "per_device_train_batch_size: is 1, but KTO estimates a divergence"),
    ("data.streaming=true", "data.streaming: KTO estimates a divergence from the other answers of a batch"),
])  # fmt: skip
def test_what_takes_the_other_answers_of_a_batch_away_is_refused_early(override, text, tmp_path):
    where = ("model.name_or_path=org/model", "model.init_seed=null", "optimizer.aux_lr=1e-4")
    with pytest.raises(UserError) as error:
        load("quickstart/kto", [*where, override])
    assert text in str(error.value)
    if "streaming" not in override:  # which has no estimate of the divergence
        load("quickstart/kto", [*where, override, "trainer.loss_type=apo_zero_unpaired"])


@pytest.mark.parametrize("columns", ["{}", "{instruction: prompt, output: completion}"])
def test_sft_on_labelled_answers_warns_that_bad_ones_are_trained(tiny_run, tmp_path, columns):
    path = tmp_path / "thumbs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:30]))
    keys = (f"data.train={{path: {path}, columns: {columns}}}", "data.eval=null", "trainer.assistant_only_loss=false")
    notices = tiny_run("sft", *keys).prepare().notices
    assert [notice for notice in notices if "has thumbs, which sft does not read: bad answers are trained" in notice]


def test_held_out_answers_of_one_kind_have_no_accuracy(run_of, tmp_path):
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:30] if row["label"]))
    run = run_of(ROWS[30:60], f"data.eval={{path: {tmp_path / 'good.jsonl'}}}", "trainer.eval_strategy=steps",
                 "trainer.eval_steps=6")  # fmt: skip
    assert run.train()
    assert "thumbs" not in run.folder.record()["training"]


def test_a_start_that_knows_is_said_to_show_no_gain():
    thumbs = {"num_good": 9, "num_bad": 22, "error": 0.116,
              "evaluations": [{"step": 0, "accuracy": 1.0}, {"step": 9, "accuracy": 1.0}]}  # fmt: skip
    training = {"first_loss": None, "last_loss": None, "thumbs": thumbs}
    (text,) = describe_losses(training)
    assert text.endswith("(chance: 50%, two standard deviations 23%): the start preferred them already, so this cannot "
                         "show a gain")  # fmt: skip
    thumbs["evaluations"][0]["accuracy"] = 0.5
    assert "cannot show" not in describe_losses(training)[0]
