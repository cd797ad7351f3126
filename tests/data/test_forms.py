"""The forms that rows come in: each is known by its columns, and becomes what TRL takes."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from soren_align.core.errors import UserError
from soren_align.data import load_split
from tests.support.conversations import chat, refused, split

SPEAKERS = {"user": "human", "assistant": "gpt", "system": "system"}
CHAT = chat(3, turns=2, system=True)
ANSWERS = [{"role": "assistant", "content": "Hay."}, {"role": "assistant", "content": "No."}]
PROMPT = CHAT[:-1]


def answer(text):
    return {"role": "assistant", "content": text}


def spoken(turns):
    return [{"from": SPEAKERS[turn["role"]], "value": turn["content"]} for turn in turns]


PAIRED = {"chosen": [*PROMPT, ANSWERS[0]], "rejected": [*PROMPT, ANSWERS[1]]}
ASKED = {side: [{"role": "user", "content": "Why?"}, answer] for side, answer in zip(PAIRED, ANSWERS, strict=True)}
# form: (task, a row, what was recognised, what TRL is given of it)
FORMS = {
    "ShareGPT": ("sft", {"conversations": spoken(CHAT), "id": 1}, "ShareGPT conversations", {"messages": CHAT}),
    "ShareGPT, other words": (
        "sft", {"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Ho"}]},
        "ShareGPT conversations",
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}),
    "turns and completion": ("sft", {"prompt": PROMPT, "completion": CHAT[-1:], "source": "zoo"},
                             "prompts and completions as turns", {"prompt": PROMPT, "completion": CHAT[-1:]}),
    "prompt and completion": (
        "sft", {"prompt": "The lynx ", "completion": "sleeps."}, "plain prompts and completions, without a template",
        {"prompt": "The lynx ", "completion": "sleeps."}),
    "text": ("sft", {"text": "A lynx.", "url": "x"}, "plain text, without a template", {"text": "A lynx."}),
    "prompt as turns, answers as turns": (
        "dpo", {"prompt": PROMPT, "chosen": ANSWERS[:1], "rejected": ANSWERS[1:]},
        "prompts and pairs of answers as turns, joined to pairs", PAIRED),
    "prompt as turns, answers as texts": (
        "dpo", {"prompt": PROMPT, "chosen": "Hay.", "rejected": "No."},
        "prompts and pairs of answers as turns, joined to pairs", PAIRED),
    "prompt as text, answers as turns": (
        "dpo", {"prompt": "Why?", "chosen": ANSWERS[:1], "rejected": ANSWERS[1:]},
        "prompts and pairs of answers as turns, joined to pairs", ASKED),
    "three texts": ("dpo", {"prompt": "Why?", "chosen": "Hay.", "rejected": "No.", "score": 1.0},
                    "plain prompts and pairs of answers, as turns", ASKED),
    "ShareGPT preferences": (
        "dpo", {"conversations": spoken(PROMPT), "chosen": spoken(ANSWERS)[0], "rejected": spoken(ANSWERS)[1]},
        "ShareGPT preferences, joined to pairs", PAIRED),
    "ShareGPT preferences, as lists": (
        "dpo", {"conversations": spoken(PROMPT), "chosen": spoken(ANSWERS)[:1], "rejected": spoken(ANSWERS)[1:]},
        "ShareGPT preferences, joined to pairs", PAIRED),
}  # fmt: skip


HH = "\n\nHuman: Why?\n\nAssistant: Who knows?\n\nHuman: You: do\nyou?\n\nAssistant:"
HH_TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Who knows?"},
            {"role": "user", "content": "You: do\nyou?"}]  # fmt: skip
DIALOGUES = "dialogues as text, split into turns"
ALPACA = "Alpaca instructions and outputs, as turns"
FORMS |= {
    "Alpaca": ("sft", {"instruction": "Sum up.", "input": "A lynx sleeps.", "output": "Sleep.", "text": "Below is ..."},
               ALPACA,
               {"prompt": [{"role": "user", "content": "Sum up.\nA lynx sleeps."}], "completion": [answer("Sleep.")]}),
    "Alpaca without input": ("sft", {"instruction": "Speak.", "input": "", "output": "Meow."}, ALPACA,
                             {"prompt": [{"role": "user", "content": "Speak."}], "completion": [answer("Meow.")]}),
    "Alpaca preferences": (
        "dpo", {"instruction": "Speak", "input": "now", "chosen": "Hay.", "rejected": "No."},
        "Alpaca instructions and pairs of answers, as turns",
        {side: [{"role": "user", "content": "Speak\nnow"}, last] for side, last in zip(PAIRED, ANSWERS, strict=True)}),
    "hh-rlhf": ("dpo", {"chosen": f"{HH} Hay.", "rejected": f"{HH} No."},
                "pairs of dialogues as text, split into turns",
                {side: [*HH_TURNS, last] for side, last in zip(PAIRED, ANSWERS, strict=True)}),
    "hh-rlhf, one side": ("sft", {"text": f"{HH} Hay."}, DIALOGUES, {"messages": [*HH_TURNS, ANSWERS[0]]}),
    "messages with other roles": (
        "sft", {"messages": [{"role": "Human", "content": "Hi"}, {"role": "model", "content": "Ho"}]}, "chat messages",
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}),
    "contents in parts": (
        "sft",
        {"messages": [{"role": "user",
                       "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "for?"}]},
                      {"role": "assistant", "content": [{"type": "text", "text": "Hay."}]}]},
        "chat messages", {"messages": [{"role": "user", "content": "What for?"}, ANSWERS[0]]}),
    "messages with the same system twice": ("sft", {"system": "You keep a zoo.", "messages": CHAT}, "chat messages",
                                            {"messages": CHAT}),
    "Alpaca with a history": (
        "sft", {"instruction": "And now?", "output": "Meow.", "history": [["Speak.", "Purr."]], "system": "Be a lynx."},
        ALPACA,
        {"prompt": [{"role": "system", "content": "Be a lynx."}, {"role": "user", "content": "Speak."},
                    answer("Purr."), {"role": "user", "content": "And now?"}], "completion": [answer("Meow.")]}),
    "messages in ShareGPT's keys": ("sft", {"messages": spoken(CHAT)}, "chat messages", {"messages": CHAT}),
    "conversations in messages' keys": ("sft", {"conversations": CHAT}, "ShareGPT conversations", {"messages": CHAT}),
}  # fmt: skip
SYSTEM = {"role": "system", "content": "Be short."}
FORMS |= {
    f"{form}, with a system": (task, {**row, "system": SYSTEM["content"]}, words, {
        column: turns if column == "completion" else [SYSTEM, *turns] for column, turns in given.items()})
    for form, (task, row, words, given) in FORMS.items()
    if all(isinstance(turns, list) and turns[0]["role"] != "system" for turns in given.values())
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet", "the hub"])
def test_a_form_is_recognised_wherever_its_rows_are(tmp_path, monkeypatch, kind, form):
    task, row, words, given = FORMS[form]
    path = tmp_path / f"rows{kind}"
    if kind == "the hub":
        published = datasets.Dataset.from_list([row, row])
        monkeypatch.setattr("soren_align.data.hub.fetch", lambda *asked: (published, "c0ffee"))
        path = "owner/rows"
    elif kind == ".parquet":
        pq.write_table(pa.Table.from_pylist([row, row]), path)
    else:
        path.write_text(json.dumps([row, row]) if kind == ".json" else f"{json.dumps(row)}\n" * 2)
    loaded = load_split(split(path), task)
    assert loaded.layout == words
    assert list(loaded.dataset) == [given, given]
    beside = {"id", "source", "url", "score"} | ({"text"} if "instruction" in row else set())
    assert loaded.source["columns_dropped"] == list(beside & row.keys())


# own names: (task, a row, columns, roles, what TRL is given of it)
OWN_NAMES = {
    "a question's column": ("sft", {"question": "Why? ", "best": "So.", "messages": "of another kind", "id": 7},
                            {"prompt": "question", "completion": "best"}, {}, {"prompt": "Why? ", "completion": "So."}),
    "as turns": ("sft", {"question": "Why?", "best": "So."}, {"instruction": "question", "output": "best"}, {},
                 {"prompt": [{"role": "user", "content": "Why?"}], "completion": [answer("So.")]}),
    "swapped": ("dpo", {"prompt": "Why? ", "chosen": "bad", "rejected": "good"},
                {"prompt": "prompt", "chosen": "rejected", "rejected": "chosen"}, {},
                {side: [{"role": "user", "content": "Why? "}, answer(text)]
                 for side, text in (("chosen", "good"), ("rejected", "bad"))}),
    "keys of turns, and roles": (
        "sft", {"dialog": [{"who": "student", "says": "Hi"}, {"who": "gpt", "says": "Ho"}], "text": "x"},
        {"messages": "dialog", "role": "who", "content": "says"}, {"student": "user"},
        {"messages": [{"role": "user", "content": "Hi"}, answer("Ho")]}),
    "roles alone": (
        "sft", {"messages": [{"role": "gpt", "content": "Hi"}, {"role": "me", "content": "Ho"}]}, {},
        {"gpt": "user", "me": "assistant"}, {"messages": [{"role": "user", "content": "Hi"}, answer("Ho")]}),
}  # fmt: skip


@pytest.mark.parametrize("names", OWN_NAMES)
@pytest.mark.parametrize("kind", [".jsonl", "the hub"])
def test_own_names_are_read_as_the_recipe_says(write, monkeypatch, kind, names):
    task, row, columns, roles, given = OWN_NAMES[names]
    published = datasets.Dataset.from_list([row, row])
    monkeypatch.setattr("soren_align.data.hub.fetch", lambda *asked: (published, "c0ffee"))
    path = "owner/rows" if kind == "the hub" else write("rows.jsonl", [row, row])
    loaded = load_split(split(path, columns=columns, roles=roles), task)
    assert list(loaded.dataset) == [given, given]
    read = {name for ours, name in columns.items() if ours not in ("role", "content")} or {"messages"}
    assert set(loaded.source["columns_dropped"]) == row.keys() - read
    names = {"columns": columns, "roles": roles}
    assert {key: loaded.source.get(key, {}) for key in names} == names


@pytest.mark.parametrize(("task", "row", "columns", "unread"), [
    ("sft", {"q": "Why?", "a": "So.", "s": "Be short."}, {"prompt": "q", "completion": "a", "system": "s"}, "system"),
    ("sft", {"q": "Why?"}, {"text": "q", "role": "who"}, "role"),
    ("dpo", PAIRED | {"h": [["Hi", "Ho"]]}, {"chosen": "chosen", "rejected": "rejected", "history": "h"}, "history"),
])  # fmt: skip
def test_a_listed_column_is_read_or_refused(write, task, row, columns, unread):
    with pytest.raises(UserError, match=f"columns lists {unread}, which is not read, because the format is "):
        load_split(split(write("rows.jsonl", [row]), columns=columns), task)


def test_text_that_no_token_has_is_told_unless_columns_are_listed(write):
    pair = FORMS["three texts"][1] | {"critique": "Too short.", "history": [["Hi", "Ho"]], "id": "x-1"}
    (notice,) = load_split(split(write("rows.jsonl", [pair])), "dpo").notices
    assert "the model does not see the columns critique, history. To train on them, map them in `columns`" in notice
    assert notice.endswith("columns: {prompt: prompt, chosen: chosen, rejected: rejected}")
    names = {name: name for name in ("prompt", "chosen", "rejected")}
    assert load_split(split(write("rows.jsonl", [pair]), columns=names), "dpo").notices == ()


def test_only_some_rows_or_files_need_have_a_column(write, tmp_path):
    (_, *row, given), (_, *other, also) = (FORMS[f"ShareGPT, other words{more}"] for more in ("", ", with a system"))
    rows = [row[0], other[0]]
    for number, row in enumerate(rows):
        write(f"{number}.jsonl", [row])
    both = [load_split(split(path), "sft").dataset for path in (write("rows.jsonl", rows), f"{tmp_path}/?.jsonl")]
    assert [list(dataset) for dataset in both] == [[given, also]] * 2
    late = refused(split(write("rows.jsonl", [*rows[:1] * 60, rows[1]])))
    assert ":61: has the key system, which none of the first examples has" in late


def test_other_names_are_another_dataset(write):
    path = write("rows.jsonl", [{"a": "one", "b": "two"}])
    first = load_split(split(path, columns={"text": "a"}), "sft")
    second = load_split(split(path, columns={"text": "b"}), "sft")
    assert (first.dataset[0], second.dataset[0]) == ({"text": "one"}, {"text": "two"})


def test_a_column_that_is_not_there_is_named_with_those_there_are(write):
    path = write("rows.jsonl", [{"question": "Why?"}, {"question": "x", "best": "So."}])
    found = split(path, columns={"prompt": "question", "completion": "best"}, bad_examples="drop")
    assert load_split(found, "sft").dropped == {"no 'completion'": 1}  # it need not be in the first row
    message = r"columns.prompt is 'questions', but the data have the columns question, best; did you"
    with pytest.raises(UserError, match=message):
        load_split(split(path, columns={"prompt": "questions", "completion": "best"}), "sft")


def test_dropped_rows_of_different_turns_are_counted_together_and_of_one_turn_named(write):
    def chosen(number):
        turns = [*chat(1, turns=number), {"role": "assistant", "content": "again"}]
        return {"chosen": turns, "rejected": turns}

    good = {"chosen": [*PROMPT, ANSWERS[0]], "rejected": [*PROMPT, ANSWERS[1]]}
    of_one = load_split(split(write("a.jsonl", [chosen(2), good, chosen(2)]), bad_examples="drop"), "dpo")
    reason = "{} and {} are both assistant turns; user and assistant turns must alternate"
    assert of_one.dropped == {reason.format("chosen[3]", "chosen[4]"): 2}
    of_two = load_split(split(write("b.jsonl", [chosen(1), good, chosen(2)]), bad_examples="drop"), "dpo")
    assert of_two.dropped == {reason.format("chosen[i]", "chosen[i+1]"): 2}


PARTS = [{"type": "text", "text": "What is "}, {"type": "image", "image": "a.png"}]
BAD = [
    ("contents in parts", {"messages": [{"role": "user", "content": PARTS}, ANSWERS[0]]},
     r"messages\[0\] has a part of type 'image' in its content, but only text is trained"),
    ("contents in parts", {"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}, ANSWERS[0]]},
     r"messages\[0\] has empty content \(role user\)"),
    ("contents in parts", {"messages": [{"role": "user", "content": [{"type": "text"}]}, ANSWERS[0]]},
     r"messages\[0\] has a list as content; write text"),
    ("Alpaca", {"instruction": " ", "input": "x", "output": "y"}, "instruction is empty"),
    ("Alpaca", {"instruction": "x", "input": 3, "output": "y"}, "input is a number, not text"),
    ("Alpaca", {"instruction": "x", "input": None, "output": ""}, "output is empty"),
    ("Alpaca with a history", {"instruction": "x", "history": ["Hi"], "output": "y"}, "history is no list of .quest"),
    ("messages with the same system twice", {"messages": CHAT, "system": 3}, "system is a number, not text"),
    ("messages with the same system twice", {"messages": CHAT, "system": "x"}, "the column system has another text"),
    ("ShareGPT", {"conversations": spoken(CHAT), "images": ["a.png"]}, "has images, but only text is trained"),
    ("hh-rlhf", {"chosen": "Hay.", "rejected": f"{HH} No."}, "chosen does not start with 'Human:'"),
    ("hh-rlhf", {"chosen": f"{HH} ", "rejected": f"{HH} No."}, r"chosen\[3\] has empty content"),
    ("hh-rlhf", {"chosen": f"{HH} x\n\nAssistant: y", "rejected": HH}, r"chosen\[3\] and chosen\[4\] are both assi"),
    ("ShareGPT", {"conversations": [{"from": "narrator", "value": "x"}]},
     r"conversations\[0\] has the role 'narrator'; write system, user, assistant or tool, or list this role"),
    ("ShareGPT", {"conversations": [{"value": "x"}]}, r"conversations\[0\] has no role \(or from\); write sys"),
    ("ShareGPT", {"conversations": ["x"]},
     r"conversations\[0\] is text, not an object with role and content \(or from "),
    ("ShareGPT", {"conversations": []}, "conversations is an empty list"),
    ("ShareGPT", {"conversations": "x"}, "conversations is text, not a list of {role, content} turns"),
    ("ShareGPT", {"conversations": spoken(CHAT[:-1])}, "conversations ends with a user turn"),
    ("ShareGPT", {"conversations": [{"from": "gpt", "value": None}]}, r"conversations\[0\] has no content"),
    ("ShareGPT", {"conversations": [{"from": "gpt", "value": "x", "score": 0}]}, "has score beside role and content"),
    ("turns and completion", {"prompt": PROMPT, "completion": "x"}, "completion is text, not a list"),
    ("turns and completion", {"prompt": PROMPT, "completion": PROMPT[-1:]}, r"completion\[\d\] are both user turns"),
    ("prompt and completion", {"prompt": "x", "completion": " "}, "completion is empty"),
    ("prompt and completion", {"prompt": ["x"], "completion": "y"}, "prompt is a list, not text"),
    ("text", {"text": None}, "no 'text'"),
    ("text", '{"text": "\\ud800"}', "text has half of a surrogate pair"),
    ("three texts", {"prompt": "x", "chosen": "y", "rejected": "y"}, "chosen and rejected are equal"),
    ("three texts", {"prompt": "x", "chosen": "y"}, "no 'rejected'"),
    ("prompt as text, answers as turns", {"prompt": " ", **ASKED}, r"prompt \+ chosen\[0\] has empty content"),
    ("prompt as turns, answers as turns", {"prompt": PROMPT, "chosen": [], "rejected": []}, "chosen is an empty list"),
    ("ShareGPT preferences", {"conversations": spoken(PROMPT), "chosen": "x"}, "chosen is text, not a list"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "row", "reason"), BAD)
def test_a_bad_row_of_any_form_is_named(write, form, row, reason):
    task, good, *_ = FORMS[form]
    path = write("rows.jsonl", [good, row, good])
    with pytest.raises(UserError, match=f"1 of 3 examples cannot be used .*\n.*rows.jsonl:2: .*{reason}"):
        load_split(split(path), task)
    loaded = load_split(split(path, bad_examples="drop"), task)
    assert (len(loaded.dataset), sum(loaded.dropped.values())) == (2, 1)


def test_an_empty_first_row_does_not_decide_the_form(write):
    rows = [{"prompt": None, "completion": None}, *({"prompt": PROMPT, "completion": CHAT[-1:]} for _ in range(2))]
    loaded = load_split(split(write("rows.jsonl", rows), bad_examples="drop"), "sft")
    assert loaded.dropped == {"no 'prompt'": 1}
    assert loaded.dataset[0] == {"prompt": PROMPT, "completion": CHAT[-1:]}


def test_two_texts_without_a_prompt_are_no_pair(write):
    pair = split(write("rows.jsonl", [{"chosen": "x", "rejected": "y"}]))
    assert "chosen is text, not a list" in refused(pair, "dpo")


def test_columns_that_leave_one_out_are_reported_as_that(write):
    path = write("rows.jsonl", [{"question": "Why?", "answer": "So."}])
    message = r"`columns` lists instruction, so that no other columns \(answer\) are read, but sft needs"
    with pytest.raises(UserError, match=message):
        load_split(split(path, columns={"instruction": "question"}), "sft")
