"""Tools, tool calls, results and reasoning: every form of them is one, and a template that drops them is noticed."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trl
from datasets import Dataset
from soren_align.core.errors import UserError
from soren_align.data import check_template, dataset_stats, load_split, mix, tokenize, without_empty_answers
from soren_align.data.encode import encode
from soren_align.data.turns import EMPTY_ANSWER
from tests.support.conversations import chat, refused, split

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
ARGUMENTS = {"city": "Zürich", "days": 3, "exact": 0.12345678901234567, "large": 2**70, "none": None}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"name": "get_weather", "arguments": ARGUMENTS}
USER, LAST = {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "21 degrees."}
RESULT = {"role": "tool", "content": '{"degrees": 21}'}
CANONICAL = [
    USER,
    {"role": "assistant", "content": "",
     "tool_calls": [
         {"type": "function", "function": {**CALL, "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)}}]},
    RESULT,
    LAST,
]  # fmt: skip
SPOKEN = [("human", "Weather?"), ("function_call", json.dumps(CALL)), ("observation", RESULT["content"])]
FORMS = {
    "OpenAI": {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": CANONICAL[1]["tool_calls"]},
                            RESULT, LAST],
               "tools": TOOLS},
    "arguments as objects": {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"function": CALL}]}, RESULT, LAST],
        "tools": json.dumps(TOOLS)},
    "calls without `function`": {
        "messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, LAST], "tools": TOOLS},
    "OpenAI's first form": {
        "messages": [
            USER, {"role": "assistant", "content": None, "function_call": {**CALL, "arguments": json.dumps(ARGUMENTS)}},
            {**RESULT, "role": "function"}, LAST],
        "functions": [FUNCTION]},
    "LLaMA-Factory": {
        "conversations": [{"from": who, "value": text} for who, text in [*SPOKEN, ("gpt", LAST["content"])]],
        "tools": json.dumps([FUNCTION])},
}  # fmt: skip


@pytest.fixture
def qwen(make_tokenizer):
    """make(name) -> the test tokenizer with one of TRL's copies of published templates."""
    return lambda name="qwen2_5": make_tokenizer((TEMPLATES / f"{name}.jinja").read_text())


@pytest.fixture
def loaded(write):
    """loaded(rows, task) -> the dataset of these rows."""
    return lambda rows, task="sft": load_split(split(write("rows.jsonl", rows)), task).dataset


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_example_with_the_same_tokens(loaded, qwen, form):
    dataset = loaded([FORMS[form], {"messages": chat(1)}][: 1 + ("messages" in FORMS[form])])
    assert dataset[0]["messages"] == CANONICAL
    assert json.loads(dataset[0]["tools"]) == TOOLS
    marked = check_template(qwen("qwen2_5_training"), "sft", True, dataset)
    assert check_template(qwen(), "sft", True, dataset) == marked == []
    example, *others = encode(dataset[:], "sft", qwen(), True)
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}, RESULT,
             LAST]  # fmt: skip
    assert example.sides[0].ids == qwen().apply_chat_template(turns, tools=TOOLS)["input_ids"]
    assert example.left_out == ()
    for other in others:
        assert other.sides[0].ids == qwen().apply_chat_template(chat(1))["input_ids"]
    trained = qwen().decode([i for i, is_trained in zip(*example.sides[0], strict=True) if is_trained])
    call = json.dumps(CALL, ensure_ascii=False)
    assert trained == f"<tool_call>\n{call}\n</tool_call><|im_end|>21 degrees.<|im_end|>"


CALLS = FORMS["OpenAI"]["messages"]


def test_keys_that_arrow_filled_with_null_are_absent(write, tmp_path, monkeypatch):
    def row(name, **arguments):
        call, schema = {"name": name, "arguments": arguments}, {key: {"type": "string"} for key in arguments}
        tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schema}}}
        turns = [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}, RESULT, LAST]
        return {"messages": turns, "tools": [tool], "chat_template_kwargs": {f"of_{name}": True}}

    rows = [row("weather", city="Bern"), row("convert", unit="m", size={"depth": 1.5})]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    published = Dataset.from_list(rows)
    monkeypatch.setattr("soren_align.data.hub.fetch", lambda *asked: (published, "c0ffee"))
    paths = (write("rows.jsonl", rows), tmp_path / "rows.parquet", "owner/rows")
    lines, *others = (list(load_split(split(path), "sft").dataset) for path in paths)
    assert others == [lines, lines]
    assert "null" not in json.dumps(lines)


