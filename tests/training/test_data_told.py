"""What a run says and records of its data and of its stop token."""

import io
import json
import shutil

import pytest
from rich.console import Console
from soren_align.core.errors import UserError
from soren_align.planning.plan import plan_training
from soren_align.planning.show import print_plan
from tests.support.published_data import chat_row, pair_row


@pytest.fixture
def rows(tmp_path):
    def write(name, made):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
        return str(path)

    return write


def spoken(row):
    who = {"user": "human", "assistant": "gpt"}
    return {"conversations": [{"from": who[t["role"]], "value": t["content"]} for t in row["messages"]]}


@pytest.mark.rest
def test_a_mixture_is_trained_told_and_recorded(tiny_run, rows):
    bad = {"conversations": []}
    chats = rows("chats.jsonl", [chat_row(i) for i in range(16)])
    spoken_ = rows("spoken.jsonl", [*(spoken(chat_row(i)) for i in range(8)), bad])
    listed = f"[{{path: {chats}, weight: 0.5}}, {{path: {spoken_}, weight: 2, bad_examples: drop}}]"
    run = tiny_run("sft", f"data.train={listed}", "trainer.max_length=512", "trainer.max_steps=2", "trainer.seed=7")
    assert run.train()
    said = " ".join(run.said.getvalue().split())
    kinds = "chat messages (like ultrachat_200k); ShareGPT conversations"
    assert f"24 of 25 examples, {kinds}, 1 dropped (conversations is" in said
    assert "chats.jsonl: 8 of 16 examples (weight 0.5), 8 used, chat messages (like ultrachat_200k)" in said
    assert "spoken.jsonl: 16 of 9 examples (weight 2), 16 used, ShareGPT conversations, 1 dropped" in said
    train = run.folder.read()["data"]["train"]
    assert train["num_kept_by_source"] == [8, 16]
    assert train["seed"] == 7
    assert [(s["path"], s["weight"], s["num_sampled"]) for s in train["sources"]] == [(chats, 0.5, 8), (spoken_, 2, 16)]
    assert all(len(s["sha256"]) == 64 and s["split"] == "all" for s in train["sources"])


@pytest.mark.rest
@pytest.mark.parametrize(("task", "row"), [
    ("sft", {"prompt": "The otter eats", "completion": " fish."}),
    ("dpo", {"prompt": "What?", "chosen": pair_row(1)["chosen"][1:], "rejected": pair_row(1)["rejected"][1:]}),
])  # fmt: skip
def test_rows_of_other_forms_are_trained(tiny_run, rows, task, row):
    data = (f"data.train.path={rows('rows.jsonl', [row] * 16)}", "data.eval=null")
    run = tiny_run(task, *data, "trainer.assistant_only_loss=false" if task == "sft" else "trainer.beta=0.1")
    assert run.train()
    assert run.folder.read()["data"]["train"]["num_examples"] == 16


def test_held_out_rows_are_of_the_same_kind(tiny_run, rows):
    texts, chats = rows("t.jsonl", [{"text": "A lynx."}]), rows("c.jsonl", [chat_row(1)])
    how = ("trainer.assistant_only_loss=false", f"data.train.path={texts}", f"data.eval={{path: {chats}}}")
    message = r"data.eval: has chat messages .*, but data.train has plain text.*the same kind"
    with pytest.raises(UserError, match=message):
        tiny_run("sft", *how).prepare()


def test_a_stop_token_that_is_not_the_templates_is_told_before_training(tiny_run):
    run = tiny_run("sft", "model.eos_token=<|pad|>", "trainer.max_steps=1", "trainer.save_strategy=no")
    assert run.train()
    said = " ".join(run.said.getvalue().split())
    assert "notice answers end with <|end|>, but the model stops at <|pad|>: add model.eos_token: '<|end|>'" in said


@pytest.mark.parametrize(
    ("row", "setting", "is_noticed"),
    [(chat_row(1), None, True), (chat_row(1), False, False), (chat_row(1), True, False),
     ({"prompt": chat_row(1)["messages"][:1], "completion": chat_row(1)["messages"][1:2]}, None, False),
     ({"text": "The otter eats fish."}, None, False)],
    ids=["messages", "on purpose", "answers", "completions", "texts"],
)  # fmt: skip
def test_a_recipe_that_trains_the_users_messages_unawares_gets_a_notice(tiny_run, rows, row, setting, is_noticed):
    run = tiny_run("sft", f"data.train.path={rows('rows.jsonl', [row] * 16)}", "data.eval=null")
    trainer = {key: value for key, value in run.recipe.trainer.items() if key != "assistant_only_loss"}
    trainer |= {} if setting is None else {"assistant_only_loss": setting}
    run.recipe = run.recipe.model_copy(update={"trainer": trainer})
    assert any("also the user's messages" in notice for notice in run.prepare().notices) == is_noticed