INVALID = {
    "messages[1] has a call of 'get_weather' whose arguments are no JSON object":
        [USER, {"role": "assistant", "tool_calls": [{**CALL, "arguments": "{"}]}],
    "messages[1] has a tool call without a name":
        [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
    "messages[1] has a tool call that is no object with name and arguments":
        [USER, {"role": "assistant", "tool_calls": ["f()"]}],
    "messages[1] has tool_calls that are not a list":
        [USER, {"role": "assistant", "content": "x", "tool_calls": "f()"}],
    "messages[0] has tool_calls beside role and content (role user)": [{**CALLS[1], "role": "user"}, LAST],
    "messages[1] has a reasoning_content that is not text": [USER, {**LAST, "reasoning_content": ["x"]}],
    "messages[2] has the tool_call_id 'b', which the assistant turn before does not have":
        [USER, {"role": "assistant", "tool_calls": [{**CALL, "id": "a"}]}, {**RESULT, "tool_call_id": "b"}, LAST],
    "messages[1] is a tool turn after a user turn": [USER, RESULT, LAST],
    "messages[3] is a user turn after a tool turn": [*CALLS[:3], USER, LAST],
    "messages starts with a tool": [RESULT, LAST],
    "messages ends with a tool turn": CALLS[:3],
    "messages[1] has the weight 2; write 0 (not trained) or 1": [USER, {**LAST, "weight": 2}],
    "messages[0] has weight 1, or train: true, with the role user": [{**USER, "train": True}, LAST],
    "messages has weight 0 for every assistant turn": [USER, {**LAST, "train": False}],
    "messages[1] has half of a surrogate pair": '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", '
    '"content": "y", "thinking": "\\ud800"}]}',
}  # fmt: skip


@pytest.mark.parametrize("reason", INVALID)
def test_an_invalid_turn_is_named_with_its_line_and_number(write, reason):
    row = INVALID[reason] if isinstance(INVALID[reason], str) else {"messages": INVALID[reason]}
    assert f"rows.jsonl:2: {reason}" in refused(split(write("rows.jsonl", [{"messages": chat(1)}, row])))


@pytest.mark.parametrize(("columns", "reason"), [
    ({"tools": "no JSON"}, "tools is no list of functions"),
    ({"tools": [{"name": None}]}, "tools is no list of functions"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs is no object"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs has chat_template, which"),
])  # fmt: skip
def test_invalid_tools_and_options_are_named(write, columns, reason):
    assert f"rows.jsonl:1: {reason}" in refused(split(write("rows.jsonl", [{"messages": chat(1), **columns}])))


def test_weights_as_openai_and_axolotl_write_them(loaded, write):
    user, answer, *others = chat(1, turns=2)
    rows = [[user, answer | weight, *others] for weight in ({"weight": 0}, {"weight": 0.0}, {"train": False})]
    dataset = loaded([{"messages": row} for row in rows])
    assert [row["messages"][1]["weight"] for row in dataset] == [0, 0, 0]
    path = write("rows.jsonl", [{"messages": [user, answer | {"learn": 0}, *others]}])
    mapped = split(path, columns={"messages": "messages", "weight": "learn"})
    assert load_split(mapped, "sft").dataset[0]["messages"] == dataset[0]["messages"]
    pair = {"chosen": rows[0], "rejected": [*rows[0][:-1], {"role": "assistant", "content": "No."}]}
    message = r"chosen\[1\] has a weight, but only the last turns of a preference pair are trained"
    with pytest.raises(UserError, match=message):
        load_split(split(write("pairs.jsonl", [pair])), "dpo")


REASONED = [USER, {**LAST, "reasoning_content": "The sun is high."}]


@pytest.mark.parametrize(("template", "turns", "tools", "left_out"), [
    ("qwen2_5", CALLS, TOOLS, {}),
    ("qwen3", REASONED, None, {}),
    ("qwen2_5", REASONED, None, {"reasoning": 2}),
    ("qwen3", [*REASONED, USER, LAST], None, {"the reasoning of earlier answers": 2}),
    ("lfm2", CALLS, TOOLS, {"tool calls": 2, EMPTY_ANSWER: 2}),  # though the list of tools has its name
    ("deepseek_r1_distill", CALLS, TOOLS, {"tools": 2, "tool calls": 2, EMPTY_ANSWER: 2}),
])  # fmt: skip
def test_parts_that_the_template_ignores_are_counted(qwen, loaded, template, turns, tools, left_out):
    dataset = loaded([{"messages": turns, "tools": tools}] * 2 + [{"messages": chat(1)}])
    counted = dataset_stats(dataset, "sft", qwen(template), max_length=None)
    assert counted.num_left_out == left_out


@pytest.mark.parametrize(("turns", "template", "is_dropped"), [
    (CALLS, "lfm2", True),
    (CALLS, "qwen2_5", False),
    ([CALLS[0], {**CALLS[1], "train": False}, *CALLS[2:]], "lfm2", False),
    ([CALLS[0], {**CALLS[1], "content": "I look it up."}, *CALLS[2:]], "lfm2", False),
    ([USER, {**CALLS[1], "reasoning_content": "I look it up."}], "lfm2", True),  # neither is printed
])  # fmt: skip
def test_an_answer_of_which_the_template_prints_nothing_is_not_trained(
    qwen, write, tmp_path, turns, template, is_dropped
):
    rows = [{"messages": turns, "tools": TOOLS}, {"messages": chat(1)}]
    loaded = load_split(split(write("rows.jsonl", rows)), "sft")
    tokens = tokenize(loaded.dataset, "sft", qwen(template), tmp_path / "cache")
    kept, kept_tokens = without_empty_answers(loaded, tokens)
    assert len(kept.dataset) == len(kept_tokens) == 2 - is_dropped
    assert sum(kept.dropped.values()) == is_dropped
    assert kept_tokens[-1] == tokens[-1]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_of_any_name_is_trained(qwen, loaded, key):
    dataset = loaded([{"messages": [USER, {**LAST, key: "The sun is high."}]}])
    (example,) = encode(dataset[:], "sft", qwen("qwen3"), True)
    trained = qwen().decode([i for i, is_trained in zip(*example.sides[0], strict=True) if is_trained])
    assert trained == "<think>\nThe sun is high.\n</think>\n\n21 degrees.<|im_end|>"


def test_pairs_with_tools_are_the_templates_tokens(qwen, loaded):
    rejected = [*CALLS[:-1], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    dataset = loaded([{"chosen": CALLS, "rejected": rejected, "tools": TOOLS}], "dpo")
    assert check_template(qwen(), "dpo", False, dataset) == []
    (example,) = encode(dataset[:], "dpo", qwen(), False)
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
    for side, last in zip(example.sides, (LAST, call), strict=True):
        turns = [USER, call, RESULT, last]
        assert side.ids == qwen().apply_chat_template(turns, tools=TOOLS)["input_ids"]
    prompt = qwen().apply_chat_template([USER, call, RESULT], tools=TOOLS, add_generation_prompt=True)["input_ids"]
    assert example.num_prompt == len(prompt)


def test_variables_of_the_template_reach_it(qwen, loaded):
    flags = [{"enable_thinking": flag} for flag in (False, True)]
    tokenizer = qwen()
    tokenizer.chat_template += "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
    dataset = loaded([{"messages": [USER, LAST], "chat_template_kwargs": flag} for flag in flags])
    texts = [tokenizer.decode(example.sides[0].ids) for example in encode(dataset[:], "sft", tokenizer, False)]
    assert [text[-7:] for text in texts] == ["[False]", "\n[True]"]


def test_examples_with_tools_mix_with_others_and_are_held_out_by_the_same_hash(write):
    paths = [write("a.jsonl", [FORMS["OpenAI"]]), write("b.jsonl", [{"messages": chat(i)} for i in range(5)])]
    sources = [split(path, weight=1) for path in paths]
    mixed = mix([load_split(source, "sft") for source in sources], sources, seed=0).dataset
    assert len(mixed) == 6
    assert sorted(bool(row["tools"]) for row in mixed) == [False] * 5 + [True]
    assert Dataset.from_list([{"messages": chat(1)}])[0]["messages"] in [row["messages"] for row in mixed]


def test_tools_that_only_late_examples_have_are_never_ignored(write):
    rows = [*({"messages": chat(i)} for i in range(60)), FORMS["OpenAI"]]
    with pytest.raises(UserError, match=":61: has the key tools, which none of the first examples has"):
        load_split(split(write("rows.jsonl", rows)), "sft")