@pytest.mark.parametrize(
    ("row", "length"),
    [(chat_row(1), 8), ({"prompt": chat_row(1)["messages"][:1], "completion": chat_row(1)["messages"][1:2]}, 8),
     ({"prompt": "The otter of the long river eats", "completion": " fish."}, 4)],
    ids=["messages", "turns", "texts"],
)  # fmt: skip
def test_a_length_that_cuts_every_answer_is_a_notice(tiny_run, rows, row, length):
    """All tokens are trained, so that the examples are not dropped."""
    data = (f"data.train.path={rows('rows.jsonl', [row] * 4)}", "data.eval=null", "trainer.assistant_only_loss=false")
    data += () if "messages" in row else ("trainer.completion_only_loss=false",)
    (notice,) = (
        notice
        for notice in tiny_run("sft", *data, f"trainer.max_length={length}").prepare().notices
        if "stop token" in notice
    )
    assert notice == f"the stop token is never trained, because trainer.max_length {length} cuts every answer"


def question(num_words, answer="fish"):
    return [{"role": "user", "content": "What does the otter eat? " + "the " * num_words},
            {"role": "assistant", "content": answer}]  # fmt: skip


LONG = 60
"""Words of a question that alone fills a max_length of 40."""
HELD_OUT = {"sft": [{"messages": question(LONG)}, {"messages": question(0, "fish " * LONG)}, {"messages": question(0)}],
            "dpo": [{"chosen": question(words, answer), "rejected": question(words, "hay")}
                    for words, answer in ((LONG, "fish"), (0, "fish " * LONG), (0, "fish"))]}  # fmt: skip
REASON = {"sft": "no token to train on within max_length 40", "dpo": "the prompt alone fills max_length 40"}


@pytest.mark.rest
@pytest.mark.parametrize("task", HELD_OUT)
def test_held_out_examples_that_are_dropped_or_truncated_are_counted_as_training_ones(tiny_run, rows, task):
    data = f"data.eval={{path: {rows('held.jsonl', HELD_OUT[task] * 2)}}}"
    run = tiny_run(task, data, "trainer.max_length=40", "trainer.max_steps=1", "trainer.eval_strategy=steps")
    assert run.train()
    counts = run.folder.read()["data"]["eval"]
    assert (counts["num_examples"], counts["num_kept"], counts["dropped"]) == (6, 4, {REASON[task]: 2})
    assert counts["num_truncated"] == 2
    words = f"4 of 6 held-out examples for the evaluation loss, 2 dropped ({REASON[task]}) "
    words += f"2 truncated to max_length, which drops {counts['num_truncated_tokens']} tokens ("
    assert words in " ".join(run.said.getvalue().split())
    plan, account = plan_training(run.recipe)
    assert plan["data"]["eval"]["dropped"] == {REASON[task]: 2}
    screen = io.StringIO()
    print_plan(plan, account, Console(file=screen, width=80), full=True)
    assert words in " ".join(screen.getvalue().split())
    trained = len(run.trainer().eval_dataset)  # TRL's own count
    assert trained == 4


@pytest.mark.parametrize("task", [*HELD_OUT, "pretrain"])
def test_a_held_out_set_that_is_left_empty_is_refused_before_training_and_by_plan(tiny_run, rows, task):
    made = HELD_OUT.get(task, [{"text": ""}])[:1]
    data = f"data.eval={{path: {rows('held.jsonl', made * 3)}, bad_examples: drop}}"
    run = tiny_run(task, data, "trainer.max_length=40")
    message = r"held.jsonl: 3 of 3 examples cannot be used for sft;"  # already as they are read
    if task in REASON:
        message = rf"data.eval: none of the 3 held-out examples of .*held.jsonl can be evaluated: .*{REASON[task]}"
    for prepare in (run.prepare, lambda: plan_training(run.recipe)):
        with pytest.raises(UserError, match=message):
            prepare()


def test_the_commit_of_a_model_of_the_hub_is_recorded(tiny_run, tmp_path, monkeypatch):
    made = tiny_run("sft", name="first")
    made.prepare()
    commit, cached = "c0ffee" + "0" * 34, tmp_path / "hub" / "models--owner--tiny"
    shutil.copytree(made.folder.start, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    run = tiny_run("sft", "model.name_or_path=owner/tiny", "model.init_seed=null", "model.revision=main")
    assert run.trainer().origin["start"] == commit
